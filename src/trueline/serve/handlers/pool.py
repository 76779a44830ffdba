"""The queue of one handler and its workers.

    waiting ──gather──▶ an idle worker ──▶ answers          a worker that dies is restarted after a growing pause, and
       │                     │                              given up when it keeps dying for `max_retry_s`
    full: 429          dies: 503 at once

A request waits until a worker is idle and its batch is full or old enough; in a stateful model it waits for the worker
of its sequence. `config` and `sequences` decide; this module has the queue, the timers and the workers.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trueline import events
from trueline.errors import DeadlineExceeded, NotReady, Overloaded
from trueline.serve.handlers import sequences
from trueline.serve.handlers.config import backoff_s, gather
from trueline.serve.handlers.failures import NoSequence, StartFailed
from trueline.serve.handlers.sequences import Dropped, SequencePart, Sequences
from trueline.serve.handlers.worker import Launch, Worker
from trueline.serve.models.servable import NO_WORKER, NO_WORKERS, HandlerAnswer, HandlerRequest

MAX_QUEUE_BYTES = 256 * 2**20  # of the requests that wait for one model; a single request may be larger
OnBatch = Callable[[int, float, float], None]


@dataclass(slots=True, eq=False, kw_only=True)
class _Job:
    ask: HandlerRequest
    alone: bool
    since: float
    future: asyncio.Future[HandlerAnswer]
    part: SequencePart | None = None


@dataclass(slots=True, eq=False)
class _Slot:
    number: int
    first: asyncio.Future[None]  # done when its first worker is ready or has failed
    worker: Worker | None = None
    busy: bool = False
    leaving: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Pool:
    """The workers of one version. All methods are called on the loop."""

    def __init__(
        self,
        launch: Launch,
        loop: asyncio.AbstractEventLoop,
        *,
        on_batch: OnBatch | None = None,
        on_metrics: Callable[[Any], None] | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        """`on_batch(requests, seconds, seconds waited by all)` is called after each answered batch, `on_ready` when a
        worker becomes ready.
        """
        self.launch, self._loop = launch, loop
        self._on_batch, self._on_metrics, self._on_ready = on_batch, on_metrics, on_ready
        self._slots: list[_Slot] = []
        self._numbers = 0
        self._queue: list[_Job] = []
        self._wake: asyncio.TimerHandle | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._given_up = 0
        terms = launch.plan.sequences
        self._sequences: Sequences[_Job] | None = None if terms is None else Sequences(terms)

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + (self._sequences.num_waiting if self._sequences else 0)

    def _waiting(self) -> list[_Job]:
        return self._queue + self._sequences.waiting() if self._sequences else self._queue

    @property
    def num_workers(self) -> int:
        return sum(not slot.leaving for slot in self._slots)

    @property
    def obstacle(self) -> str:
        """Why a request would not be answered now; empty if a worker takes it."""
        if not self.num_workers:
            return "its workers died and were given up; scale it to start others" if self._given_up else NO_WORKERS
        if any(slot.worker is not None and slot.worker.ready and not slot.leaving for slot in self._slots):
            return ""
        return "its workers are starting"

    @property
    def sick(self) -> bool:
        """Whether a worker was given up since the last `scale`."""
        return self._given_up > 0

    def workers(self) -> list[tuple[int, Worker, bool]]:
        """Number, process, and whether it accepts requests."""
        return [
            (slot.number, slot.worker, slot.worker.ready and not slot.leaving)
            for slot in self._slots
            if slot.worker is not None
        ]

    async def begin(self, workers: int) -> None:
        """Returns when the first workers are ready. Raises StartFailed and ends all."""
        self.scale(workers)
        try:
            await self.wait_ready()
        except BaseException:
            await self.close()
            raise

    def scale(self, workers: int) -> None:
        """Starts or ends workers. One that ends answers its batch first and stays until its sequences have ended; with
        0 workers, sequences end when the waiting requests are answered.
        """
        self._given_up = 0
        for slot in [one for one in self._slots if one.leaving][: max(0, workers - self.num_workers)]:
            slot.leaving = False
        for _ in range(workers - self.num_workers):
            self._add()
        staying = [slot for slot in self._slots if not slot.leaving]
        for slot in sorted(staying, key=lambda one: (self._kept_by(one), one.busy))[: max(0, len(staying) - workers)]:
            slot.leaving = True
        self._pump()
        self._trim()

    def _kept_by(self, slot: _Slot) -> int:
        """The number of sequences in its worker."""
        return self._sequences.on(slot.number) if self._sequences else 0

    def _trim(self) -> None:
        """Removes workers that are leaving and free. The last ones stay until no request waits."""
        last = not self.num_workers
        if last and self._waiting():
            return
        for slot in [one for one in self._slots if one.leaving and not one.busy]:
            if last or not self._kept_by(slot):
                self._remove(slot)

    async def wait_ready(self) -> None:
        """Returns when every worker has been ready once. Raises StartFailed."""
        firsts = [slot.first for slot in self._slots]
        ends = await asyncio.gather(*(asyncio.shield(one) for one in firsts), return_exceptions=True)
        for error in ends:
            if isinstance(error, Exception):  # the first of a worker that was removed meanwhile is cancelled
                raise error

    def _add(self) -> None:
        slot = _Slot(self._numbers, self._loop.create_future())
        self._numbers += 1
        self._slots.append(slot)
        slot.task = self._loop.create_task(self._keep(slot))

    def _remove(self, slot: _Slot) -> None:
        self._slots.remove(slot)
        if self._sequences:
            self._drop(
                self._sequences.drop_worker(slot.number, now=self._loop.time(), how="was closed with its worker")
            )
        assert slot.task is not None
        self._ending.add(slot.task)
        slot.task.add_done_callback(self._ending.discard)
        slot.task.cancel()

    async def close(self) -> None:
        """Ends all workers at once; returns when they are gone."""
        self._fail_all("the model is unloaded")
        for slot in list(self._slots):
            self._remove(slot)
        if self._wake is not None:
            self._wake.cancel()
        if self._ending:
            await asyncio.wait(set(self._ending))

    async def _keep(self, slot: _Slot) -> None:
        """Runs a worker in `slot` and restarts it when it dies, after growing pauses, until it is given up."""
        deaths, failing_since = 0, 0.0
        max_retry_s = self.launch.plan.max_retry_s
        while True:
            began = self._loop.time()
            try:
                why, answered = await self._one_life(slot)
            except StartFailed as error:
                why, answered = error.message, False
                if not slot.first.done():
                    slot.first.set_exception(error)
                    slot.first.exception()
            except asyncio.CancelledError:
                slot.first.cancel()
                raise
            self._trim()
            if slot not in self._slots:
                return  # it was leaving, and has no sequences any more
            now = self._loop.time()
            if not deaths or answered or now - began > max_retry_s > 0:
                deaths, failing_since = 0, now
            deaths += 1
            if now - failing_since > max_retry_s:
                events.emit("worker.given_up", model=self.launch.model, worker=slot.number, why=why)
                self._given_up += 1
                self._slots.remove(slot)
                if not self._slots:
                    self._fail_all("its workers died and were given up")
                return
            pause_s = backoff_s(deaths)
            events.emit("worker.died", model=self.launch.model, worker=slot.number, why=why, again_in_s=pause_s)
            await asyncio.sleep(pause_s)

    async def _one_life(self, slot: _Slot) -> tuple[str, bool]:
        """Starts a worker and returns at its end: why, and whether it answered anything. Raises StartFailed."""
        gpus = self.launch.plan.gpus
        gpu = gpus[slot.number % len(gpus)] if gpus else None
        try:
            together = len(self._slots) > 1
            worker = Worker(self.launch, self._loop, gpu=gpu, on_metrics=self._on_metrics, together=together)
        except OSError as error:
            raise StartFailed(f"no process could be started: {error.strerror}") from error
        slot.worker = worker
        try:
            await worker.wait_started()
            events.emit("worker.ready", model=self.launch.model, worker=slot.number, pid=worker.pid)
            if slot.first.done():
                slot.first = self._loop.create_future()  # its failure is over
            slot.first.set_result(None)
            if self._on_ready is not None:
                self._on_ready()
            self._pump()
            return await asyncio.shield(worker.ended), worker.answered > 0
        finally:
            if self._sequences and (count := self._kept_by(slot)):
                model, number = self.launch.model, slot.number
                events.emit("sequences.lost", model=model, worker=number, count=count, pid=worker.pid)
                self._drop(self._sequences.drop_worker(slot.number, now=self._loop.time()))
            slot.worker = None
            worker.kill("was stopped")
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(worker.ended)

    def submit(
        self, ask: HandlerRequest, *, alone: bool = False, part: SequencePart | None = None
    ) -> asyncio.Future[HandlerAnswer]:
        """A future of the answer; cancel it to withdraw the request.

        Raises Overloaded, NoSequence, NotReady; the future HandlerFailed, DeadlineExceeded, NoSequence, NotReady.
        """
        plan = self.launch.plan
        if not self._slots:
            raise NotReady(f"model '{self.launch.model}' has no worker")
        job = _Job(ask=ask, alone=alone, since=self._loop.time(), future=self._loop.create_future(), part=part)
        self._enqueue(job)
        patience_s = plan.client_timeout_s or plan.response_timeout_s + plan.startup_timeout_s
        timer = self._loop.call_later(patience_s, self._expire, job, patience_s)
        job.future.add_done_callback(lambda _: self._leave(job, timer))
        self._pump()
        return job.future

    def _enqueue(self, job: _Job) -> None:
        waiting = self._waiting()
        waiting_bytes = sum(one.ask.num_bytes for one in waiting)
        full = waiting_bytes + job.ask.num_bytes > MAX_QUEUE_BYTES and bool(waiting)
        if full or (job.part is None and len(self._queue) >= self.launch.plan.queue_size):
            raise Overloaded(
                f"{len(waiting)} requests of {waiting_bytes} bytes wait for this model already", hint="come back later"
            )
        if self._sequences is None or job.part is None:
            self._queue.append(job)
            return
        self._end_sequences()
        room = self.launch.plan.max_sequences(self.num_workers)
        refused = self._sequences.join(job, now=job.since, room=room)
        if refused is not None:
            raise self._no_sequence(refused)

    def _no_sequence(self, refused: sequences.Refusal) -> NoSequence:
        return NoSequence(f'Model "{self.launch.model}" {NO_WORKER}: {refused.why}', hint=refused.hint)

    def _drop(self, dropped: Dropped[_Job]) -> None:
        for job, refused in dropped:
            self._fail(job, self._no_sequence(refused))

    def _end_sequences(self) -> None:
        if self._sequences:
            self._drop(self._sequences.expire(self._loop.time()))

    def _leave(self, job: _Job, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        if job in self._queue:
            self._queue.remove(job)
        elif self._sequences and job.part is not None:
            self._sequences.leave(job)
        self._trim()
        self._notify_if_empty()

    def _expire(self, job: _Job, patience_s: float) -> None:
        if self.launch.plan.client_timeout_s or job in self._waiting():
            self._fail(job, DeadlineExceeded(f"no answer within {patience_s:g} s"))

    def _fail_all(self, why: str) -> None:
        for job in list(self._waiting()):
            self._fail(job, NotReady(f"model '{self.launch.model}' has no worker: {why}"))

    @staticmethod
    def _fail(job: _Job, error: BaseException) -> None:
        if not job.future.done():
            job.future.set_exception(error)

    def wait_empty(self) -> asyncio.Future[None]:
        """Done when no request waits and no worker is busy."""
        found: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(found)
        self._notify_if_empty()
        return found

    def _notify_if_empty(self) -> None:
        if self._waiters and not self._waiting() and not any(slot.busy for slot in self._slots):
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _pump(self) -> None:
        """Sends due requests to idle workers."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        self._end_sequences()
        able = [one for one in self._slots if one.worker is not None and one.worker.ready]
        open_to_all = [one for one in able if not one.leaving or not self.num_workers]
        if self._sequences:
            self._sequences.place([one.number for one in sorted(open_to_all, key=lambda one: one.busy)])
        times = [self._sequences.wake_at()] if self._sequences else []
        for slot in able:
            if not slot.busy:
                jobs, wake_at = self._due(slot, loose=slot in open_to_all)
                times.append(wake_at)
                if jobs:
                    self._run(slot, jobs)
        wake_at = min((one for one in times if one is not None), default=None)
        if wake_at is not None:
            self._wake = self._loop.call_at(wake_at, self._pump_and_trim)

    def _pump_and_trim(self) -> None:
        self._pump()
        self._trim()

    def _due(self, slot: _Slot, *, loose: bool) -> tuple[list[_Job], float | None]:
        """What an idle worker runs now, else when to look again; `loose`: also requests outside of sequences."""
        now, plan = self._loop.time(), self.launch.plan
        waiting = [job for job in self._queue if loose and not job.future.done()]
        count, wake_at = gather(waiting, now=now, plan=plan)
        if count or self._sequences is None:
            return waiting[:count], wake_at
        return self._sequences.take(slot.number, now=now, plan=plan)

    def _run(self, slot: _Slot, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            if job.part is None:
                self._queue.remove(job)
        worker = slot.worker
        assert worker is not None
        slot.busy = True
        began = self._loop.time()
        answering = worker.ask([job.ask for job in jobs])
        answering.add_done_callback(lambda done: self._finish(slot, jobs, began, done))

    def _finish(
        self, slot: _Slot, jobs: Sequence[_Job], began: float, done: asyncio.Future[list[HandlerAnswer]]
    ) -> None:
        slot.busy = False
        failure = done.exception()
        if failure is not None:
            for job in jobs:
                self._fail(job, failure)
        else:
            for job, answer in zip(jobs, done.result(), strict=True):
                if not job.future.done():
                    job.future.set_result(answer)
            if self._on_batch is not None:
                waited_s = sum(began - job.since for job in jobs)
                self._on_batch(len(jobs), self._loop.time() - began, waited_s)
        if self._sequences:
            answers = [] if failure is not None else done.result()
            closed = [name for answer in answers for name in sequences.closed_by(answer.headers)]
            parts = [job for job in jobs if job.part is not None]
            self._drop(self._sequences.finish(slot.number, parts, closed, now=self._loop.time()))
        self._pump()
        self._trim()
        self._notify_if_empty()
