"""Many processes share out the chunks of a data set; what comes back does not depend on how many, or on who died.

    caller ── lifeline ──▶ agent (zygote) ──fork──▶ pool workers
       ╰───── newline JSON on a Unix socket ────────────╯

The caller decides (`batch/chunks.py`), workers compute (`batch/worker.py`). A worker that dies or hangs is
replaced and its chunk given to another; a record that fails or ends its process every time ends the whole with an
error that names it. When the caller ends, by whatever means, its processes end with it. Knows nothing of what a chunk's
answer means.

To the worker: {"start", "stop", "careful"}; careful: first try its records one by one, and say which.
From it: {"op": "ready", "records"}, {"op": "trying", "record"}, {"op": "done", "reply"},
{"op": "failed", "code", "why", "hint", "fatal"}.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from trueline import errors, events
from trueline.batch.chunks import MAX_TRIES, Chunk, Chunks
from trueline.engine.contract import ProcessSpec, Seen, parse_ref
from trueline.engine.local.client import start_agent
from trueline.engine.open import open_engine
from trueline.recipe.contract import Mode, Recipe
from trueline.train.launch.launcher import libraries_of

SOCKET, WORK, FOLDER = "pool", "work.json", "TRUELINE_POOL"
PRELOAD = ("trueline.batch.worker", "trueline.batch.evaluate", "trueline.batch.predict")
PATIENCE_S = 60.0
"""The least that a chunk may take before its worker counts as hung."""
TICK_S = 0.2
Reply = dict[str, Any]


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers are to do; they read it from a file."""

    entry: str
    """`module:function` that opens this Work: it returns the number of records and a `Compute`."""
    recipe: str
    recipe_digest: str
    source: str
    """The checkpoint or bundle; empty for the untrained model."""
    mode: Mode
    num_records: int
    batch: int
    """Records of a chunk."""
    out: str = ""
    """Folder for answers that are too large for a line of JSON."""
    rows: int = 0
    """Records that the model is asked at a time; 0: a whole chunk."""
    format: str = ""
    """Of the parts that workers write to `out`; empty where they write none."""
    of: str = ""
    """A digest of what those parts are made from."""
    done: tuple[int, ...] = ()
    """Chunks that were computed before, by their number."""
    device: str = "auto"
    """Where models compute; see `train.devices`."""


Compute = Callable[[int, int], Reply]
"""From the first record of a chunk and the one after its last to what JSON can hold; a function of these alone."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A line from a worker."""

    op: str
    ref: str = ""
    records: int = 0
    record: int = 0
    reply: Reply = {}
    code: str = ""
    why: str = ""
    hint: str = ""
    fatal: bool = False


def address_of(recipe: Recipe, given: object) -> str:
    """Where another process can load `recipe` from. Raises UsageError."""
    if recipe.path is not None:
        return str(Path(recipe.path).resolve())
    if isinstance(given, str):
        return given
    raise errors.UsageError(
        f"recipe '{recipe.name}' has no file that worker processes could load",
        hint="pass the path of its file or 'package.module:object', or leave workers at 1",
    )


def work(entry: str, recipe: Recipe, given: object, source: str, mode: Mode, *, records: int, batch: int) -> Work:
    """The Work for `recipe`, which was loaded from `given`. Raises UsageError when no other process could load it."""
    return Work(
        entry=entry,
        recipe=address_of(recipe, given),
        recipe_digest=recipe.digest,
        source=source,
        mode=mode,
        num_records=records,
        batch=batch,
    )


def run(work: Work, *, workers: int, advanced: Callable[[int], None]) -> list[Reply]:
    """The replies for all chunks that were not done before, in order. `advanced` is told how many records are done.

    Raises what the workers met, UsageError, TrainError; no process is left behind in any case.
    """
    scratch = Path(tempfile.mkdtemp(prefix="trueline-"))
    life, life_end = os.pipe()
    agent = None
    try:
        (scratch / WORK).write_bytes(msgspec.json.encode(work))
        preload = (*PRELOAD, *libraries_of(Path(work.recipe)))
        agent = start_agent(scratch / "agent", preload=preload, life=life, log=scratch / "agent.log")
        pool = _Pool(work, workers, scratch, advanced)
        _complete(pool.run())
        return [pool.replies[index] for index in sorted(pool.replies)]
    finally:
        os.close(life_end)  # the end of every process of the pool
        if agent is not None:
            agent.wait()
        os.close(life)
        shutil.rmtree(scratch, ignore_errors=True)


