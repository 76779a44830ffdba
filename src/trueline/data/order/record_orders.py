"""Orders of records: pure functions of (seed, epoch, position), each position computed by itself.

    PermutedOrder   all records once, in a keyed permutation; the trainers' default
    InFileOrder     all records once, as they are stored
    WeightedOrder   records by weight, each as often as its share of the draws, rounded up or down
    BucketedOrder   batches of records of similar length, from another order
    MixedOrder      several orders in a fixed ratio; one that is used up begins again
    WindowOrder     blocks of successive records are shuffled, and records within a window of blocks

docs/concepts/order.md measures how well WindowOrder mixes, and the cost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trueline.data.order.permutation import Ints, check_positions, key_of, record_at, split
from trueline.errors import DataError

BLOCK_RECORDS = 16384
WINDOW_RECORDS = 65536
_BLOCKS, _RECORDS = 1, 2


class RecordOrder(Protocol):
    @property
    def num_records(self) -> int:
        """Positions in an epoch."""
        ...

    def at(self, positions: npt.ArrayLike, *, epoch: int) -> Ints:
        """The records at `positions` of `epoch`. Raises DataError for positions outside."""
        ...


class PermutedOrder:
    def __init__(self, num_records: int, *, seed: int) -> None:
        self.num_records, self._seed = num_records, seed

    def at(self, positions: npt.ArrayLike, *, epoch: int) -> Ints:
        return record_at(positions, seed=self._seed, epoch=epoch, num_records=self.num_records)


class InFileOrder:
    def __init__(self, num_records: int) -> None:
        self.num_records = num_records

    def at(self, positions: npt.ArrayLike, *, epoch: int) -> Ints:
        return check_positions(positions, self.num_records)


class WeightedOrder:
    """Systematic sampling with replacement: a record of weight w gets `num_draws * w / sum` draws in every epoch,
    rounded up or down."""

    def __init__(self, weights: npt.ArrayLike, *, seed: int, num_draws: int = 0) -> None:
        values = np.asarray(weights, np.float64)
        if values.ndim != 1 or not len(values) or not np.isfinite(values).all() or values.min() < 0 or not values.any():
            raise DataError(f"weights of shape {list(values.shape)}: expected finite, none negative, not all 0")
        self._bounds = np.cumsum(values)
        self._bounds /= self._bounds[-1]
        self._last = int(np.flatnonzero(values)[-1])
        self._seed = seed
        self.num_records = num_draws or len(values)

    def at(self, positions: npt.ArrayLike, *, epoch: int) -> Ints:
        draw = record_at(positions, seed=self._seed, epoch=epoch, num_records=self.num_records)
        shift = key_of(self._seed, epoch) / 2.0**64
        records: Ints = np.searchsorted(self._bounds, (draw + shift) / self.num_records, side="right")
        return np.minimum(records, self._last).astype(np.int64)


class BucketedOrder:
    """Records of `order` in batches of similar length: pools of `pool_batches` batches are sorted by length, and their
    batches shuffled. `length_of(records)` returns lengths, e.g. `lengths.__getitem__` of an array."""

    def __init__(
        self, order: RecordOrder, length_of: Callable[[Ints], Ints], *, batch: int, seed: int, pool_batches: int = 100
    ) -> None:
        if batch < 1 or pool_batches < 1:
            raise DataError(f"pools of {pool_batches} batches of {batch} records; expected 1 or more")
        self._order, self._length_of, self._batch, self._seed = order, length_of, batch, seed
        self._pool = batch * pool_batches
        self.num_records = order.num_records
        self._sorted = lru_cache(maxsize=4)(self._sort)  # all steps of a pool use it

    def at(self, positions: npt.ArrayLike, *, epoch: int) -> Ints:
        checked = check_positions(positions, self.num_records)
        out = np.empty_like(checked)
        pools = checked // self._pool
        for pool in np.unique(pools).tolist():
            here = pools == pool
            out[here] = self._sorted(pool, epoch)[checked[here] - pool * self._pool]
        return out

    def _sort(self, pool: int, epoch: int) -> Ints:
        """The pool's records; a short batch stays at its end."""
        stop = min((pool + 1) * self._pool, self.num_records)
        records = self._order.at(np.arange(pool * self._pool, stop), epoch=epoch)
        records = records[np.argsort(self._length_of(records), kind="stable")]
        full = len(records) // self._batch
        if full < 2:
            return records
        batches = record_at(np.arange(full), seed=key_of(self._seed, pool), epoch=epoch, num_records=full)
        head = records[: full * self._batch].reshape(full, self._batch)[batches]
        return np.concatenate([head.ravel(), records[full * self._batch :]])


