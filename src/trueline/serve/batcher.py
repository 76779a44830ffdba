"""Requests that wait are run together. A pure decision in the middle, a thin asyncio shell around it.

An idle model runs what comes; while it runs, requests collect, and the next run takes them together. Whether it waits
for company is learned (`pace`) or set. Urgent requests go first, each level is worth some seconds of waiting, so that
none waits for ever. A batch that fails is run again item by item, so one bad item fails alone. What the queue cannot
hold is refused at once. It knows neither HTTP nor what a program is: a function from arrays to arrays.
"""

from __future__ import annotations

import asyncio
import math
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from trueline import events
from trueline.bundle.padding import Padding
from trueline.errors import DeadlineExceeded, Overloaded
from trueline.serve.pace import Pace

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

    Arrays = Mapping[str, Array]
    Outputs = dict[str, Array]
    Run = Callable[[Arrays], Outputs]


PRIORITIES = 5
"""Levels of priority; 1 goes first."""
USUAL = 3
"""The level of a request that names none."""
LEVEL_S = 0.5
"""A request goes before those of the next level that came up to so much earlier, and after all others of it."""
_MARGIN = 1.25
"""A run may take so much longer than was learned when a deadline is to be met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How requests may be put together, and how many may wait."""

    batch: bool = True
    """False: each request runs alone."""
    max_batch: int = 64
    """Rows of one run at most; a larger request still runs, alone."""
    max_delay_s: float | None = None
    """How long an idle model waits for company; None: as long as pays, by what was learned."""
    lanes: int = 1
    """Runs at the same time."""
    max_requests: int = 256
    max_bytes: int = 256 * 2**20
    """Bounds of what waits; a lone request is let in whatever its size."""


