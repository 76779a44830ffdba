"""The queue of one model and the threads that run its batches: one event loop around the decisions of `policy`.

    waiting ──decide──▶ a thread of the executor ──▶ answered           while a lane is free
    waiting ──decide──▶ next batch ──the thread that ends a run──▶      while none is, for a full batch
    waiting ──decide──▶ the loop itself ──▶ answered                    for runs shorter than a hop to a thread

The next batch still waits until a thread takes it: it counts toward the queue's limits, and an urgent arrival, a
withdrawal or a deadline may change it. Thread and loop agree on it under one lock; all other state is the loop's.
"""

from __future__ import annotations

import asyncio
import math
import threading
from bisect import insort
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from trueline.bundle.padding import Padding
from trueline.errors import DeadlineExceeded, Overloaded
from trueline.serve.batching.latency_model import LatencyModel
from trueline.serve.batching.policy import USUAL, Decision, Item, Policy, decide, refusal, run_batch
from trueline.serve.batching.turns import TurnSampler

if TYPE_CHECKING:
    from trueline.serve.batching.policy import Arrays, Outputs, Run

RunMode = Literal["now", "turn", "queue"]
"""At once; at the end of this turn of the loop, with its other requests; behind the waiting requests."""


class _Promise(asyncio.Future["Outputs"]):
    """The outputs of an item. Cancelling it withdraws a waiting item."""

    def __init__(self, withdraw: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.withdraw: Callable[[], None] | None = withdraw
        """None once the item has left the queue: that breaks the reference cycle."""

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled and self.withdraw is not None:
            self.withdraw()
        return cancelled


@dataclass(frozen=True, slots=True)
class _BatchRun:
    items: tuple[Item, ...]
    results: Sequence[Outputs | Exception]
    rows: int
    began: float
    took_s: float


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
        model: LatencyModel | None = None,
        padding: Padding | None = None,
        short_values: int = 0,
    ) -> None:
        """`on_batch(requests, rows, seconds, seconds waited by all)` is called on the loop after each run; `model` has
        the known run times; with `padding` requests of several lengths run together; runs of at most `short_values`
        input values run on the loop.
        """
        self._padding = padding
        self.policy = policy
        self._run = run
        self._executor = executor
        self._loop = loop
        self._on_batch = on_batch
        self._short_values = short_values
        self._queue: list[Item] = []
        """By rank; includes the next batch."""
        self._rows = 0
        self._bytes = 0
        self._busy = 0
        self._num_short = 0
        """Short items that wait or run."""
        self._item_s = 0.0
        self.standing: Overloaded | None = None
        """The last refusal, valid until a request joins or leaves the queue."""
        self._model = (model or LatencyModel()) if policy.batch and policy.max_delay_s is None else None
        self.full_rows = self._full_rows()
        """Rows of a full batch, as learned so far."""
        self._wake: asyncio.TimerHandle | None = None
        self._pump_due = False
        self._empty_waiters: list[asyncio.Future[None]] = []
        self._lock = threading.Lock()
        """Of the next two, which threads change too."""
        self._next: tuple[Item, ...] = ()
        self._taken: list[tuple[Item, ...]] = []
        """Batches that a thread has taken, and the loop has not yet removed from the queue."""
        self._turns = TurnSampler(loop)
        self._held = 0

    @property
    def num_waiting(self) -> int:
        """May be called by any thread."""
        with self._lock:
            return len(self._queue) - sum(map(len, self._taken))

    @property
    def idle(self) -> bool:
        return not self._busy and not self._queue and not self._held

    def scale(self, lanes: int) -> None:
        """Sets the number of parallel runs. Waiting requests run even when `lanes` is 0."""
        self.policy = replace(self.policy, lanes=lanes)
        self.standing = None
        self._cancel_next()
        self._pump()

    def wait_empty(self) -> asyncio.Future[None]:
        """Done when nothing runs or waits."""
        empty: asyncio.Future[None] = self._loop.create_future()
        self._empty_waiters.append(empty)
        self._notify_if_empty()
        return empty

    def _notify_if_empty(self) -> None:
        while self._empty_waiters and self.idle:
            waiter = self._empty_waiters.pop(0)
            if not waiter.done():
                waiter.set_result(None)

    def run_mode(self) -> RunMode:
        """How a short request without deadline or priority is best run."""
        if self.policy.lanes and not self._blocks_short() and self._turns.crowded and self._model is not None:
            return "turn"
        return "now" if self.policy.lanes and self.alone() else "queue"

    def alone(self) -> bool:
        """Whether a short request is best run at once: none waits or runs, and turns bring one request each."""
        if self._blocks_short() or self._turns.crowded:
            return False
        if self._model is not None:
            self._turns.count_request()
        return True

    def _blocks_short(self) -> bool:
        """Whether a short request waits. Not for long ones, as pieces of a large request: they run in threads."""
        return bool(self._num_short or (not self._short_values and (self._busy or self._queue)))

    def hold(self) -> None:
        """Requests are active without waiting or running, as short ones until the end of a turn; `release` follows."""
        self._held += 1

    def release(self, requests: int) -> None:
        """The `requests` that were held have run."""
        self._held -= 1
        self._turns.count_turn(requests)
        self._notify_if_empty()

    def submit(
        self,
        inputs: Arrays,
        rows: int,
        key: object,
        timeout_s: float | None = None,
        priority: int = USUAL,
        *,
        accepted: bool = False,
    ) -> asyncio.Future[Outputs]:
        """A future of the outputs; cancelling it withdraws the request. Raises Overloaded when the queue is full.

        The future raises DeadlineExceeded after `timeout_s`, waiting or running, and Overloaded when a more urgent
        request takes its place. Requests of one turn of the loop run together. `accepted`: a further piece of a request
        that was.
        """
        now = self._loop.time()
        num_bytes = sum([array.nbytes for array in inputs.values()])
        values = sum([array.size for array in inputs.values()])
        if not accepted:
            self._make_room(num_bytes, priority)
        item = Item(inputs, rows, key, num_bytes, now, None, None, priority, values)
        item.future = promise = _Promise(lambda: self._withdraw(item), self._loop)
        if timeout_s is not None:
            item.deadline = now + timeout_s
            item.timer = self._loop.call_at(item.deadline, self._expire, item)
        queue = self._queue
        if not queue or queue[-1].rank <= item.rank:
            queue.append(item)
        else:
            insort(queue, item, key=lambda other: other.rank)
            if self._next and item.rank < self._next[-1].rank:
                self._cancel_next()
        self._rows += rows
        self._bytes += num_bytes
        self.standing = None
        self._num_short += values <= self._short_values
        if self._model is not None and values > self._short_values:
            self._model.count_arrival(rows, now)
        if self._busy >= max(1, self.policy.lanes):
            self._prepare_next(now)
        elif not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump)
        return promise

    @property
    def full(self) -> bool:
        """Whether a further request is rejected, unless it takes the place of a less urgent one."""
        self._remove_taken()
        return 0 < len(self._queue) >= self.policy.max_requests and self.policy.lanes > 0

    def no_room(self, priority: int) -> Overloaded | None:
        """Why every request of `priority` is rejected now; the same object while nothing joins or leaves the queue."""
        self._remove_taken()
        if self.standing is None:
            if not self.full:
                return None
            self.standing = self._check_limits(0)
        return None if self._queue[-1].priority > priority else self.standing

    def _check_limits(self, num_bytes: int) -> Overloaded | None:
        """Why a request of `num_bytes` may not join the queue; None: it may."""
        expected_s = len(self._queue) * self._item_s
        why = refusal(len(self._queue), self._bytes, num_bytes, expected_s, self.policy)
        if why is None:
            return None
        return Overloaded(why, hint="come back later", retry_after_s=max(1.0, math.ceil(expected_s)))

    def _make_room(self, num_bytes: int, priority: int) -> None:
        """Raises Overloaded when the queue is full of requests at least as urgent."""
        self._remove_taken()
        while True:
            refused = self._check_limits(num_bytes)
            if refused is None:
                return
            last = self._queue[-1] if self._queue else None
            if last is None or last.priority <= priority or last.future is None:
                raise refused
            if self._remove(last) and not last.future.done():
                last.future.set_exception(refused)

    # leaving the queue

    def _remove_taken(self) -> None:
        """Removes from the queue the batches that threads have taken."""
        if self._taken:
            with self._lock:
                taken, self._taken = self._taken, []
            for items in taken:
                self._take(items)

    def _cancel_next(self) -> None:
        """Afterwards there is no next batch; one that a thread has taken is removed from the queue."""
        with self._lock:
            self._next = ()
        self._remove_taken()

    def _remove(self, item: Item) -> bool:
        """False when `item` no longer waits."""
        if item in self._next:
            self._cancel_next()
        self._remove_taken()
        if item not in self._queue:
            return False
        self._take((item,))
        self._num_short -= item.values <= self._short_values
        return True

    def _take(self, items: Sequence[Item]) -> None:
        self.standing = None
        for item in items:
            self._queue.remove(item)
            self._rows -= item.rows
            self._bytes -= item.num_bytes
            if isinstance(item.future, _Promise):
                item.future.withdraw = None

    def _withdraw(self, item: Item) -> None:
        if item.timer is not None:
            item.timer.cancel()
        if self._remove(item):
            self._prepare_next(self._loop.time())

    def _expire(self, item: Item) -> None:
        self._withdraw(item)
        if item.future is not None and not item.future.done():
            waited_s = self._loop.time() - item.since
            item.future.set_exception(DeadlineExceeded(f"no answer within the request's deadline of {waited_s:.3g} s"))

    # running

    def _decide(self, now: float, *, busy: int) -> Decision:
        policy = self.policy if self.policy.lanes else replace(self.policy, lanes=1)  # waiting requests still run
        if self._model is not None and self._queue and self._queue[0].values <= self._short_values:
            return decide(self._queue, busy=busy, now=now, policy=replace(policy, max_delay_s=0.0))
        return decide(self._queue, busy=busy, now=now, policy=policy, model=self._model)

    def _full_rows(self) -> int:
        most = self.policy.max_batch if self.policy.batch else 1
        return most if self._model is None else self._model.curve.full(most)

    def _prepare_next(self, now: float) -> None:
        """Prepares a full batch while every lane is busy: the thread that ends its run continues with it at once."""
        if self._next or self._rows < self.full_rows or self._busy != max(1, self.policy.lanes):
            return
        self._remove_taken()
        decision = self._decide(now, busy=0)
        if decision.full and not decision.expired:
            with self._lock:
                self._next = decision.run

    def _pump(self) -> None:
        """Starts runs until `decide` says to wait."""
        self._pump_due = False
        while True:
            if self._busy < max(1, self.policy.lanes):
                self._cancel_next()
            now = self._loop.time()
            decision = self._decide(now, busy=self._busy)
            for item in decision.expired:
                self._expire(item)
            if not decision.run:
                break
            self._take(decision.run)
            self._start(decision.run)
        if self._wake is not None:
            self._wake.cancel()
        self._wake = None if decision.wake_at is None else self._loop.call_at(decision.wake_at, self._pump)
        self._prepare_next(now)
        self._notify_if_empty()

    def _start(self, items: tuple[Item, ...]) -> None:
        if self._short_values and sum(item.values for item in items) <= self._short_values:
            self._turns.count_turn(len(items))
            self._settle(self._run_items(items))
        else:
            self._busy += 1
            self._executor.submit(self._work, items, monotonic())

    def _run_items(self, items: tuple[Item, ...]) -> _BatchRun:
        began, inputs, rows = monotonic(), [item.inputs for item in items], [item.rows for item in items]
        results: Sequence[Outputs | Exception]
        try:
            results = run_batch(self._run, inputs, rows, self._padding)
        except BaseException as error:  # noqa: BLE001 - blind on purpose: the run ends even if it broke its thread
            failure = error if isinstance(error, Exception) else RuntimeError("the run was abandoned")
            results = [failure] * len(items)
        return _BatchRun(items, results, sum(rows), began, monotonic() - began)

    def _work(self, items: tuple[Item, ...], sent: float | None) -> None:
        """In a thread: runs `items`, which the loop sent at `sent`, and then each next batch."""
        while items:
            run = self._run_items(items)
            with self._lock:
                following, self._next = self._next, ()
                if following:
                    self._taken.append(following)
                    self.standing = None
            try:
                self._loop.call_soon_threadsafe(self._finish, run, sent, not following)
            except RuntimeError:  # the loop is closed: no request waits any more
                return
            items, sent = following, None

    def _finish(self, run: _BatchRun, sent: float | None, lane_is_free: bool) -> None:
        self._remove_taken()
        if lane_is_free:
            self._busy -= 1
        if self._model is not None:  # with the way to the thread and back
            total_s = run.took_s if sent is None else monotonic() - sent
            self._model.count_run(run.rows, total_s, self._loop.time())
            self.full_rows = self._full_rows()
        self._settle(run)
        self._pump()

    def _settle(self, run: _BatchRun) -> None:
        """Sets the results on the futures."""
        self._item_s += 0.2 * (run.took_s / len(run.items) - self._item_s)
        waited_s = 0.0
        for item, result in zip(run.items, run.results, strict=True):
            waited_s += run.began - item.since
            self._num_short -= item.values <= self._short_values
            if item.timer is not None:
                item.timer.cancel()
            if item.future is None or item.future.done():
                continue
            if isinstance(result, Exception):
                item.future.set_exception(result)
            else:
                item.future.set_result(result)
        if self._on_batch is not None:
            self._on_batch(len(run.items), run.rows, run.took_s, waited_s)
