"""A shuffled order with locality: blocks of records are shuffled, and records within a window of blocks.

    units     0........ 1........ 2........ 3........      row groups, chunks, runs of lines
    blocks    2........ 0........ 3........ 1........      permuted by (seed, epoch); long units are cut
    windows   [ 2 0           ] [ 3 1           ]          at least `window_records` each
    records   permuted inside their window, each by its own key

Every block belongs to one window of an epoch and is decoded once, while a batch mixes records of all blocks of its
window. Each position is computed by itself from a few numbers for each block; both permutations are
`permutation.record_at`. docs/concepts/order.md measures how well it mixes, and the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trueline.data.order.permutation import key_of, record_at
from trueline.data.order.record_orders import check_positions
from trueline.errors import DataError

Ints = npt.NDArray[np.signedinteger[Any]]

BLOCK_RECORDS = 16384
WINDOW_RECORDS = 65536
_BLOCKS, _RECORDS = 1, 2


class Counted(Protocol):
    @property
    def count(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Epoch:
    """Blocks in the order of an epoch."""

    starts: Ints
    """First position of each block, and the number of records."""
    first: Ints
    """First record of each block."""


class WindowOrder:
    """The order of the records of `units`. Raises DataError for no records and for windows of less than one."""

    def __init__(
        self,
        units: Sequence[Counted],
        *,
        seed: int,
        window_records: int = WINDOW_RECORDS,
        block_records: int = BLOCK_RECORDS,
    ) -> None:
        counts = np.fromiter((unit.count for unit in units), np.int64, len(units))
        if not len(counts) or counts.min() < 1:
            raise DataError("a source without records, or with an empty unit, cannot be ordered")
        if window_records < 1 or block_records < 1:
            raise DataError(f"windows of {window_records} and blocks of {block_records} records; expected 1 or more")
        self._seed, self._window = seed, window_records
        self._first, self._counts = blocks_of(counts, block_records)
        self.num_records = int(counts.sum())
        self._epoch = lru_cache(maxsize=2)(self._arrange)

    def at(self, positions: npt.ArrayLike, *, epoch: int) -> Ints:
        """The records at `positions` of `epoch`: a bijection of [0, num_records). Raises DataError."""
        wanted = check_positions(positions, self.num_records)
        arranged = self._epoch(epoch)
        window = arranged.starts[np.searchsorted(arranged.starts, wanted, side="right") - 1] // self._window
        out = np.empty_like(wanted)
        for number in np.unique(window).tolist():
            here = window == number
            begin, end = self._bounds(arranged, number)
            key = key_of(self._seed, _RECORDS, number)
            inside = record_at(wanted[here] - begin, seed=key, epoch=epoch, num_records=end - begin) + begin
            block = np.searchsorted(arranged.starts, inside, side="right") - 1
            out[here] = arranged.first[block] + inside - arranged.starts[block]
        return out

    def _bounds(self, arranged: _Epoch, number: int) -> tuple[int, int]:
        """The positions of a window: of the blocks that begin in its `window_records` positions."""
        begin, end = np.searchsorted(arranged.starts, [number * self._window, (number + 1) * self._window])
        return int(arranged.starts[begin]), int(arranged.starts[min(end, len(arranged.starts) - 1)])

    def _arrange(self, epoch: int) -> _Epoch:
        count = len(self._counts)
        chosen = record_at(np.arange(count), seed=key_of(self._seed, _BLOCKS), epoch=epoch, num_records=count)
        starts = np.zeros(count + 1, np.int64)
        np.cumsum(self._counts[chosen], out=starts[1:])
        return _Epoch(starts, self._first[chosen])


def blocks_of(counts: Ints, block_records: int) -> tuple[Ints, Ints]:
    """First record and count of each block, with units of `counts` records cut evenly into blocks of at most
    `block_records`.

    >>> first, count = blocks_of(np.array([3, 10]), 4)
    >>> first.tolist(), count.tolist()
    ([0, 3, 7, 10], [3, 4, 3, 3])
    """
    pieces = -(-counts // block_records)
    unit = np.repeat(np.arange(len(counts)), pieces)
    piece = np.arange(len(unit)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    small, more = np.divmod(counts, pieces)
    inside = piece * small[unit] + np.minimum(piece, more[unit])
    count = small[unit] + (piece < more[unit])
    return (np.cumsum(counts) - counts)[unit] + inside, count