@dataclass(slots=True, eq=False)
class Item:
    """One request that waits. Items with an equal `key` may run together."""

    inputs: Arrays
    rows: int
    key: object
    num_bytes: int
    since: float
    deadline: float | None
    future: asyncio.Future[Outputs] | None = field(default=None, repr=False)
    priority: int = USUAL

    @property
    def rank(self) -> float:
        """Its place in the queue: the lower, the sooner. Within a level the older goes first."""
        return self.since + self.priority * LEVEL_S


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and why."""

    run: tuple[Item, ...]
    expired: tuple[Item, ...]
    wake_at: float | None
    reason: str


def decide(queue: Sequence[Item], *, busy: int, now: float, policy: Policy, pace: Pace | None = None) -> Decision:
    """What to run of `queue` (by rank) at `now`, while `busy` runs are under way.

    The first item is always in the run; those that fit beside it come along in their order. `wake_at` says when to
    ask again if nothing happens before. Without a `pace` or a delay an idle model runs at once what there is.
    """
    expired = tuple(item for item in queue if item.deadline is not None and item.deadline <= now)
    waiting = [item for item in queue if item not in expired] if expired else queue
    if not waiting:
        return Decision((), expired, None, "empty")
    if busy >= policy.lanes:
        return Decision((), expired, None, "busy")
    if not policy.batch:
        return Decision((waiting[0],), expired, None, "idle")
    learned = pace is not None and policy.max_delay_s is None
    bound = pace.curve.full(policy.max_batch) if pace is not None and learned else policy.max_batch
    run, rows = _together(waiting, bound)
    if rows < bound and len(run) == len(waiting):
        since = min(item.since for item in run)
        if pace is not None and learned:
            ready_at = pace.wait(rows, bound, since=since, now=now)
            ready_at = None if ready_at is None else min(ready_at, _latest(run, _MARGIN * pace.curve.at(bound)))
        else:
            ready_at = since + (policy.max_delay_s or 0.0)
        if ready_at is not None and now < ready_at:
            return Decision((), expired, ready_at, "filling")
    return Decision(run, expired, None, "idle")


def _together(waiting: Sequence[Item], bound: int) -> tuple[tuple[Item, ...], int]:
    """The first item with those that fit beside it into `bound` rows, and how many rows that are."""
    head = waiting[0]
    run, rows = [head], head.rows
    for item in waiting[1:]:
        if item.key != head.key:
            continue
        if rows + item.rows > bound:
            break
        run.append(item)
        rows += item.rows
    return tuple(run), rows


def _latest(run: Sequence[Item], takes_s: float) -> float:
    """When a run that `takes_s` has to begin, so that no deadline passes."""
    return min((item.deadline for item in run if item.deadline is not None), default=math.inf) - takes_s


def refusal(num_waiting: int, bytes_waiting: int, num_bytes: int, expected_s: float, policy: Policy) -> str | None:
    """Why a request of `num_bytes` may not join the queue; None when it may."""
    if num_waiting >= policy.max_requests:
        return f"{num_waiting} requests wait for this model already, about {expected_s:.3g} s of work"
    if num_waiting and bytes_waiting + num_bytes > policy.max_bytes:
        return f"requests of {bytes_waiting} bytes wait for this model already"
    return None


def run_batch(
    run: Run, items: Sequence[Arrays], rows: Sequence[int], padding: Padding | None = None
) -> list[Outputs | Exception]:
    """One result for each item: from one run over all of them, or, when that fails, from one run each.

    With `padding` sequences of several lengths are filled up to the longest.
    """
    if len(items) == 1:
        return [_alone(run, items[0])]
    try:
        even = items if padding is None else padding.even(items)
        joined = {name: np.concatenate([item[name] for item in even]) for name in items[0]}
        results = _split(run(joined), rows)
        return [*results] if padding is None else _cut(padding, results, items)
    except Exception as error:  # noqa: BLE001 - blind on purpose: whatever failed, each item gets its own run
        events.emit("batch.failed", items=len(items), why=type(error).__name__)
        return [_alone(run, item) for item in items]


def _cut(padding: Padding, results: Sequence[Outputs], items: Sequence[Arrays]) -> list[Outputs | Exception]:
    return [padding.cut(result, item) for result, item in zip(results, items, strict=True)]


def _alone(run: Run, item: Arrays) -> Outputs | Exception:
    try:
        return run(item)
    except Exception as error:  # noqa: BLE001 - blind on purpose: it is handed to the one request that caused it
        return error


def _split(outputs: Outputs, rows: Sequence[int]) -> list[Outputs]:
    total, at = sum(rows), 0
    results: list[Outputs] = []
    if any(array.ndim == 0 or len(array) != total for array in outputs.values()):
        raise ValueError("an output's first dimension does not count the rows")
    for count in rows:
        results.append({name: array[at : at + count] for name, array in outputs.items()})
        at += count
    return results


class Batcher:
    """The queue of one model on one event loop."""

    def __init__(
        self,
        run: Run,
        policy: Policy,
        executor: Executor,
        loop: asyncio.AbstractEventLoop,
        *,
        on_batch: Callable[[int, int, float, float], None] | None = None,
        pace: Pace | None = None,
        padding: Padding | None = None,
    ) -> None:
        """`on_batch(requests, rows, seconds, seconds waited by all)` is called on the loop after each run; `pace` is
        what is known of the program's runs, and learns on; `padding` lets requests of several lengths run together.
        """
        self._padding = padding
        self.policy = policy
        self._run = run
        self._executor = executor
        self._loop = loop
        self._on_batch = on_batch
        self._queue: list[Item] = []
        self._bytes = 0
        self._busy = 0
        self._item_s = 0.0
        self._standing: Overloaded | None = None
        self._pace = (pace or Pace()) if policy.batch and policy.max_delay_s is None else None
        self._wake: asyncio.TimerHandle | None = None
        self._pump_due = False
        self._emptied: list[asyncio.Future[None]] = []

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def idle(self) -> bool:
        return not self._busy and not self._queue

    def scale(self, lanes: int) -> None:
        """Runs at the same time from now on. What waits is run even when `lanes` is 0."""
        self.policy = replace(self.policy, lanes=lanes)
        self._standing = None
        self._pump()

    def emptied(self) -> asyncio.Future[None]:
        """Done when nothing runs or waits."""
        found: asyncio.Future[None] = self._loop.create_future()
        self._emptied.append(found)
        self._tell_emptied()
        return found

    def _tell_emptied(self) -> None:
        if self.idle:
            waiters, self._emptied = self._emptied, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def submit(
        self, inputs: Arrays, rows: int, key: object, timeout_s: float | None = None, priority: int = USUAL
    ) -> asyncio.Future[Outputs]:
        """A future of the outputs. Cancel it to withdraw the request. Raises Overloaded at once when the queue is full.

        The future raises DeadlineExceeded when `timeout_s` passes, whether the request waits or runs, and Overloaded
        when a more urgent request takes its place in a full queue. What comes in one turn of the loop runs together.
        """
        now = self._loop.time()
        num_bytes = sum(array.nbytes for array in inputs.values())
        self._make_room(num_bytes, priority)
        deadline = None if timeout_s is None else now + timeout_s
        item = Item(inputs, rows, key, num_bytes, now, deadline, self._loop.create_future(), priority)
        insort(self._queue, item, key=lambda one: one.rank)
        self._bytes += num_bytes
        self._standing = None
        if self._pace is not None:
            self._pace.arrived(rows, now)
        assert item.future is not None
        item.future.add_done_callback(lambda _: self._withdraw(item))
        if deadline is not None:
            timer = self._loop.call_at(deadline, self._expire, item)
            item.future.add_done_callback(lambda _: timer.cancel())
        if not self._pump_due and self._busy < max(1, self.policy.lanes):
            self._pump_due = True
            self._loop.call_soon(self._pump)
        return item.future

    @property
    def full(self) -> bool:
        """Whether no further request is let in, unless it takes the place of a less urgent one."""
        return 0 < len(self._queue) >= self.policy.max_requests and self.policy.lanes > 0

    def no_room(self, priority: int) -> Overloaded | None:
        """Why no request of `priority` is let in now, whatever it holds; the same one while nothing comes or goes."""
        if not self.full or self._queue[-1].priority > priority:
            return None
        if self._standing is None:
            self._standing = self._refused(0)
        return self._standing

    def _refused(self, num_bytes: int) -> Overloaded | None:
        """Why a request of `num_bytes` may not join the queue as it is; None when it may."""
        expected_s = len(self._queue) * self._item_s
        why = refusal(len(self._queue), self._bytes, num_bytes, expected_s, self.policy)
        if why is None:
            return None
        return Overloaded(why, hint="come back later", retry_after_s=max(1.0, math.ceil(expected_s)))

    def _make_room(self, num_bytes: int, priority: int) -> None:
        """Raises Overloaded when the queue is full of requests that are as urgent."""
        while True:
            refused = self._refused(num_bytes)
            if refused is None:
                return
            last = self._queue[-1] if self._queue else None
            if last is None or last.priority <= priority or last.future is None:
                raise refused
            self._take([last])
            if not last.future.done():
                last.future.set_exception(refused)

    def _withdraw(self, item: Item) -> None:
        if item in self._queue:
            self._take([item])

    def _take(self, items: Sequence[Item]) -> None:
        self._standing = None
        for item in items:
            self._queue.remove(item)
            self._bytes -= item.num_bytes

    def _expire(self, item: Item) -> None:
        self._withdraw(item)
        if item.future is not None and not item.future.done():
            waited_s = self._loop.time() - item.since
            item.future.set_exception(DeadlineExceeded(f"no answer within the request's deadline of {waited_s:.3g} s"))

    def _pump(self) -> None:
        """Does what `decide` says until it says to wait."""
        self._pump_due = False
        while True:
            policy = self.policy if self.policy.lanes else replace(self.policy, lanes=1)  # what waits is still run
            now = self._loop.time()
            decision = decide(self._queue, busy=self._busy, now=now, policy=policy, pace=self._pace)
            for item in decision.expired:
                self._expire(item)
            if not decision.run:
                break
            self._take(decision.run)
            self._start(decision.run)
        if self._wake is not None:
            self._wake.cancel()
        self._wake = None if decision.wake_at is None else self._loop.call_at(decision.wake_at, self._pump)
        if self._emptied:
            self._tell_emptied()

    def _start(self, items: tuple[Item, ...]) -> None:
        self._busy += 1
        began = self._loop.time()
        inputs, rows = [item.inputs for item in items], [item.rows for item in items]
        running = self._loop.run_in_executor(self._executor, run_batch, self._run, inputs, rows, self._padding)
        running.add_done_callback(lambda done: self._finished(items, began, done))

    def _finished(self, items: tuple[Item, ...], began: float, done: asyncio.Future[list[Outputs | Exception]]) -> None:
        self._busy -= 1
        now = self._loop.time()
        took_s, rows = now - began, sum(item.rows for item in items)
        self._item_s += 0.2 * (took_s / len(items) - self._item_s)
        if self._pace is not None:
            self._pace.ran(rows, took_s, now)
        results: list[Outputs | Exception]
        failure = None if done.cancelled() else done.exception()
        results = done.result() if failure is None and not done.cancelled() else [_failure(failure)] * len(items)
        for item, result in zip(items, results, strict=True):
            if item.future is None or item.future.done():
                continue
            if isinstance(result, Exception):
                item.future.set_exception(result)
            else:
                item.future.set_result(result)
        if self._on_batch is not None:
            waited_s = sum(began - item.since for item in items)
            self._on_batch(len(items), rows, took_s, waited_s)
        self._pump()


def _failure(error: BaseException | None) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError("the run was abandoned")
