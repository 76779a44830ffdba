"""A version of a model that a handler of an archive answers, beside those that programs of bundles answer.

It has no tensors and nothing was proven of it: its code runs because the operator said so (`--allow-code`).
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trueline import events
from trueline.errors import NotReady, RequestError
from trueline.serve import host
from trueline.serve.batching.policy import USUAL, Policy
from trueline.serve.handlers import archive, sequences
from trueline.serve.handlers import config as plans
from trueline.serve.handlers.archive import Archive
from trueline.serve.handlers.metrics import Measures
from trueline.serve.handlers.pool import Pool
from trueline.serve.handlers.sequences import SequencePart
from trueline.serve.handlers.workdir import WorkDir
from trueline.serve.handlers.worker import HandlerFailed, Launch, Limits, StartFailed
from trueline.serve.models.servable import NO_WORKER, HandlerAnswer, HandlerRequest, NoTensors, Program, VersionRecord
from trueline.web.streaming import StreamedBody

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_ARCHIVE = "archive"
_WEIGHTS = "weights"
InThread = Callable[[Callable[[], Any]], Awaitable[Any]]


class NotStarted(RequestError):
    """TorchServe's answer when a model's workers do not come up."""

    code = "workers_failed"
    status = 500


@dataclass(slots=True, eq=False, kw_only=True)
class HandlerVersion(VersionRecord):
    """One version, answered by workers."""

    limits: Limits = field(default_factory=Limits)
    archive: Archive | None = None
    measures: Measures | None = None
    _pool: Pool | None = None
    _place: WorkDir | None = None

    @property
    def handler(self) -> HandlerVersion:
        return self

    @property
    def program(self) -> Program:
        self.check_ready()
        raise NoTensors(self.model)

    @property
    def full(self) -> bool:
        return False

    @property
    def pool(self) -> Pool:
        """Raises NotReady."""
        if self._pool is None:
            raise self.not_ready()
        return self._pool

    @property
    def digest(self) -> str:
        """Raises NotReady."""
        self.check_ready()
        assert self.archive is not None
        return self.archive.digest

    @property
    def load_times(self) -> dict[str, float]:
        """Of each worker that is ready."""
        workers = self._pool.workers() if self._pool else []
        return {
            f"W-{9000 + number}-{self.model}_{self.version}": worker.load_s
            for number, worker, _ in workers
            if worker.ready
        }

    @property
    def num_waiting(self) -> int:
        return self._pool.num_waiting if self._pool else 0

    @property
    def sick(self) -> bool:
        return self.state == "failed" or (self._pool is not None and self._pool.sick)

    @property
    def policy(self) -> Policy:
        """Its batching and workers in the server's own words. Raises NotReady."""
        plan, lanes = self.pool.launch.plan, self.pool.num_workers
        in_sequences = plan.sequences.queue_size * plan.max_sequences(lanes) if plan.sequences else 0
        return Policy(
            batch=plan.batch_size > 1,
            max_batch=plan.batch_size,
            max_delay_s=plan.max_batch_delay_s,
            lanes=lanes,
            max_requests=in_sequences or plan.queue_size,
        )

    async def begin(
        self,
        path: Path,
        given: Mapping[str, str],
        in_thread: InThread,
        loop: asyncio.AbstractEventLoop,
        digest: str | None = None,
        *,
        usual: Mapping[str, Any] | None = None,
        shared: bool = False,
        weights: Path | None = None,
        check: Callable[[str], None] | None = None,
    ) -> str:
        """Lays the archive out, starts its workers, and returns its digest. The archive's configuration goes before
        `usual`, and `given` before both. `shared`: other processes answer on the same ports, and lay what they share at
        `weights`. `check` gets the digest and raises what keeps its code from being run.

        Raises ArchiveError (also when the archive is not the one of `digest`), NotStarted; nothing is then left.
        """
        place = await in_thread(WorkDir)
        try:
            found: Archive = await in_thread(functools.partial(_laid_out, path, place.folder))
            if digest is not None and digest != found.digest:
                raise archive.ArchiveError(
                    f"the archive of digest {digest[:12]} is wanted, found is {found.digest[:12]}",
                    hint="it was exchanged; register it again",
                )
            if check is not None:
                check(found.digest)
            own = weights or place.folder / _WEIGHTS
            await self.begin_in(found, given, loop, usual=usual, shared=shared, weights=own)
        except BaseException:
            place.remove()
            raise
        self._place = place
        return found.digest

    async def begin_in(
        self,
        found: Archive,
        given: Mapping[str, str],
        loop: asyncio.AbstractEventLoop,
        *,
        usual: Mapping[str, Any] | None = None,
        shared: bool = False,
        weights: Path | None = None,
    ) -> None:
        """The same for what lies in a folder already, which stays its owner's; without `weights` each worker has its
        own copy of what it loads. Raises ArchiveError, NotStarted.
        """
        plan = plans.draw_up(found.manifest, {**(usual or {}), **found.config}, given, host.gpus())
        if shared and plan.sequences is not None:
            raise archive.ArchiveError(
                "the model is stateful: one worker remembers a sequence, and of several processes any may get its "
                "next request; serve it with --processes 1"
            )
        await self._start(found, plan, loop, weights, beside=shared)
        self.archive, self.since = found, time.time()
        self.state = "ready"

    async def _start(
        self,
        found: Archive,
        plan: plans.HandlerPlan,
        loop: asyncio.AbstractEventLoop,
        weights: Path | None,
        *,
        beside: bool,
    ) -> None:
        ignored = plans.find_ignored(found.config, plan)
        if ignored or found.manifest.requirements_file:
            events.emit(
                "archive.ignored",
                model=self.model,
                keys=",".join(ignored),
                requirements=found.manifest.requirements_file,
            )
        self.measures = Measures(self.model, self.version)
        launch = Launch(
            model=self.model,
            version=self.version,
            folder=found.folder,
            config_file=found.manifest.config_file,
            plan=plan,
            limits=self.limits,
            weights=weights,
            beside=beside,
        )
        pool = Pool(launch, loop, on_batch=self._count, on_metrics=self.measures.add)
        try:
            await pool.begin(plan.workers)
        except StartFailed as error:
            raise NotStarted(
                f"Failed to start workers for model {self.model} version: {self.version}: {error.message}"
            ) from error
        self._pool = pool

    def _count(self, requests: int, took_s: float, waited_s: float) -> None:
        self.stats.count_run(requests, requests, took_s, waited_s)

    def scale(self, lanes: int) -> None:
        self.pool.scale(lanes)

    async def wait_ready(self) -> None:
        """Raises NotStarted."""
        try:
            await self.pool.wait_ready()
        except StartFailed as error:
            raise NotStarted(
                f"Failed to start workers for model {self.model} version: {self.version}: {error.message}"
            ) from error

    async def retire(self) -> None:
        """Returns when the last request is answered, the workers are gone and the files deleted."""
        if self._pool is not None:
            await self._pool.wait_empty()
        self.state = "retiring"
        await self.close()

    async def close(self) -> None:
        """Ends its workers at once and deletes the files: the server leaves."""
        if self._pool is not None:
            await self._pool.close()
        if self._place is not None:
            self._place.remove()

    def ask(self, inputs: Mapping[str, Any], timeout_s: float | None = None, priority: int = USUAL) -> NoReturn:
        raise NoTensors(self.model)

    def handle(self, ask: HandlerRequest, *, alone: bool = False, loose: bool = False) -> asyncio.Future[HandlerAnswer]:
        """The handler's answer, or its head once the first piece was sent; `alone`: in a batch of its own; `loose`: of
        no sequence.

        Of a stateful model it is a request of the sequence that its headers name, else the first of a new one; the
        answer's headers name it. Raises NotReady, Overloaded, NoSequence; the future HandlerFailed, DeadlineExceeded,
        NotReady, NoSequence.
        """
        self.check_ready()
        if not self.pool.num_workers:
            raise NotReady(f'Model "{self.model}" {NO_WORKER}')
        began = time.perf_counter()
        part = None
        if self.stateful and not loose:
            part = sequences.read_part(ask.headers)
            ask.headers = {**ask.headers, **sequences.encode_headers(part)}
        told = _Told(part)
        ask.on_piece = told.piece
        waiting = self.pool.submit(ask, alone=alone, part=part)
        told.follow(waiting)
        waiting.add_done_callback(lambda done: self._count_answer(began, done))
        return told.answer

    @property
    def stateful(self) -> bool:
        """Whether its requests are of sequences. Raises NotReady."""
        return self.pool.launch.plan.sequences is not None

    def _count_answer(self, began: float, done: asyncio.Future[HandlerAnswer]) -> None:
        if done.cancelled():
            return
        failure = done.exception()
        if failure is None:
            self.stats.request_s.add(time.perf_counter() - began)
            self.stats.last_at = time.time()
        elif not isinstance(failure, HandlerFailed) or failure.status >= 500:
            self.stats.failed += 1
            self.stats.failed_s += time.perf_counter() - began

    @property
    def parameters(self) -> dict[str, Any]:
        plan = self.pool.launch.plan
        return {
            "digest": self.digest,
            "handler": plan.handler,
            "max_batch": plan.batch_size,
            "workers": self.pool.num_workers,
        }

    def collect(self, host: str) -> Iterator[Metric]:
        return iter(()) if self.measures is None else self.measures.collect(host)

    @property
    def description(self) -> dict[str, Any]:
        plan, workers = self.pool.launch.plan, self.pool.workers()
        return {
            "runtime": "python",
            "minWorkers": self.pool.num_workers,
            "maxWorkers": self.pool.num_workers,
            "batchSize": plan.batch_size,
            "maxBatchDelay": round(plan.max_batch_delay_s * 1e3),
            "responseTimeout": round(plan.response_timeout_s),
            "startupTimeout": round(plan.startup_timeout_s),
            "maxRetryTimeoutInSec": round(plan.max_retry_s),
            "clientTimeoutInMills": round(plan.client_timeout_s * 1e3),
            "deviceType": "gpu" if plan.gpus else "cpu",
            **self._of_sequences(),
            "workers": [
                {
                    "id": str(9000 + number),
                    "startTime": time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(worker.since)),
                    "status": "READY" if open_to_all else "UNLOADING",
                    "memoryUsage": _resident(worker.pid),
                    "pid": worker.pid,
                    "gpu": bool(plan.gpus),
                    "gpuUsage": "N/A",
                }
                for number, worker, open_to_all in workers
            ],
        }

    def _of_sequences(self) -> dict[str, Any]:
        plan = self.pool.launch.plan
        if plan.sequences is None:
            return {}
        return {
            "stateful": True,
            "sequenceMaxIdleMSec": round(plan.sequences.max_idle_s * 1e3),
            "sequenceTimeoutMSec": round(plan.sequences.timeout_s * 1e3),
            "maxNumSequence": plan.max_sequences(self.pool.num_workers),
            "maxSequenceJobQueueSize": plan.sequences.queue_size,
        }


