"""A version of a model that a handler answers. Nothing of it is proven: its code runs because of `--allow-code`."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trueline import events
from trueline.errors import NotReady, RequestError
from trueline.files import TemporaryFolder
from trueline.serve import host
from trueline.serve.batching.policy import USUAL, Policy
from trueline.serve.handlers import archive, sequences
from trueline.serve.handlers import config as plans
from trueline.serve.handlers.archive import Archive
from trueline.serve.handlers.budget import Limits, largest_bytes
from trueline.serve.handlers.failures import HandlerFailed, StartFailed
from trueline.serve.handlers.metrics import Measures
from trueline.serve.handlers.pool import Pool
from trueline.serve.handlers.sequences import SequencePart
from trueline.serve.handlers.worker import Launch
from trueline.serve.models.servable import NO_WORKER, HandlerAnswer, HandlerRequest, NoTensors, Program, VersionRecord
from trueline.serve.models.sources import InThread
from trueline.web.messages import StreamedBody

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_ARCHIVE = "archive"
_WEIGHTS = "weights"


class NotStarted(RequestError):
    """A model's workers did not become ready."""

    code = "workers_failed"
    status = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """`given` are TorchServe's registration parameters; the archive's configuration, then `usual` are the defaults."""

    given: Mapping[str, str]
    usual: Mapping[str, Any] = field(default_factory=dict)
    shared: bool = False  # whether other processes answer on the same ports
    weights: Path | None = None  # folder for the weights that workers share; None: each worker has its own copy


