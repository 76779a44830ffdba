"""Decides which worker a sequence's requests go to, in which order, and when a sequence ends. Pure.

A stateful handler keeps a sequence's state in its process: the requests of a sequence go to one worker, in order, and
never two into one batch.

    begins ──▶ on the worker with the fewest ──▶ one runs, others wait ──▶ ends:  closed   by a request or the handler
                                                                                  expired  idle, or open, for too long
                                                                                  lost     with its worker

The id of an ended sequence is rejected until a request starts it again: without its state an answer would be wrong.
After REMEMBERED_S the id counts as new. Source: TorchServe 0.12's SequenceBatching and JobGroup; the differences are in
docs/guides/torchserve.md.
"""

import math
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from trueline.errors import RequestError
from trueline.serve.handlers.config import HandlerPlan, Terms, Waiting, gather

ID = "ts_request_sequence_id"
START = "ts_request_sequence_start"
END = "ts_request_sequence_end"
"""Headers of a request. END in an answer closes the sequences that it names."""
MAX_ID = 128
REMEMBERED_S = 600.0
MAX_REMEMBERED = 10_000  # ids of the latest sequences that have ended
_MADE = "ts-seq-"  # prefix of ids that the server makes; clients cannot begin such a sequence
_AGAIN = f"begin it again with {START}: true, or another without an id"


@dataclass(frozen=True, slots=True)
class SequencePart:
    """The sequence of a request, and whether it begins or closes it."""

    id: str
    start: bool = False
    end: bool = False


def read_part(headers: Mapping[str, str]) -> SequencePart:
    """From a request's headers; without an id it begins a new sequence. Raises RequestError.

    >>> read_part({"ts_request_sequence_id": "a", "ts_request_sequence_end": "true"})
    SequencePart(id='a', start=False, end=True)
    """
    name = headers.get(ID, "")
    if len(name) > MAX_ID or not name.isprintable():
        raise RequestError(f"{ID} is to be up to {MAX_ID} printable characters, it is {name[:MAX_ID]!r}")
    start, end = (headers.get(key, "").strip().lower() == "true" for key in (START, END))
    return SequencePart(name or f"{_MADE}{uuid.uuid4()}", start or not name, end)


def encode_headers(part: SequencePart) -> dict[str, str]:
    """The headers for the handler."""
    return {ID: part.id} | ({START: "true"} if part.start else {})


def closed_by(headers: Mapping[str, str]) -> list[str]:
    """The sequences that a handler's answer closes.

    >>> closed_by({"ts_request_sequence_end": "a; b"})
    ['a', 'b']
    """
    return [name.strip() for name in headers.get(END, "").split(";") if name.strip()]


class Job(Waiting, Protocol):
    part: SequencePart | None


J = TypeVar("J", bound=Job)


@dataclass(frozen=True, slots=True)
class Refusal:
    why: str
    hint: str


Dropped = list[tuple[J, Refusal]]  # requests that will not be answered


@dataclass(slots=True, eq=False)
class _Sequence(Generic[J]):
    id: str
    began: float
    idle_since: float
    waiting: deque[J] = field(default_factory=deque)
    running: J | None = None
    worker: int | None = None
    ran: bool = False  # whether its worker has state of it

    @property
    def closing(self) -> bool:
        last = self.waiting[-1] if self.waiting else self.running
        return last is not None and _part(last).end


def _part(job: Job) -> SequencePart:
    assert job.part is not None  # others never join
    return job.part


