"""Which minibatches are leased, and which are done. Pure: `now` is an argument.

What servers have applied is the truth. The ledger says which minibatches every server has, which no worker has leased,
and when one may begin: without a bound, while few enough others are under way, or in synchronous steps. A restarted
master makes it again from what the servers say; what was under way is leased again, and servers that have it ignore it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from trueline.errors import UsageError
from trueline.ps.messages import Runs
from trueline.ps.tables.applied import count, find_common
from trueline.train.membership.leases import Leases, replay

MOST, LONGEST_S = 8, 2.0
"""Minibatches and seconds of one lease: a death costs those that were not pushed, a cut waits for them."""


class MinibatchGrid(Struct, frozen=True, kw_only=True):
    """How the records of an epoch form minibatches, the same for every worker and after every restart.

    `batch`: records of a step; a step has one minibatch, or `parts` of equal size but the last.
    """

    num_records: int
    batch: int
    parts: int = 1

    @property
    def size(self) -> int:
        """Records of a minibatch."""
        return -(-self.batch // self.parts)

    @property
    def pieces(self) -> int:
        """Minibatches of a full step."""
        return -(-self.batch // self.size)

    @property
    def steps(self) -> int:
        """Of an epoch; the last one may be short."""
        return -(-self.num_records // self.batch)

    @property
    def minibatches(self) -> int:
        """Of an epoch."""
        return (self.steps - 1) * self.pieces + self.parts_of(self.steps - 1)

    def parts_of(self, step: int) -> int:
        """Minibatches of the step."""
        records = min(self.batch, self.num_records - step * self.batch)
        return -(-records // self.size)

    def step_of(self, minibatch: int) -> int:
        return minibatch // self.pieces

    def locate(self, minibatch: int) -> tuple[int, int, int, int]:
        """Positions [start, stop) in the epoch's order, the part, and the parts of the step.

        >>> MinibatchGrid(num_records=10, batch=4, parts=2).locate(4)
        (8, 10, 0, 1)
        """
        step, part = divmod(minibatch, self.pieces)
        start = step * self.batch + part * self.size
        stop = min(start + self.size, (step + 1) * self.batch, self.num_records)
        return start, stop, part, self.parts_of(step)

    def count_records(self, done: Runs) -> int:
        """Records of these minibatches.

        >>> MinibatchGrid(num_records=10, batch=4, parts=2).count_records(((0, 3), (4, 5)))
        8
        """
        return sum(self.locate(stop - 1)[1] - self.locate(start)[0] for start, stop in done)

    def steps_in(self, done: Runs) -> int:
        """Whole steps among these minibatches."""
        steps = 0
        for start, stop in done:
            first = -(-start // self.pieces)
            last = self.steps if stop >= self.minibatches else stop // self.pieces
            steps += max(0, last - first)
        return steps


class Grant(Struct, frozen=True):
    """Minibatches [start, stop) of `epoch`, for the holder of `token`."""

    token: int
    epoch: int
    start: int
    stop: int


@dataclass(slots=True, kw_only=True)
class MinibatchLedger:
    """`staleness`: a minibatch begins while at most this many others are under way; 0: synchronous; -1: no bound."""

    grid: MinibatchGrid
    epochs: int
    staleness: int = -1
    lease_s: float = 10.0
    epoch: int = 0
    _leases: Leases = field(init=False)
    _incarnation: int = 0
    _begun: int = 0  # minibatches before it may have reached a server
    _fence: dict[int, Runs] | None = None

    def __post_init__(self) -> None:
        if self.grid.num_records < 1:
            raise UsageError("dataset('training') has no records")
        self._begin_epoch(0)

    def _begin_epoch(self, epoch: int, done: Runs = ()) -> None:
        self.epoch = epoch
        self._incarnation += 1
        self._begun = max((stop for _, stop in done), default=0)
        head = ("LEASES", {"epoch": epoch, "incarnation": self._incarnation, "num_records": self.grid.minibatches})
        rows = [("DONE", {"epoch": epoch, "start": start, "stop": stop}) for start, stop in done]
        rates = self._leases.rates if self._incarnation > 1 else {}
        self._leases = replay([head, *rows], epoch=epoch, num_records=self.grid.minibatches, lease_s=self.lease_s)
        self._leases.rates = rates
        self._pace()

    def _pace(self) -> None:
        """Leases of slow workers are short."""
        slowest = min(self._leases.rates.values(), default=math.inf)
        most = MOST if self.staleness < 0 and self._fence is None else 1
        self._leases.most = most if slowest == math.inf else max(1, min(most, int(slowest * LONGEST_S)))

    @property
    def reach_s(self) -> float:
        """How long a cut may have to wait for what is under way: each worker has a lease, and has read ahead in a
        second one."""
        slowest = min(self._leases.rates.values(), default=math.inf)
        return 4.0 * self._leases.most / slowest

    @property
    def finished(self) -> bool:
        return self.epoch == self.epochs - 1 and self._leases.finished

    @property
    def done(self) -> Runs:
        """Minibatches of this epoch that are committed."""
        taken = sorted([*self._leases.outstanding, *self._leases.free])
        runs, at = [], 0
        for start, stop in taken:
            if start > at:
                runs.append((at, start))
            at = stop
        if at < self.grid.minibatches:
            runs.append((at, self.grid.minibatches))
        return tuple(runs)

    @property
    def steps(self) -> int:
        """Whole steps of the job that are committed."""
        return self.epoch * self.grid.steps + self.grid.steps_in(self.done)

    @property
    def total_steps(self) -> int:
        return self.epochs * self.grid.steps

    def lease(self, worker: str, now: float) -> Grant | None:
        """Leases the next minibatches; None: none may begin now, or all are done."""
        if self._leases.finished and not self.finished:
            self._begin_epoch(self.epoch + 1)
        if self._leases.next_free is None or not self._may_begin(self._leases.next_free):
            return None
        lease = self._leases.lease(worker, now)
        if lease is None:
            return None
        self._begun = max(self._begun, lease.stop)
        return Grant(lease.token, self.epoch, lease.start, lease.stop)

    def _may_begin(self, minibatch: int) -> bool:
        if self._fence is not None:
            within = self._fence.get(self.epoch, ())
            if not any(start <= minibatch < stop for start, stop in within):
                return False
        if self.staleness < 0:
            return True
        if self.staleness == 0:
            return self.grid.step_of(minibatch) == self.grid.step_of(self._leases.oldest)
        return sum(stop - start for start, stop in self._leases.outstanding) <= self.staleness

    def commit(self, grant: int, epoch: int, upto: int, now: float) -> bool:
        """Commits minibatches before `upto`, which all servers have acknowledged; False: the lease is lost."""
        if epoch != self.epoch or self._leases.commit(grant, upto, now) is None:
            return False
        self._pace()
        return True

    def beat(self, worker: str, now: float) -> None:
        self._leases.beat(worker, now)

    def release(self, worker: str) -> int:
        """Frees what a dead worker has not committed; returns how many minibatches that is."""
        return self._leases.release(worker)

    def expire(self, now: float) -> list[str]:
        """Takes back the leases of workers that were silent too long; returns these workers."""
        return self._leases.expire(now)

    def outstanding(self) -> dict[int, Runs]:
        """The minibatches that some server may have and another may lack, which a cut waits for: what is leased, and
        what dead workers have left. All of a synchronous step that has begun."""
        under_way = sorted([*self._leases.outstanding, *self._leases.free])
        runs = [(start, min(stop, self._begun)) for start, stop in under_way if start < self._begun]
        if self.staleness == 0:
            first = self.grid.step_of(self._leases.oldest) * self.grid.pieces
            last = min(first + self.grid.pieces, self.grid.minibatches)
            begun = any(first < stop and start < last for start, stop in (*runs, *self.done))
            runs = [(first, last)] if begun else []
        return {self.epoch: tuple(runs)} if runs else {}

    @property
    def is_fenced(self) -> bool:
        return self._fence is not None

    def set_fence(self, keys: dict[int, Runs] | None) -> None:
        """Until it is None again, only these minibatches are leased: a cut begins, and not every server knows yet."""
        self._fence = keys
        self._pace()

    def restore(self, applied: Sequence[dict[int, Runs]]) -> int:
        """Takes what all servers have as done, and leases everything else again; returns how many minibatches of this
        epoch are done. `applied`: what each server has applied, by epoch."""
        common = find_common(applied)
        for epoch in range(self.epochs):
            done = common.get(epoch, ())
            if count(done) < self.grid.minibatches or epoch == self.epochs - 1:
                self._begin_epoch(epoch, done)
                reached = (stop for one in applied for _, stop in one.get(epoch, ()))
                self._begun = max(reached, default=0)
                return count(done)
        return 0