class _Told:
    """What becomes of one request: an answer at once, or its head and then its pieces."""

    def __init__(self, part: SequencePart | None = None) -> None:
        """With a `part` the answer names its sequence, unless the handler does."""
        self.answer: asyncio.Future[HandlerAnswer] = asyncio.get_running_loop().create_future()
        self._own = {} if part is None else {sequences.ID: part.id}
        self._pieces: StreamedBody | None = None
        self._waiting: asyncio.Future[HandlerAnswer] | None = None

    def follow(self, waiting: asyncio.Future[HandlerAnswer]) -> None:
        """`waiting` brings the end; a reader who goes away before cancels it."""
        self._waiting = waiting
        waiting.add_done_callback(self._end)
        self.answer.add_done_callback(lambda answer: waiting.cancel() if answer.cancelled() else None)

    def piece(self, piece: HandlerAnswer) -> None:
        """One piece; the first brings the head."""
        if self._pieces is None:
            if self.answer.done():
                return
            self._pieces = StreamedBody(self._stop)
            self.answer.set_result(replace(self._with_sequence(piece), body=b"", pieces=self._pieces))
        self._pieces.add(piece.body)

    def _stop(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    def _end(self, waiting: asyncio.Future[HandlerAnswer]) -> None:
        failure = None if waiting.cancelled() else waiting.exception()
        if self._pieces is not None:
            if not waiting.cancelled() and failure is None:
                self._pieces.add(waiting.result().body)
            self._pieces.end(torn=waiting.cancelled() or failure is not None)
        elif self.answer.done():
            return
        elif waiting.cancelled():
            self.answer.cancel()
        elif failure is not None:
            self.answer.set_exception(failure)
        else:
            self.answer.set_result(self._with_sequence(waiting.result()))

    def _with_sequence(self, answer: HandlerAnswer) -> HandlerAnswer:
        return replace(answer, headers={**self._own, **answer.headers}) if self._own else answer


def _laid_out(path: Path, place: Path) -> Archive:
    """The archive at `path` under `place`, with an empty folder beside it for what its workers share. Blocks."""
    for name in (_ARCHIVE, _WEIGHTS):
        (place / name).mkdir()
    return archive.unpack(path, place / _ARCHIVE)


def _resident(pid: int) -> int:
    """Bytes in memory; 0 when the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