def _complete(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs it to its end, beside a notebook's own loop if there is one."""
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


class _Pool:
    """One event loop; every decision is `chunks`'s."""

    def __init__(self, work: Work, workers: int, scratch: Path, advanced: Callable[[int], None]) -> None:
        self.work, self.scratch, self.advanced = work, scratch, advanced
        self.chunks = Chunks(num_records=work.num_records, size=work.batch, replied=set(work.done))
        self.workers = min(workers, self.chunks.total - len(work.done))
        self.engine = open_engine(str(scratch / "agent"))
        self.replies: dict[int, Reply] = {}
        self.lines: dict[str, asyncio.StreamWriter] = {}
        self.trying: dict[str, int] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.records_done = self.stillborn = 0

    async def run(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        server = await asyncio.start_unix_server(self._serve, str(self.scratch / SOCKET))
        self.tasks |= {asyncio.create_task(self._guarded(one)) for one in (self._watch(), self._tick())}
        try:
            await self.engine.add([self._spec(slot, 0) for slot in range(self.workers)])
            await self.ended
        finally:
            server.close()
            tasks = tuple(self.tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # what was closed is let go of in the loop's next round

    async def _guarded(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except Exception as error:  # noqa: BLE001  a task's end: whoever waits for the pool raises it
            self._end(error)

    def _end(self, error: Exception | None = None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)

    def _spec(self, slot: int, incarnation: int) -> ProcessSpec:
        return ProcessSpec(
            role="pool",
            slot=slot,
            incarnation=incarnation,
            entry="trueline.batch.worker:main",
            log=str(self.scratch / f"{slot}.{incarnation}.log"),
            env={FOLDER: str(self.scratch), "TRUELINE_REF": f"pool-{slot}.{incarnation}"},
        )

    # Workers' lines. -------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            with contextlib.suppress(asyncio.CancelledError):  # the pool has ended; streams would log it as an error
                await self._guarded(self._listen(reader, writer))
        finally:
            self.tasks.discard(task)
            writer.close()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ref = ""
        while line := await _line(reader):
            said = msgspec.json.decode(line, type=Message)
            if said.op == "ready":
                ref = said.ref
                self._check(said)
                self.lines[ref] = writer
            elif said.op == "trying":
                self.trying[ref] = said.record
            elif ref in self.chunks.held and said.op == "done":
                self._done(ref, said.reply)
            elif said.op == "failed":
                self._failed(ref, said)
            self._offer(ref)

    def _check(self, said: Message) -> None:
        self.stillborn = 0
        if said.records != self.work.num_records:
            raise errors.DataError(
                f"dataset('{self.work.mode}') has {said.records} records in a worker and {self.work.num_records} here",
                hint="the recipe's data must be the same in every process",
            )

    def _offer(self, ref: str) -> None:
        if ref not in self.lines or self.ended.done():
            return
        chunk = self.chunks.give(ref, time.monotonic())
        if chunk is not None:
            self.trying.pop(ref, None)
            order = {"start": chunk.start, "stop": chunk.stop, "careful": self.chunks.tries[chunk.index] > 0}
            self.lines[ref].write(msgspec.json.encode(order) + b"\n")

    def _done(self, ref: str, reply: Reply) -> None:
        chunk = self.chunks.done(ref, time.monotonic())
        if chunk is None:
            return
        self.replies[chunk.index] = reply
        self.records_done += chunk.stop - chunk.start
        self.advanced(self.records_done)
        if self.chunks.finished:
            self._end()

    def _failed(self, ref: str, said: Message) -> None:
        chunk = self.chunks.lost(ref)
        if said.fatal or (chunk is not None and self.chunks.tries[chunk.index] >= MAX_TRIES):
            raise _kinds()[said.code](said.why, hint=said.hint)

    # Workers' lives. -------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        async for seen in self.engine.watch():
            if not seen.alive and not self.ended.done():
                await self._died(seen)
        raise errors.TrainError("the processes' agent ended", hint=_tail(self.scratch / "agent.log"))

    async def _died(self, seen: Seen) -> None:
        _, slot, incarnation = parse_ref(seen.ref)
        events.emit("pool.lost", worker=slot, why=seen.reason)
        line = self.lines.pop(seen.ref, None)
        if line is None:
            self.stillborn += 1
            if self.stillborn >= MAX_TRIES:
                log = _tail(self.scratch / f"{slot}.{incarnation}.log")
                raise errors.TrainError(f"workers end before they are ready: {seen.reason}", hint=log)
        chunk = self.chunks.lost(seen.ref)
        if chunk is not None and self.chunks.tries[chunk.index] >= MAX_TRIES:
            raise errors.DataError(
                self._deadly(seen, chunk), hint="look at this record, and at the memory that it takes"
            )
        await self.engine.add([self._spec(slot, incarnation + 1)])

    def _deadly(self, seen: Seen, chunk: Chunk) -> str:
        record = self.trying.get(seen.ref)
        which = f"record {record}" if record is not None else f"one of the records {chunk.start} to {chunk.stop - 1}"
        return f"{which} of dataset('{self.work.mode}') ends every process that works on it: {seen.reason}"

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for ref in tuple(self.lines):
                self._offer(ref)
            for ref in self.chunks.stuck(time.monotonic(), patience_s=PATIENCE_S):
                await self.engine.kill(ref)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line; empty at the end, or when the worker died."""
    try:
        return await reader.readline()
    except ConnectionError:
        return b""


def _tail(log: Path) -> str:
    try:
        return log.read_text(errors="replace").strip().splitlines()[-1]
    except (OSError, IndexError):
        return ""


def _kinds() -> dict[str, type[errors.TruelineError]]:
    kinds, todo = {}, [errors.TruelineError]
    while todo:
        kind = todo.pop()
        kinds[kind.code] = kind
        todo += kind.__subclasses__()
    return kinds
