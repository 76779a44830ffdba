"""The plan of a job: the records of step k, and each member's share of them.

A pure function of seed, step, global batch, the source's blocks, the records set aside and the members' weights. Plans
of adjacent steps are computed together because numpy's cost is per call. A **shard** is a fixed run of at most
`micro_batch` records of a step. Shards have nearly equal length, so that a short last step has no shard of one record,
which normalization layers refuse. Without shards a member's share is one slice.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from trueline.data.order import permutation
from trueline.data.order.record_orders import WINDOW_RECORDS, InFileOrder, PermutedOrder, RecordOrder, WindowOrder
from trueline.train.step import ledger

Ints = npt.NDArray[np.int64]
_TOGETHER = 64
WINDOW_BLOCKS = 8  # least number of blocks in a window: fewer mix badly
IN_ORDER = (0,)
"""In place of the blocks: records are taken in the order of the source. No real block is empty."""
DRAWN = (-1,)
"""As `IN_ORDER`, for a source with an order of its own: an id is a position in that order, not a record."""


@lru_cache(maxsize=256)
def _slices(count: int, weights: tuple[float, ...]) -> list[tuple[int, int]]:
    return permutation.split(count, weights)


def order_of(num_records: int, blocks: Sequence[int], *, seed: int) -> RecordOrder:
    """The order of a job's records: shuffled; with `blocks`, within windows; unchanged for `IN_ORDER` and `DRAWN`."""
    if tuple(blocks) in (IN_ORDER, DRAWN):
        return InFileOrder(num_records)
    if not blocks:
        return PermutedOrder(num_records, seed=seed)
    window = max(WINDOW_RECORDS, WINDOW_BLOCKS * num_records // len(blocks))
    return WindowOrder([Block(count) for count in blocks], seed=seed, window_records=window, block_records=num_records)


@dataclass(frozen=True, slots=True)
class Block:
    """Records that an order keeps together."""

    count: int


@dataclass(frozen=True, slots=True)
class ForwardPiece:
    """Records of one forward."""

    records: Ints
    shard: int  # number of the shard in the step; without shards the rank
    digest: int


@dataclass(slots=True, kw_only=True)
class JobPlan:
    num_records: int
    global_batch: int
    epochs: int
    seed: int
    micro_batch: int = 0  # most records of a shard; 0: no shards
    blocks: tuple[int, ...] = ()
    """Record counts of the source's blocks, for an order in windows; empty: a permutation of all records."""
    set_aside: tuple[int, ...] = ()  # records of the source that are in no step from now on
    drawn: Callable[[Ints, int], Ints] | None = None
    """Maps ids of an epoch to records of the source; None: they are equal."""
    epoch_steps: int = field(init=False)
    total_steps: int = field(init=False)
    _order: RecordOrder | None = None
    _first: int = -1
    _records: list[Ints] = field(default_factory=list)
    _left_out: list[ledger.LeftOut] = field(default_factory=list)
    _mixed: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    _digests: list[int] = field(default_factory=list)
    _cut_for: tuple[int, tuple[float, ...]] = (-1, ())
    _cut: list[list[ForwardPiece]] = field(default_factory=list)
    """The pieces of these steps for the rank and weights of `_cut_for`."""

    def __post_init__(self) -> None:
        self.epoch_steps = permutation.steps_per_epoch(self.num_records, self.global_batch)
        self.total_steps = self.epochs * self.epoch_steps

    def epoch_of(self, step: int) -> int:
        return step // self.epoch_steps

    def ends_epoch(self, step: int) -> bool:
        return (step + 1) % self.epoch_steps == 0

    def cut_into(self, micro_batch: int) -> None:
        """Cuts steps into shards of at most `micro_batch` records; 0: into none. Only before the first step."""
        self.micro_batch, self._first = micro_batch, -1

    def leave_out(self, records: Collection[int]) -> None:
        """Leaves `records` out of all steps from now on."""
        if tuple(sorted(records)) != self.set_aside:
            self.set_aside = tuple(sorted(records))
            self._first = -1

    def records(self, step: int) -> Ints:
        """The ids of the records of `step` (0-based over the whole job), in the order of the epoch."""
        self._reach(step)
        return self._records[step - self._first]

    def left_out(self, step: int) -> ledger.LeftOut:
        """The records of `step` that were set aside."""
        self._reach(step)
        return self._left_out[step - self._first]

    def origins(self, ids: Ints, *, epoch: int) -> Ints:
        """The records of the source at `ids` of `epoch`."""
        return ids if self.drawn is None else self.drawn(ids, epoch)

    def digest(self, step: int) -> int:
        self._reach(step)
        return self._digests[step - self._first]

    def _reach(self, step: int) -> None:
        if not 0 <= step - self._first < len(self._records) or self._first < 0:
            self._compute(step)

    def _compute(self, step: int) -> None:
        epoch, start, _ = permutation.locate(step, num_records=self.num_records, global_batch=self.global_batch)
        stop = min(start + _TOGETHER * self.global_batch, self.num_records)
        if self._order is None:
            self._order = order_of(self.num_records, self.blocks, seed=self.seed)
        ids = self._order.at(np.arange(start, stop, dtype=np.int64), epoch=epoch)
        starts = range(0, len(ids), self.global_batch)
        if self.blocks and not self.micro_batch:
            # A step is the same sum in any order, and a sorted slice lies in few blocks, the same ones for all steps of
            # a window. Shards are not sorted: each would hold records of one block.
            for i in starts:
                ids[i : i + self.global_batch].sort()
        parts = ledger.mix_ids(ids)
        self._first = step
        steps = [ids[i : i + self.global_batch] for i in starts]
        mixed = [parts[i : i + self.global_batch] for i in starts]
        self._left_out = [ledger.LeftOut() for _ in steps]
        if self.set_aside:
            origins = [self.origins(records, epoch=epoch) for records in steps]
            kept = [~np.isin(records, self.set_aside) for records in origins]
            self._left_out = [
                ledger.LeftOut(tuple(records[~keep].tolist()), tuple(origin[~keep].tolist()))
                for records, origin, keep in zip(steps, origins, kept, strict=True)
            ]
            steps = [records[keep] for records, keep in zip(steps, kept, strict=True)]
            mixed = [parts[keep] for parts, keep in zip(mixed, kept, strict=True)]
        self._records, self._mixed, self._digests = steps, mixed, [ledger.sum_digest(parts) for parts in mixed]
        self._cut_for = -1, ()

    def pieces(self, step: int, *, rank: int, weights: tuple[float, ...]) -> list[ForwardPiece]:
        """The share of `rank` in `step` when the members share it in proportion to `weights`; it may be empty."""
        count = len(self.records(step))
        if not self.micro_batch:
            if self._cut_for != (rank, weights):
                self._cut_for, self._cut = (rank, weights), self._cut_up(rank, weights)
            return self._cut[step - self._first]
        shards = self.num_shards(step)
        if not shards:
            return []  # all its records were set aside
        bounds_of, records, mixed = _slices(count, (1.0,) * shards), self.records(step), self._mixed[step - self._first]
        own = ((shard, slice(*bounds_of[shard])) for shard in range(*_slices(shards, weights)[rank]))
        return [ForwardPiece(records[part], shard, ledger.sum_digest(mixed[part])) for shard, part in own]

    def _cut_up(self, rank: int, weights: tuple[float, ...]) -> list[list[ForwardPiece]]:
        """One slice of each computed step, or none; the digests in one pass over all records."""
        bounds = np.array([_slices(len(records), weights)[rank] for records in self._records])
        ends = np.cumsum([0, *map(len, self._records)])[:-1, None] + bounds
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(np.concatenate(self._mixed), dtype=np.uint64)])
        digests = ((sums[ends[:, 1]] - sums[ends[:, 0]]) & np.uint64(ledger.MASK)).tolist()
        return [
            [ForwardPiece(records[start:stop], rank, digest)] if stop > start else []
            for records, (start, stop), digest in zip(self._records, bounds.tolist(), digests, strict=True)
        ]

    def num_shards(self, step: int) -> int:
        return -(-len(self.records(step)) // self.micro_batch)

    def shard_counts(self, step: int, weights: tuple[float, ...]) -> list[int]:
        """By rank: shards of `step`."""
        return [stop - start for start, stop in _slices(self.num_shards(step), weights)]

    def share_counts(self, step: int, weights: tuple[float, ...]) -> list[int]:
        """By rank: records of `step`."""
        count = len(self.records(step))
        if not self.micro_batch or not count:
            return [stop - start for start, stop in _slices(count, weights)]
        bounds_of = _slices(count, (1.0,) * self.num_shards(step))
        return [sum(stop - start for start, stop in bounds_of[slice(*shards)])
                for shards in _slices(len(bounds_of), weights)]  # fmt: skip


def choose_late(steps: int) -> int:
    """A step of the second half of a job, the largest prime there is: at round ones a loop may evaluate, which takes
    its time, and at the last one it may save.

    >>> choose_late(1000), choose_late(40), choose_late(2), choose_late(1)
    (997, 37, 1, 0)
    """
    found = choose_prime(steps - 2)
    return found if found > max(steps // 2, 1) else min(1, steps - 1)


def choose_prime(most: int) -> int:
    """The largest prime up to `most`; below 2 `most` itself.

    >>> choose_prime(10), choose_prime(2), choose_prime(1)
    (7, 2, 1)
    """
    wanted = range(most, 1, -1)
    return next((at for at in wanted if all(at % one for one in range(2, math.isqrt(at) + 1))), most)