@dataclass(slots=True, eq=False, kw_only=True)
class HandlerVersion(VersionRecord):
    limits: Limits = field(default_factory=Limits)
    archive: Archive | None = None
    measures: Measures | None = None
    _pool: Pool | None = None
    _place: TemporaryFolder | None = None

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
        return (self.state == "failed" and not self.optional) or (self._pool is not None and self._pool.sick)

    @property
    def obstacle(self) -> str:
        if self.state != "ready" or self._pool is None:
            return self.reason or self.state
        return self._pool.obstacle

    @property
    def policy(self) -> Policy:
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
        options: StartOptions,
        loop: asyncio.AbstractEventLoop,
        in_thread: InThread,
        digest: str | None = None,
        check: Callable[[str], None] | None = None,
    ) -> str:
        """Unpacks the archive at `path`, starts its workers and returns its digest, which `check` may reject.

        Raises ArchiveError (also when the archive does not have `digest`), NotStarted, and cleans up.
        """
        place = await in_thread(functools.partial(TemporaryFolder, "archive"))
        try:
            found: Archive = await in_thread(functools.partial(_unpack, path, place.path))
            if digest is not None and digest != found.digest:
                raise archive.ArchiveError(
                    f"the archive of digest {digest[:12]} is expected, found is {found.digest[:12]}",
                    hint="it was replaced; register it again",
                )
            if check is not None:
                check(found.digest)
            await self.begin_in(found, replace(options, weights=options.weights or place.path / _WEIGHTS), loop)
        except BaseException:
            place.remove()
            raise
        self._place = place
        return found.digest

    async def begin_in(self, found: Archive, options: StartOptions, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the workers of an unpacked archive; the caller keeps its folder. Raises ArchiveError, NotStarted."""
        plan = plans.draw_up(found.manifest, {**options.usual, **found.config}, options.given, host.gpus())
        if options.shared and plan.sequences is not None:
            raise archive.ArchiveError(
                "the model is stateful: one worker remembers a sequence, and of several processes any may get its "
                "next request; serve it with --processes 1"
            )
        ignored, requirements = plans.find_ignored(found.config, plan), found.manifest.requirements_file
        if ignored or requirements:
            events.emit("archive.ignored", model=self.model, keys=",".join(ignored), requirements=requirements)
        self.measures = Measures(self.model, self.version)
        launch = Launch(
            model=self.model,
            version=self.version,
            folder=found.folder,
            config_file=found.manifest.config_file,
            plan=plan,
            limits=self.limits,
            weights=options.weights,
            beside=options.shared,
        )
        pool = Pool(launch, loop, on_batch=self._count, on_metrics=self.measures.add, on_ready=self._rely)
        self.limits.budget.reserve(self, self.model, plan.workers)
        try:
            with self._start_errors():
                await pool.begin(plan.workers)
        except BaseException:
            self.limits.budget.release(self)
            raise
        self._pool, self.archive, self.since, self.state = pool, found, time.time(), "ready"

    def _rely(self) -> None:
        self.optional = False

    @contextmanager
    def _start_errors(self) -> Iterator[None]:
        try:
            yield
        except StartFailed as error:
            raise NotStarted(
                f"Failed to start workers for model {self.model} version: {self.version}: {error.message}"
            ) from error

    def _count(self, requests: int, took_s: float, waited_s: float) -> None:
        self.stats.count_run(requests, requests, took_s, waited_s)

    def scale(self, lanes: int) -> None:
        size = largest_bytes(worker.pid for _, worker, _ in self.pool.workers())
        self.limits.budget.reserve(self, self.model, lanes, size)
        self.pool.scale(lanes)

    async def wait_ready(self) -> None:
        with self._start_errors():
            await self.pool.wait_ready()

    async def retire(self) -> None:
        if self._pool is not None:
            await self._pool.wait_empty()
        self.state = "retiring"
        await self.close()

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        self.limits.budget.release(self)
        if self._place is not None:
            self._place.remove()

    def ask(self, inputs: Mapping[str, Any], timeout_s: float | None = None, priority: int = USUAL) -> NoReturn:
        raise NoTensors(self.model)

    def handle(self, ask: HandlerRequest, *, alone: bool = False, loose: bool = False) -> asyncio.Future[HandlerAnswer]:
        """The answer, or its status and headers with the first piece of a stream.

        A request of a stateful model belongs to the sequence in its headers, else it begins a new one, which the
        answer's headers name. Raises NotReady, Overloaded, NoSequence; the future HandlerFailed, DeadlineExceeded,
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
        stream = _Stream(part)
        ask.on_piece = stream.add_piece
        waiting = self.pool.submit(ask, alone=alone, part=part)
        stream.follow(waiting)
        waiting.add_done_callback(lambda done: self._count_answer(began, done))
        return stream.answer

    @property
    def stateful(self) -> bool:
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
        sequences_of: dict[str, Any] = {}
        if plan.sequences is not None:
            sequences_of = {
                "stateful": True,
                "sequenceMaxIdleMSec": round(plan.sequences.max_idle_s * 1e3),
                "sequenceTimeoutMSec": round(plan.sequences.timeout_s * 1e3),
                "maxNumSequence": plan.max_sequences(self.pool.num_workers),
                "maxSequenceJobQueueSize": plan.sequences.queue_size,
            }
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
            **sequences_of,
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


class _Stream:
    """The answer of one request, whole or in pieces."""

    def __init__(self, part: SequencePart | None = None) -> None:
        self.answer: asyncio.Future[HandlerAnswer] = asyncio.get_running_loop().create_future()
        self._own = {} if part is None else {sequences.ID: part.id}
        self._pieces: StreamedBody | None = None
        self._waiting: asyncio.Future[HandlerAnswer] | None = None

    def follow(self, waiting: asyncio.Future[HandlerAnswer]) -> None:
        """`waiting` is the whole answer; it is cancelled when the reader leaves."""
        self._waiting = waiting
        waiting.add_done_callback(self._end)
        self.answer.add_done_callback(lambda answer: waiting.cancel() if answer.cancelled() else None)

    def add_piece(self, piece: HandlerAnswer) -> None:
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


def _unpack(path: Path, place: Path) -> Archive:
    """The archive at `path` below `place`, beside an empty folder for shared weights. Blocks."""
    for name in (_ARCHIVE, _WEIGHTS):
        (place / name).mkdir()
    return archive.unpack(path, place / _ARCHIVE)


def _resident(pid: int) -> int:
    """Bytes in memory; 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
