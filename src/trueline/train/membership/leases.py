"""Ranges of an epoch, leased to workers of different speed, so that each record is committed exactly once. Pure.

A commit names the token of its lease, which none had before, also over restarts of the master: a worker that lost its
lease while it slept is refused (Gray and Cheriton, "Leases", 1989). Sizes are guided: a lease is the worker's share, by
measured speed, of a part of what is left (Polychronopoulos and Kuck, 1987): long at first, where it costs least, short
at the end, where one slow worker would delay all. The caller writes the rows of `first_rows` and `commit` before it
answers; `replay` reads them after a restart of the master.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from trueline.errors import UsageError

Row = tuple[str, dict[str, Any]]

PART = 3.0  # a lease is one part in this many of a worker's share of what is left
LEAST_S = 0.1
"""Least seconds of work in a lease, where its worker's speed is known: a request is not free."""
FIRST = 1024
"""The first lease of a worker measures its speed: one part in this many of the epoch, at most FIRST_MOST records."""
FIRST_MOST = 4096
_OLD = 0.7  # weight of a worker's earlier speed when it is measured again


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Positions [start, stop) of the epoch's order, for the holder of `token`."""

    token: int
    start: int
    stop: int


@dataclass(slots=True)
class _HeldLease:
    worker: str
    at: int  # positions before it are committed
    stop: int
    since: float  # when the worker began with the position `at`
    deadline: float


@dataclass(slots=True, kw_only=True)
class Leases:
    """One epoch of `num_records` positions. Raises UsageError for an epoch without any."""

    epoch: int
    num_records: int
    lease_s: float = 10.0  # a lease whose worker is silent for longer is taken back
    most: int = 1 << 20  # most records of a lease; a death costs those that are not committed
    incarnation: int = 0  # of the master that grants the leases; `replay` increments it
    committed: int = 0  # records that are done
    rates: dict[str, float] = field(default_factory=dict)  # records a second, smoothed
    _free: list[tuple[int, int]] = field(default_factory=list)
    _held: dict[int, _HeldLease] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        if self.num_records < 1:
            raise UsageError("an epoch of no records cannot be leased", hint="check dataset('training')")
        self._free = [(0, self.num_records)]

    @property
    def finished(self) -> bool:
        return self.committed == self.num_records

    @property
    def oldest(self) -> int:
        """The first position that is not committed; `num_records`: there is none."""
        begins = [start for start, _ in self._free[:1]] + [held.at for held in self._held.values()]
        return min(begins, default=self.num_records)

    @property
    def next_free(self) -> int | None:
        """Where the next lease begins; None: nothing is free."""
        return self._free[0][0] if self._free else None

    @property
    def free(self) -> list[tuple[int, int]]:
        """What is neither leased nor committed, in order."""
        return list(self._free)

    @property
    def outstanding(self) -> list[tuple[int, int]]:
        """What is leased and not committed, in order."""
        return sorted((held.at, held.stop) for held in self._held.values())

    def first_rows(self) -> list[Row]:
        """The rows to write before the first lease is granted."""
        return [("LEASES", {"epoch": self.epoch, "incarnation": self.incarnation, "num_records": self.num_records})]

    def lease(self, worker: str, now: float) -> Lease | None:
        """Leases a range to `worker`; None while nothing is free: retry until `finished`."""
        if not self._free:
            return None
        size = self._size(worker)
        start, stop = self._free.pop(0)
        if start + size < stop:
            insort(self._free, (start + size, stop))
            stop = start + size
        self._count += 1
        token = (self.incarnation << 32) | self._count
        self._held[token] = _HeldLease(worker, start, stop, now, now + self.lease_s)
        return Lease(token=token, start=start, stop=stop)

    def _size(self, worker: str) -> int:
        left = sum(stop - start for start, stop in self._free)
        workers = {held.worker for held in self._held.values()} | set(self.rates) | {worker}
        known = {ref: self.rates[ref] for ref in workers if ref in self.rates}
        if worker not in known:
            return min(self.most, FIRST_MOST, max(1, self.num_records // FIRST))
        usual = sum(known.values()) / len(known)
        total = sum(known.get(ref, usual) for ref in workers)
        share = known[worker] / total
        return min(self.most, max(1, int(left * share / PART), int(known[worker] * LEAST_S)))

    def beat(self, worker: str, now: float) -> None:
        """Extends the leases of `worker`, which lives."""
        for held in self._held.values():
            if held.worker == worker:
                held.deadline = now + self.lease_s

    def commit(self, token: int, upto: int, now: float) -> list[Row] | None:
        """Commits up to `upto`; returns the rows to write first, None if the lease is lost or `upto` not in it."""
        held = self._held.get(token)
        if held is None or not held.at <= upto <= held.stop:
            return None
        count, took_s = upto - held.at, now - held.since
        if count and took_s > 0:
            rate = count / took_s
            before = self.rates.get(held.worker)
            self.rates[held.worker] = rate if before is None else _OLD * before + (1 - _OLD) * rate
        rows: list[Row] = [("DONE", {"epoch": self.epoch, "start": held.at, "stop": upto})] if count else []
        self.committed += count
        held.at, held.since, held.deadline = upto, now, now + self.lease_s
        if upto == held.stop:
            del self._held[token]
        return rows

    def release(self, worker: str) -> int:
        """Frees what a dead worker has not committed; returns how many records that is."""
        self.rates.pop(worker, None)
        return sum(self._return(token) for token in [t for t, held in self._held.items() if held.worker == worker])

    def expire(self, now: float) -> list[str]:
        """Takes back the leases of workers that were silent too long; returns these workers."""
        late = {token: held.worker for token, held in self._held.items() if held.deadline <= now}
        for token in late:
            self._return(token)
        return sorted(set(late.values()))

    def _return(self, token: int) -> int:
        held = self._held.pop(token)
        if held.at < held.stop:
            insort(self._free, (held.at, held.stop))
            merged: list[tuple[int, int]] = []  # adjacent ranges join: the rest of lost leases lies in few pieces
            for start, stop in self._free:
                if merged and merged[-1][1] == start:
                    start = merged.pop()[0]
                merged.append((start, stop))
            self._free = merged
        return held.stop - held.at


def replay(rows: Iterable[Row], *, epoch: int, num_records: int, lease_s: float = 10.0) -> Leases:
    """The leases of `epoch` for a restarted master: what was committed is done, all else is free, old tokens are void.

    Raises UsageError when the rows are of other records.
    """
    leases = Leases(epoch=epoch, num_records=num_records, lease_s=lease_s)
    done: list[tuple[int, int]] = []
    for kind, body in rows:
        if body.get("epoch") != epoch:
            continue
        if kind == "LEASES":
            if body["num_records"] != num_records:
                raise UsageError(
                    f"epoch {epoch} was begun with {body['num_records']} records, and there are {num_records} now",
                    hint="restore the data, or start a new job",
                )
            leases.incarnation = max(leases.incarnation, body["incarnation"] + 1)
        elif kind == "DONE":
            done.append((body["start"], body["stop"]))
    at, free = 0, []
    for start, stop in sorted(done):
        if start < at:
            raise UsageError(f"epoch {epoch}: the ledger has the records {start} to {min(at, stop)} committed twice")
        if start > at:
            free.append((at, start))
        at = stop
    if at < num_records:
        free.append((at, num_records))
    leases._free = free
    leases.committed = num_records - sum(stop - start for start, stop in free)
    return leases
