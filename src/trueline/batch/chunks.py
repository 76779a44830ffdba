"""Which process computes which chunk of records, so that each chunk counts once. Pure: time is an argument.

    waiting ──give──▶ held ──finish──▶ done        the first answer counts; a second one is the same
       ▲               │ ▲
       └──take_back────┘ └──given to an idle worker too, when it takes three times as long as the slowest so far

Chunk k is the records [k x size, (k + 1) x size), whatever the number of processes.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

MAX_TRIES = 3
"""A chunk that failed or killed its process that many times fails everywhere."""
SLOW, STUCK = 3.0, 10.0
"""Multiples of the slowest finished chunk: when an idle worker gets a chunk too, and when its worker is replaced."""


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
    """Chunks that are done, including those that were done before."""
    tries: Counter[int] = field(default_factory=Counter)
    """How often each chunk failed or killed a process."""
    held: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Worker -> its chunk, and when it got that."""
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
        """The next chunk for `worker`; None if it has one, or if there is none."""
        if worker in self.held:
            return None
        index = self._waiting.popleft() if self._waiting else self._find_slow(now)
        if index is None:
            return None
        self.held[worker] = (index, now)
        return self.chunk(index)

    def _find_slow(self, now: float) -> int | None:
        limit = max(1.0, SLOW * self.slowest_s)
        holders = Counter(index for index, _ in self.held.values())
        slow = [(since, index) for index, since in self.held.values() if now - since > limit and holders[index] == 1]
        return min(slow)[1] if slow and self.replied else None

    def finish(self, worker: str, now: float) -> Chunk | None:
        """Marks the chunk of `worker` as done; None if it was done before."""
        index, since = self.held.pop(worker)
        self.slowest_s = max(self.slowest_s, now - since)
        if index in self.replied:
            return None
        self.replied.add(index)
        return self.chunk(index)

    def take_back(self, worker: str) -> Chunk | None:
        """Requeues the chunk of a worker that died or failed; None if it had none. The caller stops at MAX_TRIES."""
        if worker not in self.held:
            return None
        index, _ = self.held.pop(worker)
        if index in self.replied:
            return None
        self.tries[index] += 1
        if index not in (other for other, _ in self.held.values()):
            self._waiting.append(index)
        return self.chunk(index)

    def find_stuck(self, now: float, *, patience_s: float) -> list[str]:
        """Workers that hold a chunk for ten times as long as the slowest took, and for at least `patience_s`.

        Before any chunk is done, for ten times `patience_s`.
        """
        limit = max(patience_s, STUCK * self.slowest_s) if self.replied else STUCK * patience_s
        return [worker for worker, (_, since) in self.held.items() if now - since > limit]
