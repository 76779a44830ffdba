"""A worker's copies of the rows that it pulled last: rows of frequent ids are not pulled for each minibatch. No torch.

A copy counts for `bound` steps of the job; then it is pulled again. So a minibatch may lack `bound` steps by its copies
beside those that `--staleness` allows anyway. The worker's own pushes reach a copy when it is pulled again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trueline.ps.partition import Ids
from trueline.ps.split import Rows
from trueline.ps.tables.id_index import IdIndex


@dataclass(slots=True)
class HotLookup:
    """What copies give of the `wanted` ids. `missing`: the ids to pull, by table; `oldest`: the step of the oldest copy
    that is used."""

    wanted: Mapping[str, Ids]
    missing: dict[str, Ids]
    oldest: int
    found: dict[str, tuple[npt.NDArray[np.bool_], Rows]] = field(default_factory=dict)


class _Copies:
    """Of one table, in a ring: the oldest make room."""

    def __init__(self, most: int, dim: int) -> None:
        self._most, self._next, self._index = most, 0, IdIndex()
        self._ids, self._used = np.zeros(most, np.int64), np.zeros(most, bool)
        self._rows, self._at = np.zeros((most, dim), np.float32), np.zeros(most, np.int64)

    def find(self, ids: Ids, since: int) -> tuple[npt.NDArray[np.bool_], Rows, npt.NDArray[np.int64]]:
        """Which ids have a copy of step `since` or later, these rows, and their steps."""
        places = self._index.find(ids)
        there = np.flatnonzero(places >= 0)
        there = there[self._at[places[there]] >= since]
        mask = np.zeros(len(ids), bool)
        mask[there] = True
        return mask, self._rows[places[there]], self._at[places[there]]

    def store(self, ids: Ids, rows: Rows, step: int) -> None:
        ids, rows = ids[-self._most :], rows[-self._most :]
        places = self._index.find(ids)
        known, new = places >= 0, places < 0
        self._rows[places[known]], self._at[places[known]] = rows[known], step
        count = int(new.sum())
        fresh = (self._next + np.arange(count)) % self._most
        self._next = (self._next + count) % self._most
        gone = fresh[self._used[fresh]]
        if len(gone):
            self._index.remove(self._ids[gone])
        self._ids[fresh], self._used[fresh] = ids[new], True
        self._rows[fresh], self._at[fresh] = rows[new], step
        self._index.add(self._ids[fresh], fresh)


class HotRows:
    """`most`: rows of each table; `bound`: steps for which a copy counts."""

    def __init__(self, most: int, bound: int) -> None:
        self._most, self._bound = most, bound
        self._tables: dict[str, _Copies] = {}
        self.step = 0
        """Of the job, as far as this worker knows."""
        self.lookups = self.hits = 0

    def note(self, step: int) -> None:
        self.step = max(self.step, step)

    def look_up(self, wanted: Mapping[str, Ids]) -> HotLookup:
        """`wanted`: unique ids by table."""
        lookup = HotLookup(wanted, {}, self.step)
        for table, ids in wanted.items():
            self.lookups += len(ids)
            missing = ids
            if (copies := self._tables.get(table)) is not None:
                mask, rows, steps = copies.find(ids, self.step - self._bound)
                if len(rows):
                    lookup.found[table], missing = (mask, rows), ids[~mask]
                    lookup.oldest = min(lookup.oldest, int(steps.min()))
                    self.hits += len(rows)
            if len(missing):
                lookup.missing[table] = missing
        return lookup

    def join(self, lookup: HotLookup, pulled: Mapping[str, Rows], step: int) -> dict[str, Rows]:
        """The rows of all wanted ids, of which `pulled` has the missing ones as of `step`; keeps copies of these."""
        result = {}
        for table, ids in lookup.wanted.items():
            mask, copies = lookup.found.get(table, (None, None))
            if table in lookup.missing:
                rows = pulled[table]
                if table not in self._tables:
                    self._tables[table] = _Copies(self._most, rows.shape[1])
                self._tables[table].store(lookup.missing[table], rows, step)
            if mask is None or copies is None:
                result[table] = pulled.get(table, np.empty((0, 0), np.float32))
                continue
            result[table] = np.empty((len(ids), copies.shape[1]), np.float32)
            result[table][mask] = copies
            if table in lookup.missing:
                result[table][~mask] = pulled[table]
        return result
