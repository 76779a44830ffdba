"""Requests that wait are run together. A pure decision in the middle, a thin asyncio shell around it.

No timers by default: an idle model runs what comes at once; while it runs, requests collect, and the next run takes
them together. A batch that fails is run again item by item, so one bad item fails alone. What the queue cannot
hold is refused at once. It knows neither HTTP nor what a program is: a function from arrays to arrays.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from trueline import events
from trueline.errors import DeadlineExceeded, Overloaded

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

    Arrays = Mapping[str, Array]
    Outputs = dict[str, Array]
    Run = Callable[[Arrays], Outputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How requests may be put together, and how many may wait."""

    batch: bool = True
    """False: each request runs alone."""
    max_batch: int = 64
    """Rows of one run; a larger request still runs, alone."""
    max_delay_s: float = 0.0
    """How long an idle model may wait for company."""
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


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and why."""

    run: tuple[Item, ...]
    expired: tuple[Item, ...]
    wake_at: float | None
    reason: str


def decide(queue: Sequence[Item], *, busy: int, now: float, policy: Policy) -> Decision:
    """What to run of `queue` (oldest first) at `now`, while `busy` runs are under way.

    The oldest item is always in the run; those that fit beside it come along in their order. `wake_at` says when to
    ask again if nothing happens before.
    """
    expired = tuple(item for item in queue if item.deadline is not None and item.deadline <= now)
    waiting = [item for item in queue if item not in expired] if expired else queue
    if not waiting:
        return Decision((), expired, None, "empty")
    if busy >= policy.lanes:
        return Decision((), expired, None, "busy")
    run = _together(waiting, policy)
    ready_at = waiting[0].since + policy.max_delay_s
    room = sum(item.rows for item in run) < policy.max_batch
    if policy.batch and room and len(run) == len(waiting) and now < ready_at:
        return Decision((), expired, ready_at, "filling")
    return Decision(run, expired, None, "idle")


def _together(waiting: Sequence[Item], policy: Policy) -> tuple[Item, ...]:
    head = waiting[0]
    if not policy.batch:
        return (head,)
    run, rows = [head], head.rows
    for item in waiting[1:]:
        if item.key != head.key:
            continue
        if rows + item.rows > policy.max_batch:
            break
        run.append(item)
        rows += item.rows
    return tuple(run)


def refusal(num_waiting: int, bytes_waiting: int, num_bytes: int, expected_s: float, policy: Policy) -> str | None:
    """Why a request of `num_bytes` may not join the queue; None when it may."""
    if num_waiting >= policy.max_requests:
        return f"{num_waiting} requests wait for this model already, about {expected_s:.3g} s of work"
    if num_waiting and bytes_waiting + num_bytes > policy.max_bytes:
        return f"requests of {bytes_waiting} bytes wait for this model already"
    return None


def run_batch(run: Run, items: Sequence[Arrays], rows: Sequence[int]) -> list[Outputs | Exception]:
    """One result for each item: from one run over all of them, or, when that fails, from one run each."""
    if len(items) == 1:
        return [_alone(run, items[0])]
    try:
        joined = {name: np.concatenate([item[name] for item in items]) for name in items[0]}
        return _split(run(joined), rows)
    except Exception as error:  # noqa: BLE001 - blind on purpose: whatever failed, each item gets its own run
        events.emit("batch.failed", items=len(items), why=type(error).__name__)
        return [_alone(run, item) for item in items]


def _alone(run: Run, item: Arrays) -> Outputs | Exception:
    try:
        return run(item)
    except Exception as error:  # noqa: BLE001 - blind on purpose: it is handed to the one request that caused it
        return error


def _split(outputs: Outputs, rows: Sequence[int]) -> list[Outputs | Exception]:
    total, results, at = sum(rows), [], 0
    if any(array.ndim == 0 or len(array) != total for array in outputs.values()):
        raise ValueError("an output's first dimension does not count the rows")
    for count in rows:
        results.append({name: array[at : at + count] for name, array in outputs.items()})
        at += count
    return list(results)


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
    ) -> None:
        """`on_batch(requests, rows, seconds, seconds waited by all)` is called on the loop after each run."""
        self.policy = policy
        self._run = run
        self._executor = executor
        self._loop = loop
        self._on_batch = on_batch
        self._queue: list[Item] = []
        self._bytes = 0
        self._busy = 0
        self._item_s = 0.0
        self._wake: asyncio.TimerHandle | None = None
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

    def submit(self, inputs: Arrays, rows: int, key: object, timeout_s: float | None = None) -> asyncio.Future[Outputs]:
        """A future of the outputs. Cancel it to withdraw the request. Raises Overloaded at once when the queue is full.

        The future raises DeadlineExceeded when `timeout_s` passes, whether the request waits or runs.
        """
        now = self._loop.time()
        num_bytes = sum(array.nbytes for array in inputs.values())
        expected_s = len(self._queue) * self._item_s
        why = refusal(len(self._queue), self._bytes, num_bytes, expected_s, self.policy)
        if why is not None:
            raise Overloaded(why, hint="come back later", retry_after_s=max(1.0, math.ceil(expected_s)))
        deadline = None if timeout_s is None else now + timeout_s
        item = Item(inputs, rows, key, num_bytes, now, deadline, self._loop.create_future())
        self._queue.append(item)
        self._bytes += num_bytes
        assert item.future is not None
        item.future.add_done_callback(lambda _: self._withdraw(item))
        if deadline is not None:
            timer = self._loop.call_at(deadline, self._expire, item)
            item.future.add_done_callback(lambda _: timer.cancel())
        self._pump()
        return item.future

    def _withdraw(self, item: Item) -> None:
        if item in self._queue:
            self._take([item])

    def _take(self, items: Sequence[Item]) -> None:
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
        while True:
            policy = self.policy if self.policy.lanes else replace(self.policy, lanes=1)  # what waits is still run
            decision = decide(self._queue, busy=self._busy, now=self._loop.time(), policy=policy)
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
        running = self._loop.run_in_executor(self._executor, run_batch, self._run, inputs, rows)
        running.add_done_callback(lambda done: self._finished(items, began, done))

    def _finished(self, items: tuple[Item, ...], began: float, done: asyncio.Future[list[Outputs | Exception]]) -> None:
        self._busy -= 1
        took_s = self._loop.time() - began
        self._item_s += 0.2 * (took_s / len(items) - self._item_s)
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
            self._on_batch(len(items), sum(item.rows for item in items), took_s, waited_s)
        self._pump()


def _failure(error: BaseException | None) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError("the run was abandoned")
