"""The rows of one minibatch: pulled by unique ids, looked up by the model's tables, their gradients summed by id.

    predict(inputs) ──▶ ids that the calls will look up, learnt from earlier minibatches   (so rows can be pulled ahead)
    minibatch(...)  ──▶ forward and backward of the model: calls of its tables read the pulled rows
    gradients()     ──▶ for each table unique ids and the sum of the gradients of each

A prediction saves time and never changes an answer: each call compares its ids with the predicted ones, and pulls its
rows where they differ.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils import _pytree as pytree

from trueline.errors import UsageError
from trueline.ps.model.embedding import Rows, TableModule, TableSettings
from trueline.ps.model.rows import sum_positions, take_positions
from trueline.ps.partition import Ids
from trueline.ps.tables.unique import find_unique

Puller = Callable[[dict[str, Ids]], Mapping[str, Rows]]
"""Unique ids by table -> their rows, float32 (n, dim)."""
Call = tuple[str, int]
"""A table, and the number of the call in the minibatch."""
_TRIES = 8
"""After this number of wrong predictions the ids of a call count as unpredictable."""


@dataclass(frozen=True, slots=True)
class InputColumns:
    """Where the ids of a call stand in the inputs: columns [start, start + width) of a leaf, seen as a matrix."""

    leaf: int
    start: int
    width: int


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """What the calls of a minibatch will look up. `wanted`: sorted unique ids by table."""

    wanted: dict[str, Ids]
    calls: dict[Call, tuple[Ids, Ids]]
    """Ids of a call, flat, and their positions in `wanted`."""


@dataclass(slots=True)
class Lookup:
    """Pulled rows, which one or more calls read. `expected`: calls that were predicted to."""

    ids: Ids
    rows: torch.Tensor
    padding: int | None
    expected: int = 1
    used: list[Ids] = field(default_factory=list)


class Tables:
    """The tables of `model` by name. Modules that have the same `name` share a table.

    Raises UsageError if modules of one name differ in their settings.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, list[TableModule]] = {}
        self.prefixes: dict[str, list[str]] = {}
        """For each table where its ids and rows stand in the model's state_dict: `prefix + "ids"`."""
        self._columns: dict[Call, InputColumns] = {}
        self._failures: dict[Call, int] = {}
        names = dict[TableModule, str]()
        for path, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, TableModule):
                self._add(names.setdefault(module, module.settings.name or path or "table"), path, module)

    def _add(self, name: str, path: str, module: TableModule) -> None:
        others = self.modules.setdefault(name, [])
        for other in others:
            if bool(other.settings.name) != bool(module.settings.name):
                raise UsageError(
                    f"two tables are named '{name}': one by its place in the model, and one by name='{name}'",
                    hint="give both that name, to share the table, or one of them another",
                )
            for what in (one for one in TableSettings.__struct_fields__ if one != "name"):
                mine, theirs = getattr(module.settings, what), getattr(other.settings, what)
                if mine != theirs:
                    raise UsageError(
                        f"two tables are named '{name}', with {what} {theirs} and {mine}",
                        hint="modules of one name share a table: give them the same settings, or two names",
                    )
        if module not in others:
            others.append(module)
        self.prefixes.setdefault(name, []).append(f"{path}." if path else "")

    def __len__(self) -> int:
        return len(self.modules)

    def settings(self, name: str) -> TableSettings:
        return self.modules[name][0].settings

    def state(self, name: str, ids: Ids, rows: Rows, initial: Callable[[Ids], Rows]) -> dict[str, torch.Tensor]:
        """The entries of the model's state_dict for a table: ids in any order, rows (n, dim). `initial`: values of ids
        without a row."""
        order = np.argsort(ids)
        entries = self.modules[name][0].state_entries(ids[order], rows[order], initial)
        return {prefix + key: value for prefix in self.prefixes[name] for key, value in entries.items()}

    def predict(self, inputs: Any) -> LookupPlan | None:
        """The ids that the calls for `inputs` will look up, as far as earlier minibatches told; None: unknown."""
        if not self._columns:
            return None
        leaves = _integer_leaves(inputs)
        flat: dict[str, list[tuple[int, Ids]]] = {}
        for (table, number), place in self._columns.items():
            if place.leaf < len(leaves) and place.start + place.width <= leaves[place.leaf].shape[1]:
                ids = leaves[place.leaf][:, place.start : place.start + place.width].reshape(-1)
                flat.setdefault(table, []).append((number, ids))
        wanted: dict[str, Ids] = {}
        calls: dict[Call, tuple[Ids, Ids]] = {}
        for table, called in flat.items():
            ids = called[0][1] if len(called) == 1 else np.concatenate([one for _, one in called])
            wanted[table], positions = find_unique(ids)
            ends = np.cumsum([len(one) for _, one in called])[:-1]
            for (number, one), where in zip(called, np.split(positions, ends), strict=True):
                calls[table, number] = one, where
        return LookupPlan(wanted, calls)

    @contextmanager
    def minibatch(
        self,
        pull: Puller,
        inputs: Any = None,
        *,
        prediction: LookupPlan | None = None,
        rows: Mapping[str, Rows] | None = None,
    ) -> Iterator["Minibatch"]:
        """Within the context the model's tables look up rows that `pull` returns, and `rows` for `prediction.wanted`.

        `inputs` is what the model is called with; its ids in later minibatches are predicted from it.
        """
        one = Minibatch(self, pull, inputs, prediction if rows is not None else None, rows or {})
        modules = [module for group in self.modules.values() for module in group]
        for module in modules:
            module.source = one
        for name, group in self.modules.items():
            for module in group:
                module.table = name
        try:
            yield one
        finally:
            for module in modules:
                module.source = None

    def learn(self, call: Call, ids: Ids, leaves: list[Ids], *, predicted: bool) -> None:
        """Notes where the ids of a call stand in the inputs. `predicted`: that was right already."""
        if predicted or self._failures.get(call, 0) >= _TRIES:
            return
        if call in self._columns:
            self._failures[call] = self._failures.get(call, 0) + 1
            del self._columns[call]
        found = _find_columns(ids, leaves)
        if found is None:
            self._failures[call] = self._failures.get(call, 0) + 1
        else:
            self._columns[call] = found


