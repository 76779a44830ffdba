"""From ids to places, by open addressing with linear probing, in whole arrays: no Python per id, and no reserved id.

A large index is searched and filled by `compiled.py`, where numba is installed.
"""

import numpy as np
import numpy.typing as npt

from trueline.ps.partition import Ids, mix
from trueline.ps.tables.numba_code import find_compiled
from trueline.ps.tables.slab import take_rows

Places = npt.NDArray[np.int64]
_EMPTY, _REMOVED = -1, -2
_LEAST = 1 << 10
_FULL = 0.55
"""Part of the slots in use at which the index doubles."""
COMPILED_FROM = 1 << 20
"""Slots from which the compiled search is used: for fewer it saves less than loading it takes."""
_PIECE = 1 << 14
"""Ids that are entered at a time."""
_FEW, _NEXT = 256, np.arange(1, 17)
"""Ids for which the next 16 slots are looked at together."""


def _continues(found: Places, ids: Ids) -> npt.NDArray[np.bool_]:
    """Whether the search for `ids` continues after the slots `found`, (..., 2): they are of others, or were removed."""
    others: npt.NDArray[np.bool_] = (found[..., 0] != ids) & (found[..., 1] != _EMPTY) | (found[..., 1] == _REMOVED)
    return others


class IdIndex:
    """`compiled`: use the compiled search and inserts, where they are."""

    def __init__(self, *, compiled: bool = True) -> None:
        self._compiled = compiled
        self._used = self.count = 0  # slots that are not empty; ids
        self._reset(_LEAST)

    def _reset(self, slots: int) -> None:
        self._slots = np.empty((slots, 2), np.int64)  # id and place side by side: one line of the cache
        self._slots[:, 1] = _EMPTY
        self._mask = np.int64(slots - 1)
        self._used = 0

    @property
    def is_large(self) -> bool:
        """Whether compiled functions are worth their time."""
        return self._compiled and len(self._slots) >= COMPILED_FROM

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes

    def count_growth(self, more: int) -> int:
        """Bytes that it takes for this number of further ids, beyond those that it has."""
        if self._used + more <= _FULL * len(self._slots):
            return 0
        return max(0, self._count_slots(self.count + more) * self._slots[:1].nbytes - self.nbytes)

    @staticmethod
    def _count_slots(ids: int) -> int:
        slots = _LEAST
        while ids > _FULL * slots * 0.8:
            slots *= 2
        return slots

    def _home(self, ids: Ids) -> Places:
        mixed = mix(ids.astype(np.uint64))
        mixed &= np.uint64(self._mask)
        return mixed.view(np.int64)

    def find(self, ids: Ids) -> Places:
        """The place of each id; -1 where it has none."""
        search = find_compiled("search") if self.is_large else None
        if search is not None:
            places = np.empty(len(ids), np.int64)
            search(self._slots, self._mask, np.ascontiguousarray(ids), places)
            return places
        at = self._home(ids)
        found = take_rows(self._slots, at)
        places = found[:, 1].copy()
        others = np.flatnonzero(_continues(found, ids))
        left, at = ids.take(others), at.take(others)
        while others.size > _FEW:
            at += 1
            at &= self._mask
            found = take_rows(self._slots, at)
            places[others] = found[:, 1]
            on = np.flatnonzero(_continues(found, left))
            others, left, at = others.take(on), left.take(on), at.take(on)
        while others.size:  # of the last ones several slots at once: most time goes into calls
            near = (at[:, None] + _NEXT) & self._mask
            found = take_rows(self._slots, near.reshape(-1)).reshape(*near.shape, 2)
            ends = ~_continues(found, left[:, None])
            first = ends.argmax(axis=1)
            rows = np.arange(len(left))
            places[others] = found[rows, first, 1]
            on = np.flatnonzero(~ends[rows, first])
            others, left, at = others.take(on), left.take(on), near[on, -1]
        return places

    def add(self, ids: Ids, places: Places) -> None:
        """Enters ids, which are unique and not there yet, with their places."""
        if self._used + len(ids) > _FULL * len(self._slots):
            self._grow(len(ids))
        self._insert(ids, places)
        self.count += len(ids)

    def _grow(self, more: int) -> None:
        kept = self._slots[self._slots[:, 1] >= 0]
        self._reset(self._count_slots(len(kept) + more))
        self._insert(kept[:, 0].copy(), kept[:, 1].copy())

    def _insert(self, ids: Ids, places: Places) -> None:
        """In pieces whose arrays stay in the processor's cache: in half the time of eight million ids at once."""
        self._used += len(ids)
        insert = find_compiled("insert") if self.is_large else None
        if insert is not None:
            insert(self._slots, self._mask, np.ascontiguousarray(ids), np.ascontiguousarray(places))
            return
        for start in range(0, len(ids), _PIECE):
            self._insert_piece(ids[start : start + _PIECE], places[start : start + _PIECE])

    def _insert_piece(self, ids: Ids, places: Places) -> None:
        at = self._home(ids)
        while ids.size:
            free = self._slots[at, 1] == _EMPTY
            spot = at[free]
            self._slots[spot, 0], self._slots[spot, 1] = ids[free], places[free]
            lost = np.ones(len(ids), bool)  # of several ids for one slot the last one has it
            lost[free] = self._slots[spot, 1] != places[free]
            ids, places, at = ids[lost], places[lost], (at[lost] + 1) & self._mask

    def remove(self, ids: Ids) -> Places:
        """Removes ids that are there; returns their places."""
        at = self._home(ids)
        pending = np.arange(len(ids))
        while pending.size:
            wrong = (self._slots[at[pending], 0] != ids[pending]) | (self._slots[at[pending], 1] < 0)
            pending = pending[wrong]
            at[pending] = (at[pending] + 1) & self._mask
        places: Places = self._slots[at, 1].copy()
        self._slots[at, 1] = _REMOVED
        self.count -= len(ids)
        return places