class Sequences(Generic[J]):
    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._live: dict[str, _Sequence[J]] = {}
        self._ended: dict[str, tuple[str, float]] = {}

    @property
    def num_open(self) -> int:
        return len(self._live)

    def on(self, worker: int) -> int:
        """The number of sequences on a worker."""
        return sum(one.worker == worker for one in self._live.values())

    @property
    def num_waiting(self) -> int:
        """Safe in any thread."""
        return sum(len(one.waiting) for one in list(self._live.values()))

    def waiting(self) -> list[J]:
        return [job for one in self._live.values() for job in one.waiting]

    def join(self, job: J, *, now: float, room: int) -> Refusal | None:
        """Queues a request of a sequence, a new one if fewer than `room` are open; else returns why not."""
        part = _part(job)
        one = self._live.get(part.id)
        if one is None:
            refused = self._refusal(part, now, room)
            if refused is None:
                self._live[part.id] = _Sequence(part.id, now, now, deque([job]))
            return refused
        if one.closing and not part.start:
            return Refusal(f"sequence '{part.id}' is closed", _AGAIN)
        if len(one.waiting) >= self._terms.queue_size:
            why = f"{len(one.waiting)} requests of sequence '{part.id}' wait already"
            return Refusal(why, "send the next when one is answered, or set maxSequenceJobQueueSize higher")
        one.waiting.append(job)
        return None

    def _refusal(self, part: SequencePart, now: float, room: int) -> Refusal | None:
        if not part.start:
            why, at = self._ended.get(part.id, ("", -math.inf))
            if now < at + REMEMBERED_S:
                return Refusal(why, _AGAIN)
            if part.id.startswith(_MADE):
                return Refusal(f"sequence '{part.id}' is not known here, or not any more", _AGAIN)
        if len(self._live) >= room:
            hint = "close one, or set maxNumSequence higher"
            return Refusal(f"as many sequences are open as may be ({len(self._live)})", hint)
        return None

    def leave(self, job: J) -> bool:
        """Withdraws a waiting request; False if it does not wait any more."""
        one = self._live.get(_part(job).id)
        if one is None or job not in one.waiting:
            return False
        one.waiting.remove(job)
        if not (one.ran or one.waiting):
            del self._live[one.id]  # no worker has seen it
        return True

    def place(self, workers: Sequence[int]) -> None:
        """Assigns each new sequence to the worker with the fewest, of equals the first."""
        load = {worker: self.on(worker) for worker in workers}
        for one in self._live.values():
            if one.worker is None and load:
                one.worker = min(load, key=lambda worker: load[worker])
                load[one.worker] += 1

    def take(self, worker: int, *, now: float, plan: HandlerPlan) -> tuple[list[J], float | None]:
        """The batch of an idle worker, the first request of each of its sequences; else when to look again. It does not
        wait when all the worker's sequences are in the batch.
        """
        mine = [one for one in self._live.values() if one.worker == worker]
        heads = sorted((one.waiting[0] for one in mine if one.waiting and not one.running), key=lambda job: job.since)
        count, wake_at = gather(heads, now=math.inf if len(heads) == len(mine) else now, plan=plan)
        for job in heads[:count]:
            one = self._live[_part(job).id]
            if _part(job).start or not one.ran:
                one.began = now
            one.running, one.ran = one.waiting.popleft(), True
            self._ended.pop(one.id, None)
        return heads[:count], wake_at

    def finish(self, worker: int, jobs: Iterable[J], closed: Iterable[str], *, now: float) -> Dropped[J]:
        """Ends the batch `jobs` of `worker`, whose handler has closed the sequences `closed`."""
        ending = dict.fromkeys(closed)
        for job in jobs:
            one = self._live.get(_part(job).id)
            if one is None or one.running is not job:
                continue  # lost with its worker
            one.running, one.idle_since = None, now
            if _part(job).end:
                ending[one.id] = None
        dropped: Dropped[J] = []
        for name in ending:
            one = self._live.get(name)
            if one is not None and one.worker == worker:
                dropped += self._end(one, f"sequence '{name}' is closed", now)
        return dropped

    def _end(self, one: _Sequence[J], why: str, now: float) -> Dropped[J]:
        """Ends a sequence; a request that starts it again, and those behind it, stay."""
        dropped: Dropped[J] = []
        while one.waiting and not _part(one.waiting[0]).start:
            dropped.append((one.waiting.popleft(), Refusal(why, _AGAIN)))
        one.ran = False
        if not one.waiting:
            del self._live[one.id]
        self._ended.pop(one.id, None)
        self._ended[one.id] = (why, now)
        if len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return dropped

    def drop_worker(self, worker: int, *, now: float, how: str = "was lost with its worker") -> Dropped[J]:
        """Ends the sequences of a worker that is gone; those that it had not begun go to another."""
        dropped: Dropped[J] = []
        for one in [one for one in self._live.values() if one.worker == worker]:
            if one.ran:
                dropped += self._end(one, f"sequence '{one.id}' {how}", now)
            one.worker, one.running = None, None
        return dropped

    def expire(self, now: float) -> Dropped[J]:
        """Ends the sequences whose time has passed; a running request is answered first."""
        dropped: Dropped[J] = []
        terms = self._terms
        for one in [one for one in self._live.values() if one.running is None]:
            if now >= self._lasts_until(one):
                why = f"sequence '{one.id}' has expired: it lasted {terms.timeout_s:g} s"
                dropped += self._end(one, why, now)
            elif not one.waiting and now >= one.idle_since + terms.max_idle_s:
                why = f"sequence '{one.id}' has expired: it was idle for {terms.max_idle_s:g} s"
                dropped += self._end(one, why, now)
        return dropped

    def _lasts_until(self, one: _Sequence[J]) -> float:
        return one.began + self._terms.timeout_s if self._terms.timeout_s and one.ran else math.inf

    def wake_at(self) -> float | None:
        """When to call `expire` next."""
        times = []
        for one in self._live.values():
            if one.running is None:
                idle_until = math.inf if one.waiting else one.idle_since + self._terms.max_idle_s
                times.append(min(self._lasts_until(one), idle_until))
        found = min(times, default=math.inf)
        return found if found < math.inf else None
