"""An embedding table of one server: rows by id, with the optimizer's slots beside them. Pure.

A row is made with its first gradient; until then, and for ids that get none, its value is the initial one. Rows lie
where they were made, so tables grow without a copy; rows that went leave places for new ones.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trueline.ps.messages import BUCKETS, ModelSpec, OptimizerSpec, TableSpec, TableStats
from trueline.ps.partition import Ids, buckets_of, table_key
from trueline.ps.tables.averages import RowAverages, advance
from trueline.ps.tables.id_index import IdIndex, Places
from trueline.ps.tables.initial import initial_rows
from trueline.ps.tables.numba_code import find_compiled
from trueline.ps.tables.optimizers import WIDE, Rows, find_step, slots_of, update
from trueline.ps.tables.sights import SightCounter
from trueline.ps.tables.slab import MOST_ROWS, put_rows, reserve, take_rows

Array = npt.NDArray[Any]
MakeEmpty = Callable[[tuple[int, int], npt.DTypeLike], npt.NDArray[Any]]
"""As numpy.empty."""
RECENT, MOST_RECALLED = 16, 1 << 17
"""Pulls whose places are kept for the push that follows, and the ids of the largest of them."""


class ServerTable:
    """`most`: rows that this server may have of it; 0: as many as memory takes. `ema`: the decay of its rows' averages;
    0: there are none."""

    def __init__(self, spec: TableSpec, optimizer: OptimizerSpec, seed: int, most: int = 0, ema: float = 0.0) -> None:
        self.spec, self.optimizer, self.seed, self.most = spec, optimizer, seed, most
        self._index = IdIndex()
        self._recent: deque[tuple[Ids, Places]] = deque(maxlen=RECENT)
        self._slots = slots_of(optimizer)
        self._ids: Ids = reserve(1, np.int64)[:, 0]
        self._rows: Rows = reserve(spec.dim, np.float32)
        self._state: list[Rows] = [reserve(spec.dim if width == WIDE else 1, np.float32) for _, width, _ in self._slots]
        self._averages = RowAverages(ema, spec.dim) if ema else None
        self._used_at: Array | None = reserve(1, np.int64)[:, 0] if spec.evict else None
        """Of each row: when it was last used (lru), or how often (lfu)."""
        self._seen = SightCounter() if spec.admit_after else None
        """Pushes of ids that are not admitted yet."""
        self.row_bytes = self._count_row_bytes()
        self._end = 0  # places that were ever used
        self._free: Places = np.empty(0, np.int64)  # of them, those without a row
        self._clock = 0
        self.lookups = self.evicted = self.refused = 0
        self.busy_s = 0.0

    @property
    def rows(self) -> int:
        return self._index.count

    def _count_row_bytes(self) -> int:
        wide = 1 + sum(width == WIDE for _, width, _ in self._slots)
        narrow = len(self._slots) + 1 - wide
        averages = 0 if self._averages is None else 4 * self.spec.dim + 8
        return 4 * (wide * self.spec.dim + narrow) + 8 * (1 + (self._used_at is not None)) + averages

    def count_growth(self, ids: Ids, *, exact: bool = False) -> int:
        """Bytes that a push of these ids takes, at most; `exact`: of those that have no row yet."""
        new = int((self._index.find(ids) < 0).sum()) if exact else len(ids)
        if self.most:  # beyond these a row makes room, or there is none
            new = min(new, max(0, self.most - self.rows))
        return max(0, new - len(self._free)) * self.row_bytes + self._index.count_growth(new)

    @property
    def stats(self) -> TableStats:
        return TableStats(
            name=self.spec.name, rows=self.rows,
            bytes=self.rows * self.row_bytes + self._index.nbytes + (0 if self._seen is None else self._seen.nbytes),
            lookups=self.lookups, evicted=self.evicted, refused=self.refused, busy_s=self.busy_s,
        )  # fmt: skip

    def get(self, ids: Ids, averaged_at: int | None = None, empty: MakeEmpty = np.empty) -> Rows:
        """float32 (len(ids), dim): the rows of `ids`, int64 in any order; creates nothing. `averaged_at`: their
        averages after this number of steps. `empty` makes the array."""
        self.lookups += len(ids)
        places = self._index.find(ids)
        if 0 < len(ids) <= MOST_RECALLED:
            self._recent.append((ids.copy(), places))
        rows = self._take(places, empty((len(places), self.spec.dim), np.float32))
        if averaged_at is not None and self._averages is not None:
            rows = self._averages.read(places, rows, averaged_at)
        missing = np.flatnonzero(places < 0)
        if missing.size:
            rows[missing] = initial_rows(self.spec, self.seed, ids[missing])
        return rows

    def _take(self, places: Places, taken: Rows) -> Rows:
        take = find_compiled("take") if self._index.is_large else None
        if take is None:
            return take_rows(self._rows, places, taken)
        take(self._rows, places, taken)
        return taken

    def apply(self, ids: Ids, gradients: Rows, lr: float, step: int = 0) -> None:
        """Step `step` of the optimizer for the rows of `ids`, which are unique; makes those that are missing."""
        self._clock += 1
        places = self._recall(ids)
        missing = np.flatnonzero(places < 0)
        if missing.size:
            made = missing[self._admit(ids[missing], places[places >= 0])]
            places[made] = self._make(ids[made], step)
            kept = places >= 0
            if not kept.all():
                self.refused += len(ids) - int(kept.sum())
                places, gradients = places[kept], gradients[kept]
        if self._used_at is not None:
            self._used_at[places] = self._clock if self.spec.evict == "lru" else self._used_at[places] + 1
        compiled = find_step(self.optimizer) if self._index.is_large and self._averages is None else None
        if compiled is not None:
            compiled(self._rows, places, gradients, self._state, lr)
            return
        rows = take_rows(self._rows, places)
        before = rows.copy() if self._averages is not None else rows
        state = [take_rows(slot, places) for slot in self._state]
        update(self.optimizer, rows, gradients, state, lr)
        if self._averages is not None:
            self._averages.take(places, before, rows, step)
        put_rows(self._rows, places, rows)
        for slot, values in zip(self._state, state, strict=True):
            put_rows(slot, places, values)

    def _recall(self, ids: Ids) -> Places:
        """As the index finds them. A push mostly has the ids of a pull shortly before; rows that were made since are
        looked up."""
        for at, (others, places) in enumerate(self._recent):
            if len(ids) == len(others) and len(ids) and ids[-1] == others[-1] and np.array_equal(ids, others):
                del self._recent[at]
                missing = np.flatnonzero(places < 0)
                if missing.size:
                    places[missing] = self._index.find(ids[missing])
                return places
        return self._index.find(ids)

    def _admit(self, ids: Ids, busy: Places) -> npt.NDArray[np.bool_]:
        """Which of these ids without a row get one now. `busy`: places of rows that this push changes, which stay."""
        seen = self._seen
        admitted = np.ones(len(ids), bool) if seen is None else seen.note(ids, self.spec.admit_after)
        if self.most:
            wanted = np.flatnonzero(admitted)
            lacking = self.rows + len(wanted) - self.most
            if lacking > 0 and self.spec.evict:
                lacking -= self._evict(lacking, busy)
            if lacking > 0:  # more than are wanted where a move brought rows
                admitted[wanted[max(0, len(wanted) - lacking) :]] = False
        return admitted

    def _evict(self, count: int, busy: Places) -> int:
        """Drops the `count` rows that were used longest ago, or least; of equal ones those of the smallest ids. Returns
        how many there were beside the `busy` ones."""
        assert self._used_at is not None
        live = self._live()
        if live is None:
            live = np.arange(self._end)
        live = live[~np.isin(live, busy)]
        count = min(count, len(live))
        if not count:
            return 0
        used = self._used_at[live]
        candidates = live if count == len(live) else live[used <= np.partition(used, count - 1)[count - 1]]
        order = np.lexsort((self._ids[candidates], self._used_at[candidates]))
        self.drop(self._ids[candidates[order[:count]]])
        self.evicted += count
        return count

    def _make(self, ids: Ids, step: int) -> Places:
        """Makes rows with their initial values; returns their places."""
        places = self._take_places(len(ids))
        self._rows[places] = rows = initial_rows(self.spec, self.seed, ids)
        if self._averages is not None:
            self._averages.begin(places, rows, step)
        for slot, (_, _, value) in zip(self._state, self._slots, strict=True):
            slot[places] = value
        if self._used_at is not None:
            self._used_at[places] = 0
        self._ids[places] = ids
        self._index.add(ids, places)
        return places

    def _take_places(self, count: int) -> Places:
        again = min(count, len(self._free))
        reused, self._free = self._free[len(self._free) - again :], self._free[: len(self._free) - again]
        fresh = count - again
        if self._end + fresh > MOST_ROWS:
            raise MemoryError(f"table {self.spec.name} has {self.rows} rows at this server, which is all that it takes")
        new = np.arange(self._end, self._end + fresh, dtype=np.int64)
        self._end += fresh
        return np.concatenate((reused, new)) if again else new

    def drop(self, ids: Ids) -> None:
        """Removes the rows of `ids`, which are there."""
        self._recent.clear()
        self._free = np.concatenate((self._free, self._index.remove(ids)))

    def _live(self) -> Places | None:
        """The places that have a row, ascending; None: all that were ever used."""
        if not len(self._free):
            return None
        gone = np.zeros(self._end, bool)
        gone[self._free] = True
        return np.flatnonzero(~gone)

    def find(self, buckets: Sequence[int]) -> Ids:
        """The ids whose rows are in these buckets."""
        ids = self._ids[: self._end] if (live := self._live()) is None else self._ids[live]
        return ids[self._lie_in(buckets, ids)]

    def _lie_in(self, buckets: Sequence[int], ids: Ids) -> npt.NDArray[np.bool_]:
        wanted = np.zeros(BUCKETS, bool)
        wanted[np.asarray(buckets, np.int64)] = True
        lie_in = find_compiled("lie_in") if self._index.is_large else None
        if lie_in is not None:
            lying = np.empty(len(ids), bool)
            lie_in(np.ascontiguousarray(ids), np.uint64(table_key(self.spec.name)), wanted, lying)
            return lying
        return wanted[buckets_of(ids, self.spec.name).astype(np.int64)]

    def list_seen(self, buckets: Sequence[int]) -> list[tuple[int, int]]:
        """The ids in these buckets that are not admitted yet, and how often each was seen."""
        if self._seen is None:
            return []
        ids, counts = self._seen.list()
        lying = self._lie_in(buckets, ids)
        return list(zip(ids[lying].tolist(), counts[lying].tolist(), strict=True))

    def take_seen(self, seen: Sequence[tuple[int, int]], buckets: Sequence[int] | None) -> None:
        """Takes from `list_seen` what is in these buckets; None: all."""
        if self._seen is None or not seen:
            return
        ids, counts = np.array([one for one, _ in seen], np.int64), np.array([count for _, count in seen], np.int32)
        kept = np.ones(len(ids), bool) if buckets is None else self._lie_in(buckets, ids)
        self._seen.take(ids[kept], counts[kept])

    def forget_seen(self, buckets: Sequence[int]) -> None:
        if self._seen is not None:
            self._seen.drop(np.array([one for one, _ in self.list_seen(buckets)], np.int64))

    @property
    def columns(self) -> int:
        """How many arrays `dump` and `export` give."""
        return len(list(self._all()))

    def _all(self) -> Iterator[Array]:
        yield self._ids
        yield self._rows
        yield from self._state
        if self._averages is not None:
            yield from self._averages.arrays
        if self._used_at is not None:
            yield self._used_at

    def dump(self) -> list[Array]:
        """Ids, rows, slots, averages and uses of all rows: views where no place is free."""
        live = self._live()
        return [one[: self._end] if live is None else one[live] for one in self._all()]

    def export(self, ids: Ids) -> list[Array]:
        """As `dump`, of the rows of `ids`, which are there."""
        places = self._index.find(ids)
        return [one[places] for one in self._all()]

    def load(self, arrays: Sequence[Array]) -> None:
        """Takes rows from `dump` or `export`; those that are there already are replaced."""
        ids = arrays[0]
        where: Places | slice
        if not self._end:  # what is loaded first lies in one piece
            where = slice(0, len(ids))
            self._index.add(ids, self._take_places(len(ids)))
        else:
            where = self._index.find(ids)
            missing = where < 0
            if missing.any():
                where[missing] = self._take_places(int(missing.sum()))
                self._index.add(ids[missing], where[missing])
        for own, given in zip(self._all(), arrays, strict=True):
            own[where] = given
        if self._used_at is not None and self.spec.evict == "lru" and len(ids):
            self._clock = max(self._clock, int(arrays[-1].max()))

    def describe(self) -> dict[str, Any]:
        """What the arrays do not say, for a dump."""
        seen = [] if self._seen is None else list(zip(*(one.tolist() for one in self._seen.list()), strict=True))
        counts = {"lookups": self.lookups, "evicted": self.evicted, "refused": self.refused}
        return {**counts, "clock": self._clock, "seen": seen}

    def restore(self, facts: dict[str, Any]) -> None:
        self.lookups, self.evicted, self.refused = facts["lookups"], facts["evicted"], facts["refused"]
        self._clock = facts["clock"]
        self.take_seen(facts["seen"], None)


def read_averages(spec: ModelSpec, name: str, columns: Sequence[Array], steps: int) -> Rows:
    """The moving averages of a table's rows after `steps` steps, from its `dump`."""
    table = next(one for one in spec.tables if one.name == name)
    first = 2 + len(slots_of(spec.groups[table.group]))
    return advance(spec.ema, columns[first], columns[first + 1], columns[1], steps)
