"""How often ids without a row were trained, until they get one: 48 bytes an id, in whole arrays. Pure."""

import numpy as np
import numpy.typing as npt

from trueline.ps.partition import Ids
from trueline.ps.tables.id_index import IdIndex, Places
from trueline.ps.tables.slab import reserve

Counts = npt.NDArray[np.int32]


class SightCounter:
    def __init__(self) -> None:
        self._index = IdIndex()
        self._ids: Ids = reserve(1, np.int64)[:, 0]
        self._counts: Counts = reserve(1, np.int32)[:, 0]
        self._end = 0  # places that were ever used
        self._free: Places = np.empty(0, np.int64)  # of them, those without an id

    def __len__(self) -> int:
        return self._index.count

    @property
    def nbytes(self) -> int:
        return len(self) * (8 + 4) + self._index.nbytes

    def note(self, ids: Ids, least: int) -> npt.NDArray[np.bool_]:
        """Which of these unique ids were seen `least` times before, at least 1; they are forgotten, and the others are
        counted once more."""
        places = self._index.find(ids)
        missing = np.flatnonzero(places < 0)
        if missing.size:
            places[missing] = self._enter(ids[missing])
        ripe: npt.NDArray[np.bool_] = self._counts[places] >= least
        self._counts[places[~ripe]] += 1
        self.drop(ids[ripe])
        return ripe

    def _enter(self, ids: Ids) -> Places:
        again = min(len(ids), len(self._free))
        reused, self._free = self._free[len(self._free) - again :], self._free[: len(self._free) - again]
        places = np.concatenate((reused, np.arange(self._end, self._end + len(ids) - again)))
        self._end += len(ids) - again
        self._ids[places], self._counts[places] = ids, 0
        self._index.add(ids, places)
        return places

    def take(self, ids: Ids, counts: Counts) -> None:
        """Enters ids that were counted elsewhere; those that are there already are replaced."""
        places = self._index.find(ids)
        missing = np.flatnonzero(places < 0)
        places[missing] = self._enter(ids[missing])
        self._counts[places] = counts

    def drop(self, ids: Ids) -> None:
        """Forgets ids that are there."""
        self._free = np.concatenate((self._free, self._index.remove(ids)))

    def list(self) -> tuple[Ids, Counts]:
        live = np.ones(self._end, bool)
        live[self._free] = False
        return self._ids[: self._end][live], self._counts[: self._end][live]
