"""The queue of one model and the threads that run it: a shell of one event loop around `batcher`'s decisions.

    waiting ──decide──▶ a thread of the executor ──▶ answered           while a lane is free
    waiting ──decide──▶ on deck ──the thread that ends a run──▶         while none is, for a batch that is full
    waiting ──decide──▶ the loop itself ──▶ answered                    where a run is shorter than a hop to a thread

What lies on deck still waits: it counts for the queue's bound, and an urgent arrival, a withdrawal or a deadline may
change it, until a thread takes it. The thread and the loop agree about that under one lock; all else is the loop's.
"""

from __future__ import annotations

import asyncio
import math
import threading
from bisect import insort
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from trueline.bundle.padding import Padding
from trueline.errors import DeadlineExceeded, Overloaded
from trueline.serve.batching.latency_model import Pace
from trueline.serve.batching.policy import USUAL, Decision, Item, Policy, decide, refusal, run_batch

if TYPE_CHECKING:
    from trueline.serve.batching.policy import Arrays, Outputs, Run

_LOOK_EVERY = 16
"""Of so many short runs on the loop one asks whether its turn of the loop brought more requests."""
_LONE_TURNS = 8
"""After so many turns of the loop that brought one request each, the next is run as it comes."""
RunMode = Literal["now", "turn", "queue"]
"""Now; with the others of this turn of the loop, at its end; behind what waits."""


