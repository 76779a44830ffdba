"""Which process computes which chunk of records, so that each chunk counts once whoever dies. Pure: `now` comes in.

    waiting ──give──▶ held ──done──▶ done          the first answer counts; a second one is the same
       ▲               │ ▲
       └──lost, failed─┘ └──give again to somebody idle, when it takes three times as long as the slowest so far

Chunk k is the records [k x size, (k + 1) x size), whatever the number of processes.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

MAX_TRIES = 3
"""A chunk that has failed, or ended its process, so many times fails everywhere."""
SLOW, STUCK = 3.0, 10.0
"""Times the slowest finished chunk: when somebody idle takes it as well, and when its process is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    index: int
    start: int
    stop: int


@dataclass(slots=True, kw_only=True)
class Chunks:
    num_records: int
    size: int
    replied: set[int] = field(default_factory=set)
    """The chunks that are done; those that are at the beginning are not given out."""
    tries: Counter[int] = field(default_factory=Counter)
    """How often each chunk has failed or ended a process."""
    held: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Worker to its chunk, and since when."""
    slowest_s: float = 0.0
    _waiting: deque[int] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = deque(index for index in range(self.total) if index not in self.replied)

    @property
    def total(self) -> int:
        return -(-self.num_records // self.size)

    @property
    def finished(self) -> bool:
        return len(self.replied) == self.total

    def chunk(self, index: int) -> Chunk:
        start = index * self.size
        return Chunk(index=index, start=start, stop=min(start + self.size, self.num_records))

    def give(self, worker: str, now: float) -> Chunk | None:
        """What `worker` is to compute next; None while there is nothing for it, or while it has a chunk."""
        if worker in self.held:
            return None
        index = self._waiting.popleft() if self._waiting else self._slow(now)
        if index is None:
            return None
        self.held[worker] = (index, now)
        return self.chunk(index)

    def _slow(self, now: float) -> int | None:
        limit = max(1.0, SLOW * self.slowest_s)
        holders = Counter(index for index, _ in self.held.values())
        slow = [(since, index) for index, since in self.held.values() if now - since > limit and holders[index] == 1]
        return min(slow)[1] if slow and self.replied else None

    def done(self, worker: str, now: float) -> Chunk | None:
        """Enters the answer of `worker`; None when its chunk was answered before."""
        index, since = self.held.pop(worker)
        self.slowest_s = max(self.slowest_s, now - since)
        if index in self.replied:
            return None
        self.replied.add(index)
        return self.chunk(index)

    def lost(self, worker: str) -> Chunk | None:
        """Takes back the chunk of a worker that died or failed; None when nothing is lost by it.

        The chunk is given out again, last of all. The caller gives up when it has had MAX_TRIES.
        """
        if worker not in self.held:
            return None
        index, _ = self.held.pop(worker)
        if index in self.replied:
            return None
        self.tries[index] += 1
        if index not in (other for other, _ in self.held.values()):
            self._waiting.append(index)
        return self.chunk(index)

    def stuck(self, now: float, *, patience_s: float) -> list[str]:
        """Workers to be given up: they hold a chunk for ten times as long as the slowest took so far.

        `patience_s` is the least that counts as long, ten times of it before any chunk is done.
        """
        limit = max(patience_s, STUCK * self.slowest_s) if self.replied else STUCK * patience_s
        return [worker for worker, (_, since) in self.held.items() if now - since > limit]
