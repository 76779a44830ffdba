"""All that one server holds: its rows of every table, its dense parts, and which minibatches these contain.

A deterministic state machine without I/O: the same calls in the same order give the same bits.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from trueline.clock import Clock
from trueline.errors import TrainError
from trueline.ps.messages import ModelSpec, Routing, Runs, TableStats
from trueline.ps.partition import Ids, buckets_of, owners_of
from trueline.ps.split import parts_of
from trueline.ps.tables.applied import AppliedRanges
from trueline.ps.tables.dense import DenseStore
from trueline.ps.tables.optimizers import Rows
from trueline.ps.tables.table import MakeEmpty, ServerTable

Array = npt.NDArray[Any]


class GradientError(TrainError):
    """A push that cannot be applied. Nothing of it is."""

    code = "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """The gradients of one minibatch for one server."""

    epoch: int
    minibatch: int
    part: int
    parts: int
    """Minibatches of the optimizer's step: their weighted mean is its gradient."""
    weight: float
    lrs: tuple[float, ...]
    """Learning rates, by group."""
    tables: list[tuple[str, Ids, Rows]]
    """Name, unique int64 ids, float32 (n, dim) gradients."""
    dense: list[Rows]
    """Flat float32, in the order of the routing's parts for this server; of buffers their values."""
    attempt: int = 0
    """Above 0: the push is part `part` of this attempt at step `minibatch`, whose gradient is the sum of its parts."""
    scale: float = 0.0
    """Above 0: the last part of an attempt, without rows. The sum of the other parts is multiplied by it."""