class _Promise(asyncio.Future["Outputs"]):
    """The outputs of an item; cancelling it withdraws the item while it waits."""

    def __init__(self, withdraw: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.withdraw: Callable[[], None] | None = withdraw
        """None once the item has left the queue, so that neither holds the other."""

    def cancel(self, msg: Any | None = None) -> bool:
        """Withdraws at once."""
        cancelled = super().cancel(msg)
        if cancelled and self.withdraw is not None:
            self.withdraw()
        return cancelled


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
        short_values: int = 0,
    ) -> None:
        """`on_batch(requests, rows, seconds, seconds waited by all)` is called on the loop after each run; `pace` is
        what is known of the program's runs, and learns on; `padding` lets requests of several lengths run together. A
        run over at most `short_values` numbers is done on the loop.
        """
        self._padding = padding
        self.policy = policy
        self._run = run
        self._executor = executor
        self._loop = loop
        self._on_batch = on_batch
        self._short_values = short_values
        self._queue: list[Item] = []
        """By rank; what lies on deck is in it."""
        self._rows = 0
        self._bytes = 0
        self._busy = 0
        self._item_s = 0.0
        self.standing: Overloaded | None = None
        """Why requests are refused as long as nothing comes or goes, once one was."""
        self._pace = (pace or Pace()) if policy.batch and policy.max_delay_s is None else None
        self._bound = self._full_rows()
        self._wake: asyncio.TimerHandle | None = None
        self._pump_due = False
        self._emptied: list[asyncio.Future[None]] = []
        self._lock = threading.Lock()
        """Of the two that follow, which threads change too."""
        self._deck: tuple[Item, ...] = ()
        self._taken: list[tuple[Item, ...]] = []
        """Batches that a thread has taken from the deck, and the loop not yet from the queue."""
        self._crowded = False
        self._lone = _LONE_TURNS
        self._held = 0
        self._looking = False
        self._came = 0
        self._unseen = _LOOK_EVERY

    @property
    def num_waiting(self) -> int:
        """How many wait, for any thread that asks: what is the loop's to notice is left to it."""
        with self._lock:
            return len(self._queue) - sum(map(len, self._taken))

    @property
    def idle(self) -> bool:
        return not self._busy and not self._queue and not self._held

    @property
    def full_rows(self) -> int:
        """Rows of a full batch, as far as is known."""
        return self._bound

    def scale(self, lanes: int) -> None:
        """Runs at the same time from now on. What waits is run even when `lanes` is 0."""
        self.policy = replace(self.policy, lanes=lanes)
        self.standing = None
        self._recall()
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

    def run_mode(self) -> RunMode:
        """How a short request that may wait for no other is best run."""
        if self._busy or self._queue or not self.policy.lanes:
            return "queue"
        if self._crowded:
            return "queue" if self._pace is None else "turn"
        return "now" if self.alone() else "queue"

    def alone(self) -> bool:
        """Whether a short request is best run at once: nothing waits or runs, and each turn of the loop brings one.

        Where a turn brings several they are better run together. That is looked for at one request of some.
        """
        if self._busy or self._queue or self._crowded:
            return False
        if self._pace is None:
            return True
        if self._looking:
            self._came += 1
            if self._came == 1:
                self._loop.call_soon(self._looked)
            return True
        self._unseen -= 1
        if self._unseen == 0:
            self._loop.call_soon(self._look)  # from the next turn's first on: this one may be its turn's last
        return True

    def _look(self) -> None:
        self._looking, self._came = True, 0

    def _looked(self) -> None:
        self._looking, self._unseen = False, _LOOK_EVERY
        self._turn_brought(self._came)

    def _turn_brought(self, requests: int) -> None:
        """Turns of the loop are crowded from one that brings several on, until some in a row have brought one each."""
        self._lone = 0 if requests > 1 else self._lone + 1
        self._crowded = self._lone < _LONE_TURNS

    def hold(self) -> None:
        """Short requests are held, to be run at the end of this turn of the loop: it calls `release` when they are."""
        self._held += 1

    def release(self, requests: int) -> None:
        """They were so many."""
        self._held -= 1
        self._turn_brought(requests)
        if self._emptied:
            self._tell_emptied()

    def submit(
        self, inputs: Arrays, rows: int, key: object, timeout_s: float | None = None, priority: int = USUAL
    ) -> asyncio.Future[Outputs]:
        """A future of the outputs. Cancel it to withdraw the request. Raises Overloaded at once when the queue is full.

        The future raises DeadlineExceeded when `timeout_s` passes, whether the request waits or runs, and Overloaded
        when a more urgent request takes its place in a full queue. What comes in one turn of the loop runs together.
        """
        now = self._loop.time()
        num_bytes = values = 0
        for array in inputs.values():
            num_bytes += array.nbytes
            values += array.size
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
            insort(queue, item, key=lambda one: one.rank)
            if self._deck and item.rank < self._deck[-1].rank:
                self._recall()
        self._rows += rows
        self._bytes += num_bytes
        self.standing = None
        if self._pace is not None and values > self._short_values:
            self._pace.arrived(rows, now)
        if self._busy >= max(1, self.policy.lanes):
            self._lay(now)
        elif not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump)
        return promise

    @property
    def full(self) -> bool:
        """Whether no further request is let in, unless it takes the place of a less urgent one."""
        if self._taken:
            self._notice()
        return 0 < len(self._queue) >= self.policy.max_requests and self.policy.lanes > 0

    def no_room(self, priority: int) -> Overloaded | None:
        """Why no request of `priority` is let in now, whatever it holds; the same one while nothing comes or goes."""
        if self._taken:
            self._notice()
        if self.standing is None:
            if not self.full:
                return None
            self.standing = self._refused(0)
        return None if self._queue[-1].priority > priority else self.standing

    def _refused(self, num_bytes: int) -> Overloaded | None:
        """Why a request of `num_bytes` may not join the queue as it is; None when it may."""
        expected_s = len(self._queue) * self._item_s
        why = refusal(len(self._queue), self._bytes, num_bytes, expected_s, self.policy)
        if why is None:
            return None
        return Overloaded(why, hint="come back later", retry_after_s=max(1.0, math.ceil(expected_s)))

    def _make_room(self, num_bytes: int, priority: int) -> None:
        """Raises Overloaded when the queue is full of requests that are as urgent."""
        self._notice()
        while True:
            refused = self._refused(num_bytes)
            if refused is None:
                return
            last = self._queue[-1] if self._queue else None
            if last is None or last.priority <= priority or last.future is None:
                raise refused
            if self._remove(last) and not last.future.done():
                last.future.set_exception(refused)

    # what leaves the queue

    def _notice(self) -> None:
        """Takes from the queue what threads have taken from the deck."""
        if self._taken:
            with self._lock:
                taken, self._taken = self._taken, []
            for items in taken:
                self._take(items)

    def _recall(self) -> None:
        """What lies on deck only waits again, or has been taken and is noticed."""
        with self._lock:
            self._deck = ()
        self._notice()

    def _remove(self, item: Item) -> bool:
        """Takes `item` from the queue; False when it does not wait any more."""
        if item in self._deck:
            self._recall()
        self._notice()
        if item not in self._queue:
            return False
        self._take((item,))
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
            self._lay(self._loop.time())

    def _expire(self, item: Item) -> None:
        self._withdraw(item)
        if item.future is not None and not item.future.done():
            waited_s = self._loop.time() - item.since
            item.future.set_exception(DeadlineExceeded(f"no answer within the request's deadline of {waited_s:.3g} s"))

    # what runs

    def _decided(self, now: float, *, busy: int) -> Decision:
        policy = self.policy if self.policy.lanes else replace(self.policy, lanes=1)  # what waits is still run
        if self._pace is not None and self._queue and self._queue[0].values <= self._short_values:
            return decide(self._queue, busy=busy, now=now, policy=replace(policy, max_delay_s=0.0))
        return decide(self._queue, busy=busy, now=now, policy=policy, pace=self._pace)

    def _full_rows(self) -> int:
        policy = self.policy
        if not policy.batch:
            return 1
        return policy.max_batch if self._pace is None else self._pace.curve.full(policy.max_batch)

    def _lay(self, now: float) -> None:
        """Lays a full batch on deck when every lane is busy: the thread that ends its run goes on with it at once."""
        if self._deck or self._rows < self._bound or self._busy != max(1, self.policy.lanes):
            return
        self._notice()
        decision = self._decided(now, busy=0)
        if decision.full and not decision.expired:
            with self._lock:
                self._deck = decision.run

    def _pump(self) -> None:
        """Does what `decide` says until it says to wait."""
        self._pump_due = False
        while True:
            if self._busy < max(1, self.policy.lanes):
                self._recall()
            now = self._loop.time()
            decision = self._decided(now, busy=self._busy)
            for item in decision.expired:
                self._expire(item)
            if not decision.run:
                break
            self._take(decision.run)
            self._start(decision.run)
        if self._wake is not None:
            self._wake.cancel()
        self._wake = None if decision.wake_at is None else self._loop.call_at(decision.wake_at, self._pump)
        self._lay(now)
        if self._emptied:
            self._tell_emptied()

    def _start(self, items: tuple[Item, ...]) -> None:
        if self._short_values and sum(item.values for item in items) <= self._short_values:
            self._turn_brought(len(items))
            began = monotonic()
            results = self._results(items)
            self._settle(items, began, monotonic() - began, results)
        else:
            self._busy += 1
            self._executor.submit(self._work, items, monotonic())

    def _results(self, items: tuple[Item, ...]) -> list[Outputs | Exception]:
        try:
            return run_batch(self._run, [item.inputs for item in items], [item.rows for item in items], self._padding)
        except BaseException as error:  # noqa: BLE001 - blind on purpose: a run that breaks its thread still has an end
            failure = error if isinstance(error, Exception) else RuntimeError("the run was abandoned")
            return [failure] * len(items)

    def _work(self, items: tuple[Item, ...], sent: float | None) -> None:
        """In a thread: runs `items`, which the loop sent at `sent`, and then what lies on deck, and so on."""
        while items:
            began = monotonic()
            results = self._results(items)
            took_s = monotonic() - began
            with self._lock:
                following, self._deck = self._deck, ()
                if following:
                    self._taken.append(following)
                    self.standing = None
            try:
                self._loop.call_soon_threadsafe(self._ran, items, sent, began, took_s, results, not following)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return
            items, sent = following, None

    def _ran(
        self,
        items: tuple[Item, ...],
        sent: float | None,
        began: float,
        took_s: float,
        results: Sequence[Outputs | Exception],
        lane_is_free: bool,
    ) -> None:
        self._notice()
        if lane_is_free:
            self._busy -= 1
        if self._pace is not None:  # a run that the loop sent takes as long as its way there and back, too
            felt_s = took_s if sent is None else monotonic() - sent
            self._pace.ran(sum(item.rows for item in items), felt_s, self._loop.time())
            self._bound = self._full_rows()
        self._settle(items, began, took_s, results)
        self._pump()

    def _settle(
        self, items: tuple[Item, ...], began: float, took_s: float, results: Sequence[Outputs | Exception]
    ) -> None:
        """Hands over the results."""
        self._item_s += 0.2 * (took_s / len(items) - self._item_s)
        rows, waited_s = 0, 0.0
        for item, result in zip(items, results, strict=True):
            rows += item.rows
            waited_s += began - item.since
            if item.timer is not None:
                item.timer.cancel()
            if item.future is None or item.future.done():
                continue
            if isinstance(result, Exception):
                item.future.set_exception(result)
            else:
                item.future.set_result(result)
        if self._on_batch is not None:
            self._on_batch(len(items), rows, took_s, waited_s)