class MixedOrder:
    """Orders in the ratio of `weights`; every thousand positions hold each in exactly its share.

    The second order's records are numbered after those of the first (`offsets`). An order that is used up begins its
    next epoch; any other continues where it was.
    """

    _PATTERN = 1000

    def __init__(
        self, orders: Sequence[RecordOrder], weights: Sequence[float], *, seed: int, num_records: int = 0
    ) -> None:
        if len(orders) != len(weights) or not orders:
            raise DataError(f"{len(orders)} orders are mixed by {len(weights)} weights; expected one for each")
        sizes = [order.num_records for order in orders]
        self._orders, self._seed = list(orders), seed
        self.offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        self.num_records = num_records or sum(sizes)
        self._shares = [stop - start for start, stop in split(self._PATTERN, weights)]
        self._pattern = np.repeat(np.arange(len(orders)), self._shares)
        self._ranked = lru_cache(maxsize=4)(self._rank)

    def at(self, positions: npt.ArrayLike, *, epoch: int) -> Ints:
        block, slot = np.divmod(check_positions(positions, self.num_records) + epoch * self.num_records, self._PATTERN)
        out = np.empty_like(slot)
        for number in np.unique(block).tolist():
            here = block == number
            out[here] = self._draw(number, slot[here])
        return out

    def _draw(self, block: int, slots: Ints) -> Ints:
        pattern, ranks = self._ranked(block)
        out = np.empty_like(slots)
        for source, order in enumerate(self._orders):
            here = pattern[slots] == source
            if not here.any():
                continue
            epochs, places = np.divmod(block * self._shares[source] + ranks[slots[here]], order.num_records)
            records = np.empty(len(places), np.int64)
            for epoch in np.unique(epochs).tolist():
                records[epochs == epoch] = order.at(places[epochs == epoch], epoch=epoch)
            out[here] = records + self.offsets[source]
        return out

    def _rank(self, block: int) -> tuple[Ints, Ints]:
        """For each slot of a block: its order, and the number of that order's slots before it."""
        key = key_of(self._seed, block)
        pattern = self._pattern[record_at(np.arange(self._PATTERN), seed=key, epoch=0, num_records=self._PATTERN)]
        ranks = np.empty_like(pattern)
        for source in range(len(self._orders)):
            here = pattern == source
            ranks[here] = np.arange(np.count_nonzero(here))
        return pattern, ranks


class Counted(Protocol):
    @property
    def count(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Epoch:
    """Blocks in the order of an epoch: the first position and the first record of each."""

    starts: Ints
    """With the number of records at its end."""
    first: Ints


class WindowOrder:
    """A shuffled order of the records of `units` with locality.

        units     0........ 1........ 2........ 3........      row groups, chunks, runs of lines
        blocks    2........ 0........ 3........ 1........      permuted by (seed, epoch); long units are cut
        windows   [ 2 0           ] [ 3 1           ]          at least `window_records` each
        records   permuted inside their window, each by its own key

    A block belongs to one window of an epoch and is decoded once, while a batch mixes records of all blocks of its
    window. Raises DataError for no records and for windows of less than one.
    """

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
        checked = check_positions(positions, self.num_records)
        arranged = self._epoch(epoch)
        starts = arranged.starts
        window = starts[np.searchsorted(starts, checked, side="right") - 1] // self._window
        out = np.empty_like(checked)
        for number in np.unique(window).tolist():
            here = window == number
            # The positions of a window are those of the blocks that begin in its `window_records` positions.
            bounds = np.searchsorted(starts, [number * self._window, (number + 1) * self._window])
            begin, end = int(starts[bounds[0]]), int(starts[min(bounds[1], len(starts) - 1)])
            key = key_of(self._seed, _RECORDS, number)
            inside = record_at(checked[here] - begin, seed=key, epoch=epoch, num_records=end - begin) + begin
            block = np.searchsorted(starts, inside, side="right") - 1
            out[here] = arranged.first[block] + inside - starts[block]
        return out

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
