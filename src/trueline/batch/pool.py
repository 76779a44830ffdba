"""Computes the chunks of a data set by a pool of processes; the result does not depend on their number or deaths.

    caller ── lifeline ──▶ agent (zygote) ──fork──▶ pool workers
       ╰───── newline JSON on a Unix socket ────────────╯

The caller schedules (`batch/chunks.py`), workers compute (`batch/worker.py`). A worker that dies or hangs is replaced,
and another gets its chunk. A record that always fails or kills its process ends the pool with an error that names it.
When the caller ends, its processes end with it.

To a worker: {"start", "stop", "careful"}; careful: try the records one by one first, and report each.
From it: {"op": "ready", "records"}, {"op": "trying", "record"}, {"op": "done", "reply"},
{"op": "failed", "code", "why", "hint", "fatal"}.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from trueline import errors, events
from trueline.batch.chunks import MAX_TRIES, Chunks
from trueline.engine.contract import ProcessSpec, Seen, parse_ref
from trueline.engine.local.client import start_agent
from trueline.engine.local.process import Lifeline
from trueline.engine.open import open_engine
from trueline.files import TemporaryFolder
from trueline.recipe.contract import Mode
from trueline.train.launch.preload import libraries_of

SOCKET, WORK, FOLDER = "pool", "work.json", "TRUELINE_POOL"
PRELOAD = ("trueline.batch.worker", "trueline.batch.evaluate", "trueline.batch.predict")
PATIENCE_S = 60.0
"""A worker's chunk takes at least this long before the worker counts as hung."""
TICK_S = 0.2
Reply = dict[str, Any]


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a pool's workers, which read them from a file."""

    entry: str
    """`module:function`: called with this Work, it returns the number of records and a `Compute`."""
    recipe: str
    recipe_digest: str
    source: str
    """The checkpoint or bundle; empty for the untrained model."""
    mode: Mode
    num_records: int
    batch: int
    """Records in a chunk."""
    out: str = ""
    """Folder for answers that are too large for a line of JSON, and for parts."""
    rows: int = 0
    """Records in a call of the model, where a chunk is a part."""
    format: str = ""
    """Of the parts that workers write to `out`."""
    of: str = ""
    """A digest of what the parts are made from."""
    done: tuple[int, ...] = ()
    """Indices of chunks that were computed before."""
    device: str = "auto"
    """Where models compute; see `train.devices`."""


Compute = Callable[[int, int], Reply]
"""From the records [start, stop) to a reply that JSON can hold; it depends on these records alone."""


class ChunkOrder(msgspec.Struct, frozen=True, kw_only=True):
    start: int
    stop: int
    careful: bool


class WorkerMessage(msgspec.Struct, frozen=True, kw_only=True):
    op: str
    ref: str = ""
    records: int = 0
    record: int = 0
    reply: Reply = {}
    code: str = ""
    why: str = ""
    hint: str = ""
    fatal: bool = False


def run(work: Work, *, workers: int, report: Callable[[int], None]) -> list[Reply]:
    """Returns the replies of all chunks that were not done before, in order; calls `report` with the records done.

    Raises the workers' errors and TrainError. No process is left behind in any case.
    """
    temporary = TemporaryFolder.after_sweep("pool")
    scratch = temporary.path
    lifeline = Lifeline()
    agent = None
    try:
        (scratch / WORK).write_bytes(msgspec.json.encode(work))
        preload = (*PRELOAD, *libraries_of(Path(work.recipe)))
        agent = start_agent(scratch / "agent", preload=preload, life=lifeline.reading, log=scratch / "agent.log")
        scheduler = ChunkScheduler(work, workers, scratch, report)
        _run_to_end(scheduler.run())
        return [scheduler.replies[index] for index in sorted(scheduler.replies)]
    finally:
        lifeline.end()  # ends every process of the pool
        if agent is not None:
            agent.wait()
        os.close(lifeline.reading)
        temporary.remove()