class Minibatch:
    """The lookups of one minibatch; made by `Tables.minibatch`."""

    def __init__(
        self, tables: Tables, pull: Puller, inputs: Any, prediction: LookupPlan | None, rows: Mapping[str, Rows]
    ) -> None:
        self._tables, self._pull, self._inputs = tables, pull, inputs
        self.trains = torch.is_grad_enabled()
        self._leaves: list[Ids] | None = None
        self._prediction = prediction
        self._counts: dict[str, int] = {}
        self._lookups: dict[str, list[Lookup]] = {}
        self._ahead: dict[str, Lookup] = {}
        for table, ids in (prediction.wanted if prediction is not None else {}).items():
            assert prediction is not None
            expected = sum(name == table for name, _ in prediction.calls)
            self._ahead[table] = self._hold(table, ids, rows[table], expected)

    def look_up(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """[*ids.shape, dim] The rows of `ids` (int64); their gradients are collected."""
        flat: Ids = ids.detach().reshape(-1).cpu().numpy()
        number = self._counts[table] = self._counts.get(table, 0) + 1
        lookup, positions = self._find(table, number, flat)
        lookup.used.append(positions)
        where = torch.from_numpy(positions).to(lookup.rows.device)
        if where.device.type != "cpu":
            return nn.functional.embedding(where.reshape(ids.shape), lookup.rows, lookup.padding)
        # the same values and gradients, whose sums take a fraction of the time: an embedding adds row by row
        return take_positions(lookup.rows, where).reshape(*ids.shape, lookup.rows.shape[1])

    def _find(self, table: str, number: int, flat: Ids) -> tuple[Lookup, Ids]:
        known = self._prediction.calls.get((table, number)) if self._prediction is not None else None
        right = known is not None and np.array_equal(known[0], flat)
        if self._inputs is not None and not right:
            self._leaves = _integer_leaves(self._inputs) if self._leaves is None else self._leaves
            self._tables.learn((table, number), flat, self._leaves, predicted=False)
        if right:
            assert known is not None
            return self._ahead[table], known[1]
        unique, positions = find_unique(flat)
        for lookup in self._lookups.get(table, []):  # a recomputed or repeated call
            if np.array_equal(lookup.ids, unique):
                return lookup, positions
        pulled = self._pull({table: unique})[table] if len(unique) else self._empty(table)
        return self._hold(table, unique, pulled, 1), positions

    def _empty(self, table: str) -> Rows:
        return np.empty((0, self._tables.settings(table).dim), dtype=np.float32)

    def _hold(self, table: str, ids: Ids, rows: Rows, expected: int) -> Lookup:
        padding = self._tables.settings(table).padding_idx
        at = None if padding is None else int(np.searchsorted(ids, padding))
        at = None if at is None or at == len(ids) or ids[at] != padding else at
        values = torch.from_numpy(rows if rows.flags.writeable else rows.copy())
        if at is not None:
            values = values.clone()
            values[at] = 0.0
        values = values.to(self._tables.modules[table][0].anchor.device)
        lookup = Lookup(ids, values.requires_grad_(), at, expected)
        self._lookups.setdefault(table, []).append(lookup)
        return lookup

    def gradients(self) -> dict[str, tuple[Ids, Rows]]:
        """After the backward: for each table its unique ids, sorted, and the sums of their gradients, float32 (n, dim).

        Ids that took no part, the padding among them, are left out.
        """
        found = {}
        for table, lookups in self._lookups.items():
            parts = [_gradient(one) for one in lookups if one.rows.grad is not None]
            if len(parts) == 1:
                found[table] = parts[0]
            elif parts:
                found[table] = sum_by_id(parts)
        return {table: (ids, rows) for table, (ids, rows) in found.items() if len(ids)}


def _gradient(lookup: Lookup) -> tuple[Ids, Rows]:
    assert lookup.rows.grad is not None
    ids, rows = lookup.ids, lookup.rows.grad.cpu().numpy()
    kept: npt.NDArray[np.bool_] | None = None
    if len(lookup.used) < lookup.expected:  # a wrong prediction: rows that no call has read
        kept = np.zeros(len(ids), dtype=bool)
        for positions in lookup.used:
            kept[positions] = True
    if lookup.padding is not None:
        kept = np.ones(len(ids), dtype=bool) if kept is None else kept
        kept[lookup.padding] = False
    return (ids, rows) if kept is None else (ids[kept], rows[kept])


def sum_by_id(parts: list[tuple[Ids, Rows]]) -> tuple[Ids, Rows]:
    """Unique ids, sorted, and the sums of their rows."""
    ids, positions = find_unique(np.concatenate([ids for ids, _ in parts]))
    rows = torch.from_numpy(np.concatenate([rows for _, rows in parts]))
    return ids, sum_positions(rows, torch.from_numpy(positions), len(ids)).numpy()


def _integer_leaves(inputs: Any) -> list[Ids]:
    """The integer tensors and arrays in `inputs`, each as an int64 matrix with a line for each record."""
    found = []
    for leaf in pytree.tree_leaves(inputs):
        values = leaf.detach().cpu().numpy() if _is_integer_tensor(leaf) else leaf
        if isinstance(values, np.ndarray) and values.dtype.kind in "iu" and values.ndim and values.size:
            found.append(values.reshape(len(values), -1).astype(np.int64, copy=False))
    return found


def _is_integer_tensor(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor):
        return False
    return not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)


def _find_columns(ids: Ids, leaves: list[Ids]) -> InputColumns | None:
    """
    >>> _find_columns(np.array([2, 5]), [np.array([[1, 2], [4, 5]])])
    InputColumns(leaf=0, start=1, width=1)
    """
    for number, leaf in enumerate(leaves):
        width, rest = divmod(len(ids), len(leaf))
        if rest or not 0 < width <= leaf.shape[1]:
            continue
        called = ids.reshape(len(leaf), width)
        for start in np.flatnonzero(leaf[0, : leaf.shape[1] - width + 1] == called[0, 0]):
            if np.array_equal(leaf[:, start : start + width], called):
                return InputColumns(number, int(start), width)
    return None