class Held:
    """`index`: the number of this server in the routing. `clock`: seconds, for `TableStats.busy_s`."""

    clock: Clock = staticmethod(lambda: 0.0)

    def __init__(self, spec: ModelSpec, routing: Routing, index: int) -> None:
        self.spec, self.routing, self.index = spec, routing, index
        self.steps = 0
        self._applied = AppliedRanges()
        self._waiting: dict[tuple[int, int], dict[int, Push]] = {}
        """Of steps that lack parts: (epoch, first minibatch) -> part -> push."""
        self._squares = -1, -1, 0.0
        """Epoch and step of the last attempt with a `scale`, and what `sum_squares` returned for it."""
        self._tables: dict[str, ServerTable] = {}
        for one in spec.tables:
            most = -(-one.max_rows // len(routing.servers))
            self._tables[one.name] = ServerTable(one, spec.groups[one.group], spec.seed, most, spec.ema)
        self._dense = DenseStore(spec, parts_of(routing, index))

    @property
    def initialized(self) -> bool:
        """Whether the dense values are there; the first worker gives them."""
        return self._dense.initialized

    def initialize(self, dense: Mapping[str, Rows]) -> None:
        """Sets the dense parts, by `split.name_part`; once they are there, nothing changes."""
        if not self._dense.initialized:
            self._dense.initialize(dense)

    @property
    def stats(self) -> tuple[TableStats, ...]:
        return tuple(table.stats for table in self._tables.values())

    @property
    def num_parts(self) -> int:
        """Pushes that wait for the other parts of their step."""
        return sum(map(len, self._waiting.values()))

    def has(self, epoch: int, minibatch: int) -> bool:
        """Whether a push of it was taken: it would be taken no more."""
        return (epoch, minibatch) in self._applied

    def list_applied(self) -> dict[int, Runs]:
        return self._applied.runs()

    def pull(
        self, tables: Sequence[tuple[str, Ids]], dense: bool, averaged: bool = False, empty: MakeEmpty = np.empty
    ) -> tuple[list[Rows], list[Rows]]:
        """Rows of each table's ids, or their averages, in arrays that `empty` makes, and views of the dense parts.
        Raises GradientError for an unknown table."""
        rows = []
        for name, ids in tables:
            table, began = self._table(name), self.clock()
            rows.append(table.get(ids, self.steps if averaged else None, empty))
            table.busy_s += self.clock() - began
        return rows, self._dense.values() if dense else []

    def _table(self, name: str) -> ServerTable:
        try:
            return self._tables[name]
        except KeyError:
            raise GradientError(
                f"there is no table '{name}'", hint=f"the model has {', '.join(self._tables) or 'none'}"
            ) from None

    def check(self, push: Push) -> None:
        """Raises GradientError for what `push` cannot apply."""
        if len(push.lrs) != len(self.spec.groups):
            raise GradientError(f"{len(push.lrs)} learning rates, expected {len(self.spec.groups)}")
        if not np.isfinite(push.lrs).all():
            raise GradientError(f"the learning rates are {push.lrs}, expected finite numbers")
        weighs = 0 < push.weight < np.inf or (push.attempt and push.weight == 0)
        if not 0 <= push.part < push.parts or not weighs:
            raise GradientError(f"part {push.part} of {push.parts} with weight {push.weight}")
        if push.attempt and push.minibatch != self.steps:
            raise GradientError(f"a part of step {push.minibatch} after {self.steps} steps")
        for name, ids, rows in push.tables:
            dim = self._table(name).spec.dim
            if ids.dtype != np.int64:
                raise GradientError(f"table {name}: ids are {ids.dtype}, expected int64")
            if rows.dtype != np.float32 or rows.shape != (len(ids), dim):
                raise GradientError(
                    f"table {name}: gradients are {rows.dtype} {rows.shape}, expected float32 {(len(ids), dim)}"
                )
            if len(ids) > 1 and not (ids[1:] > ids[:-1]).all() and len(np.unique(ids)) < len(ids):
                raise GradientError(f"table {name}: the ids of a push are not unique", hint="sum their gradients first")
            flat = rows.reshape(-1)
            if not np.isfinite(np.dot(flat, flat)):  # or finite numbers whose squares are too large
                self._refuse_rows(name, ids, rows)
        self._dense.check(push.dense)

    def count_growth(self, push: Push, *, exact: bool = False) -> int:
        """Bytes that its new rows take, at most; `exact`: of the ids that have no row yet."""
        return sum(self._tables[name].count_growth(ids, exact=exact) for name, ids, _ in push.tables)

    def _refuse_rows(self, name: str, ids: Ids, rows: Rows) -> None:
        bad = ids[~np.isfinite(rows).all(axis=1)]
        if len(bad):
            shown = ", ".join(map(str, bad[:5].tolist())) + (", …" if len(bad) > 5 else "")
            raise GradientError(
                f"table {name}: the gradients of {len(bad)} ids are NaN or Inf: {shown}",
                hint="look at records with these ids, lower the learning rate, or add --clip-norm",
            )

    def push(self, push: Push) -> bool:
        """Applies a checked push, or keeps it until its step is complete. False: it was taken before."""
        if push.attempt:
            return self._gather(push)
        if not self._applied.add(push.epoch, push.minibatch):
            return False
        if push.parts == 1:
            self._step(push)
            return True
        step = push.epoch, push.minibatch - push.part
        parts = self._waiting.setdefault(step, {})
        parts[push.part] = _copy(push)
        if len(parts) == push.parts:
            del self._waiting[step]
            self._step(_merge([parts[part] for part in sorted(parts)], self._dense.buffers()))
        return True

    def _gather(self, push: Push) -> bool:
        """Keeps a part of an attempt at a step, in the place of earlier attempts, until all parts are there."""
        key = push.epoch, push.minibatch
        if self.has(*key):
            return False
        parts = self._waiting.setdefault(key, {})
        newest = max((one.attempt for one in parts.values()), default=push.attempt)
        if push.attempt < newest:
            return False
        if push.attempt > newest:
            parts.clear()
        parts[push.part] = _copy(push)
        if len(parts) == push.parts:
            del self._waiting[key]
            self._applied.add(*key)
            self._step(self._scale(_merge([parts[part] for part in sorted(parts)], ()), parts.values()))
        return True

    def _scale(self, merged: Push, parts: Iterable[Push]) -> Push:
        scale = next((one.scale for one in parts if one.scale), 0.0)
        if not scale:
            return merged
        self._squares = merged.epoch, merged.minibatch, _sum_squares(merged)
        return replace(merged, tables=[(name, ids, rows * np.float32(scale)) for name, ids, rows in merged.tables])

    def sum_squares(self, epoch: int, step: int) -> float:
        """The sum of the squares of the rows' gradients of a step whose parts wait for their `scale`, or of the last
        one that had one. Raises GradientError for another step."""
        if (parts := self._waiting.get((epoch, step))) is not None:
            return _sum_squares(_merge([parts[part] for part in sorted(parts)], ()))
        if self._squares[:2] == (epoch, step):
            return self._squares[2]
        raise GradientError(f"there are no gradients of step {step}, after {self.steps} steps")

    def _step(self, push: Push) -> None:
        for name, ids, rows in push.tables:
            if len(ids):
                table, began = self._tables[name], self.clock()
                table.apply(ids, rows, push.lrs[table.spec.group], self.steps)
                table.busy_s += self.clock() - began
        self._dense.apply(push.dense, push.lrs)
        self.steps += push.epoch >= 0  # those below 0 are of other clients than the job's workers

    def dump(self) -> tuple[dict[str, Any], list[Array]]:
        """Everything, as a header for msgpack and arrays; `load` makes an equal server of it."""
        return self._pack({name: table.dump() for name, table in self._tables.items()}, dense=True, whole=True)

    @classmethod
    def load(cls, header: dict[str, Any], arrays: Sequence[Array]) -> Self:
        spec = msgspec.msgpack.decode(header["spec"], type=ModelSpec)
        routing = msgspec.msgpack.decode(header["routing"], type=Routing)
        held = cls(spec, routing, header["index"])
        held._unpack(header, arrays, all_rows=True)
        for name, facts in header["tables"].items():
            held._tables[name].restore(facts)
        held._squares = tuple(header.get("squares", held._squares))
        at = header["waiting_from"]
        for facts in header["waiting"]:
            push, at = _unpack_push(facts, arrays, at)
            first = push.minibatch if push.attempt else push.minibatch - push.part
            held._waiting.setdefault((push.epoch, first), {})[push.part] = push
        return held

    def export(self, buckets: Sequence[int]) -> tuple[dict[str, Any], list[Array]]:
        """The rows in these buckets, for `take` at another server; without buckets, the dense parts."""
        rows = {name: table.export(table.find(buckets)) for name, table in self._tables.items()} if buckets else {}
        header, arrays = self._pack(rows, dense=not buckets, whole=False)
        header["seen"] = {name: table.list_seen(buckets) for name, table in self._tables.items()} if buckets else {}
        return header, arrays

    def take(self, header: dict[str, Any], arrays: Sequence[Array]) -> None:
        """Takes, of a `dump`, what the routing gives to this server; of an `export` all, for the next routing."""
        moved = header.get("moved", False)
        self._unpack(header, arrays, all_rows=moved)
        own = np.flatnonzero(owners_of(self.routing) == self.index).tolist()
        whole = {name: facts["seen"] for name, facts in header.get("tables", {}).items()}
        for name, seen in header.get("seen", whole).items():
            self._tables[name].take_seen(seen, None if moved else own)

    def reroute(self, routing: Routing) -> None:
        """Drops what is another server's from now on; what is new here, `take` brought before or brings now. Only in a
        cut: no step waits."""
        name = self.routing.servers[self.index]
        self.routing, self.index = routing, routing.servers.index(name)
        foreign = np.flatnonzero(owners_of(routing) != self.index).tolist()
        for table in self._tables.values():
            table.drop(table.find(foreign))
            table.forget_seen(foreign)
            table.most = -(-table.spec.max_rows // len(routing.servers))
        self._dense.place(parts_of(routing, self.index))

    def _pack(self, rows: Mapping[str, list[Array]], *, dense: bool, whole: bool) -> tuple[dict[str, Any], list[Array]]:
        arrays: list[Array] = []
        columns = {}
        for name, of in rows.items():
            columns[name] = len(of)
            arrays += of
        parts = self._dense.dump() if dense else []
        header: dict[str, Any] = {
            "steps": self.steps, "applied": [(epoch, list(runs)) for epoch, runs in self.list_applied().items()],
            "columns": columns, "dense": [facts for facts, _ in parts], "initialized": self.initialized,
            "moved": not whole,
        }  # fmt: skip
        for _, of in parts:
            arrays += of
        if whole:
            header |= {
                "spec": msgspec.msgpack.encode(self.spec),
                "routing": msgspec.msgpack.encode(self.routing),
                "index": self.index,
            }
            header |= {"tables": {name: table.describe() for name, table in self._tables.items()}}
            header |= {"waiting_from": len(arrays), "waiting": [], "squares": list(self._squares)}
            for waiting in self._waiting.values():
                for push in waiting.values():
                    header["waiting"].append(_pack_push(push, arrays))
        return header, arrays

    def _unpack(self, header: dict[str, Any], arrays: Sequence[Array], *, all_rows: bool) -> None:
        own = owners_of(self.routing) == self.index
        at = 0
        for name, columns in header["columns"].items():
            table, of = self._tables[name], list(arrays[at : at + columns])
            at += columns
            if not all_rows and len(of[0]):
                kept = own[buckets_of(np.array(of[0]), name).astype(np.int64)]
                of = [one[kept] for one in of]
            if len(of[0]):
                table.load(of)
        for facts in header["dense"]:
            count = facts["arrays"]
            self._dense.load(facts, arrays[at : at + count], keep=header.get("moved", False))
            at += count
        if header["initialized"]:
            self._dense.initialized = True
        if not self.steps and not self.list_applied():
            self.steps = header["steps"]
            self._applied = AppliedRanges({epoch: [tuple(run) for run in runs] for epoch, runs in header["applied"]})


def _merge(parts: Sequence[Push], buffers: Sequence[int]) -> Push:
    """One push with the weighted mean of the gradients of `parts`, added in their order; of buffers the last values. Of
    an attempt it is their sum, and only parts with a weight tell learning rates."""
    total = sum(push.weight for push in parts)
    shares = [np.float32(1.0 if push.attempt else push.weight / total) for push in parts]
    names = list(dict.fromkeys(name for push in parts for name, _, _ in push.tables))
    tables = []
    for name in names:
        pieces = [(ids, rows * share) for push, share in zip(parts, shares, strict=True)
                  for other, ids, rows in push.tables if other == name]  # fmt: skip
        ids = np.concatenate([ids for ids, _ in pieces])
        rows = np.concatenate([rows for _, rows in pieces])
        order = np.argsort(ids, kind="stable")
        unique, first = np.unique(ids[order], return_index=True)
        tables.append((name, unique, np.add.reduceat(rows[order], first, axis=0) if len(first) else rows))
    dense = [sum_in_order([push.dense[at] for push in parts], shares) for at in range(len(parts[0].dense))]
    last = next((push for push in reversed(parts) if push.weight), parts[-1])
    for at in buffers:
        dense[at] = last.dense[at]
    return Push(
        epoch=last.epoch, minibatch=last.minibatch, part=0, parts=1, weight=total, lrs=last.lrs, tables=tables,
        dense=dense,
    )  # fmt: skip


def _sum_squares(push: Push) -> float:
    flat = [rows.reshape(-1).astype(np.float64) for _, _, rows in push.tables]
    return float(sum(np.dot(one, one) for one in flat))


def sum_in_order(values: Sequence[Rows], shares: Sequence[np.float32]) -> Rows:
    """The weighted sum, added from the first to the last."""
    total = values[0] * shares[0]
    for value, share in zip(values[1:], shares[1:], strict=True):
        total += value * share
    return total


def _copy(push: Push) -> Push:
    """With arrays of its own: those of a frame are overwritten by the next one."""
    tables = [(name, ids.copy(), rows.copy()) for name, ids, rows in push.tables]
    return Push(
        epoch=push.epoch, minibatch=push.minibatch, part=push.part, parts=push.parts, weight=push.weight, lrs=push.lrs,
        tables=tables, dense=[one.copy() for one in push.dense], attempt=push.attempt, scale=push.scale,
    )  # fmt: skip


def _pack_push(push: Push, arrays: list[Array]) -> dict[str, Any]:
    for _, ids, rows in push.tables:
        arrays += [ids, rows]
    arrays += push.dense
    return {
        "epoch": push.epoch, "minibatch": push.minibatch, "part": push.part, "parts": push.parts,
        "weight": push.weight, "lrs": list(push.lrs), "tables": [name for name, _, _ in push.tables],
        "dense": len(push.dense), "attempt": push.attempt, "scale": push.scale,
    }  # fmt: skip


def _unpack_push(facts: dict[str, Any], arrays: Sequence[Array], at: int) -> tuple[Push, int]:
    tables = [(name, arrays[at + 2 * n], arrays[at + 2 * n + 1]) for n, name in enumerate(facts["tables"])]
    at += 2 * len(tables)
    stop = at + facts["dense"]
    push = Push(
        epoch=facts["epoch"], minibatch=facts["minibatch"], part=facts["part"], parts=facts["parts"],
        weight=facts["weight"], lrs=tuple(facts["lrs"]), tables=tables, dense=list(arrays[at:stop]),
        attempt=facts["attempt"], scale=facts.get("scale", 0.0),
    )  # fmt: skip
    return push, stop