def _run_to_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """As asyncio.run; in a thread if a loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(coroutine)
        return
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(loop.run_until_complete, task)
        try:
            running.result()
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(task.cancel)
            raise
        finally:
            beside.submit(loop.close)


class ChunkScheduler:
    """Starts workers, sends them chunks and collects their replies, in one event loop; `Chunks` decides."""

    def __init__(self, work: Work, workers: int, scratch: Path, report: Callable[[int], None]) -> None:
        self.work, self.scratch, self.report = work, scratch, report
        self.chunks = Chunks(num_records=work.num_records, size=work.batch, replied=set(work.done))
        self.workers = min(workers, self.chunks.total - len(work.done))
        self.engine = open_engine(str(scratch / "agent"))
        self.replies: dict[int, Reply] = {}
        self.connections: dict[str, asyncio.StreamWriter] = {}
        self.trying: dict[str, int] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.records_done = self.stillborn = 0

    async def run(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        server = await asyncio.start_unix_server(self._serve, str(self.scratch / SOCKET))
        self.tasks |= {asyncio.create_task(self._guard(loop)) for loop in (self._watch(), self._tick())}
        try:
            await self.engine.add([self._spec(slot, 0) for slot in range(self.workers)])
            await self.ended
        finally:
            server.close()
            tasks = tuple(self.tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # closed transports are released in the loop's next iteration

    async def _guard(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except Exception as error:  # noqa: BLE001  `run` raises it
            self._end(error)

    def _end(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    def _spec(self, slot: int, incarnation: int) -> ProcessSpec:
        return ProcessSpec(
            role="pool", slot=slot, incarnation=incarnation, entry="trueline.batch.worker:main",
            log=str(self.scratch / f"{slot}.{incarnation}.log"),
            env={FOLDER: str(self.scratch), "TRUELINE_REF": f"pool-{slot}.{incarnation}"},
        )  # fmt: skip

    # Connections of workers.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            with contextlib.suppress(asyncio.CancelledError):  # the pool has ended; streams would log it as an error
                await self._guard(self._listen(reader, writer))
        finally:
            self.tasks.discard(task)
            writer.close()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ref = ""
        while line := await _read_line(reader):
            message = msgspec.json.decode(line, type=WorkerMessage)
            if message.op == "ready":
                ref = message.ref
                self._check_ready(message)
                self.connections[ref] = writer
            elif message.op == "trying":
                self.trying[ref] = message.record
            elif ref in self.chunks.held and message.op == "done":
                self._finish_chunk(ref, message.reply)
            elif message.op == "failed":
                self._fail_chunk(ref, message)
            self._offer(ref)

    def _check_ready(self, message: WorkerMessage) -> None:
        self.stillborn = 0
        if message.records != self.work.num_records:
            raise errors.DataError(
                f"dataset('{self.work.mode}') has {message.records} records in a worker and "
                f"{self.work.num_records} here",
                hint="the recipe's data must be the same in every process",
            )

    def _offer(self, ref: str) -> None:
        if ref not in self.connections or self.ended.done():
            return
        chunk = self.chunks.give(ref, time.monotonic())
        if chunk is not None:
            self.trying.pop(ref, None)
            order = ChunkOrder(start=chunk.start, stop=chunk.stop, careful=self.chunks.tries[chunk.index] > 0)
            self.connections[ref].write(msgspec.json.encode(order) + b"\n")

    def _finish_chunk(self, ref: str, reply: Reply) -> None:
        chunk = self.chunks.finish(ref, time.monotonic())
        if chunk is None:
            return
        self.replies[chunk.index] = reply
        self.records_done += chunk.stop - chunk.start
        self.report(self.records_done)
        if self.chunks.finished and not self.ended.done():
            self.ended.set_result(None)

    def _fail_chunk(self, ref: str, message: WorkerMessage) -> None:
        chunk = self.chunks.take_back(ref)
        if message.fatal or (chunk is not None and self.chunks.tries[chunk.index] >= MAX_TRIES):
            raise errors.find_error_class(message.code)(message.why, hint=message.hint)

    # Processes of workers.

    async def _watch(self) -> None:
        async for seen in self.engine.watch():
            if not seen.alive and not self.ended.done():
                await self._replace(seen)
        raise errors.TrainError("the processes' agent ended", hint=_last_line(self.scratch / "agent.log"))

    async def _replace(self, seen: Seen) -> None:
        _, slot, incarnation = parse_ref(seen.ref)
        events.emit("pool.lost", worker=slot, why=seen.reason)
        if self.connections.pop(seen.ref, None) is None:
            self.stillborn += 1
            if self.stillborn >= MAX_TRIES:
                log = _last_line(self.scratch / f"{slot}.{incarnation}.log")
                raise errors.TrainError(f"workers end before they are ready: {seen.reason}", hint=log)
        chunk = self.chunks.take_back(seen.ref)
        if chunk is not None and self.chunks.tries[chunk.index] >= MAX_TRIES:
            record = self.trying.get(seen.ref)
            which = f"one of the records {chunk.start} to {chunk.stop - 1}" if record is None else f"record {record}"
            raise errors.DataError(
                f"{which} of dataset('{self.work.mode}') ends every process that works on it: {seen.reason}",
                hint="look at this record, and at the memory that it takes",
            )
        await self.engine.add([self._spec(slot, incarnation + 1)])

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for ref in tuple(self.connections):
                self._offer(ref)
            for ref in self.chunks.find_stuck(time.monotonic(), patience_s=PATIENCE_S):
                await self.engine.kill(ref)


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """The next line; empty at the end, also when the worker died."""
    try:
        return await reader.readline()
    except ConnectionError:
        return b""


def _last_line(log: Path) -> str:
    try:
        return log.read_text(errors="replace").strip().splitlines()[-1]
    except (OSError, IndexError):
        return ""
