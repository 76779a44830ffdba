"""The process of a parameter server: one thread that checks, logs, applies and answers.

A push is checked, appended to the log, applied, then acknowledged. A **cut** names minibatches: those are applied,
other pushes wait for its end, pulls are answered throughout. It ends when the master says so or its connection ends. A
push that the disk has no room for waits as well. Files are written by forks: the only other thread, which waits in
read(2) for the launcher's end, holds nothing that a child could miss.
"""

import gc
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path

import msgspec
import numpy as np

from trueline import events, files
from trueline.clock import Clock, monotonic_s
from trueline.engine.contract import parse_ref
from trueline.engine.hosts.route import list_ports
from trueline.errors import StorageError, TruelineError
from trueline.full_disk import repeat_until_room
from trueline.ps import dial
from trueline.ps.messages import Routing, ServerReport, TableStats
from trueline.ps.server import snapshot
from trueline.ps.server.cut import Cut
from trueline.ps.server.holding import Holding
from trueline.ps.server.listen import CallerLine, CallerLines
from trueline.ps.server.memory import MemoryBudget, describe_need, keep_freed, resident_bytes
from trueline.ps.server.push_log import PushLog
from trueline.ps.server.saves import Saves
from trueline.ps.tables.held import Push
from trueline.ps.wire import (
    BeginCut,
    Call,
    Configure,
    EndCut,
    ExportRequest,
    Failure,
    FrameError,
    Moved,
    PullReply,
    PullRequest,
    PushRequest,
    ReceivedFrame,
    SaveRequest,
    Squares,
    SquaresRequest,
)

RETRY_S = 0.5
STALEST = 32


class ParameterServer:
    """`ref`: `server-SLOT.INCARNATION`; the folder and the number in the routing belong to the slot. `memory`: bytes
    that it may have; 0: what the system leaves it."""

    def __init__(self, job: Path, ref: str, secret: bytes, clock: Clock = monotonic_s, *, memory: int = 0) -> None:
        role, slot, _ = parse_ref(ref)
        self.ref, self.name = ref, f"{role}-{slot}"
        self._folder = dial.folder_of(job, self.name)
        self._holding, self._log, self._clock = Holding(self.name), PushLog(self._folder), clock
        self._lines = CallerLines(secret, self._answer, self._forget, clock)
        self._saves = Saves(self._lines, self._refuse)
        self._memory = MemoryBudget(memory)
        self._cut: Cut | None = None
        self._cut_line: CallerLine | None = None
        self._cut_number = 0
        self._waiting: deque[tuple[CallerLine, ReceivedFrame]] = deque()
        self._lacking, self._retry_at, self._told = "", 0.0, ""
        self._pulls = self._pushes = self._duplicates = 0
        self._staleness = [0] * STALEST
        self._stopping = False
        self._handlers = {
            Call.CONFIGURE: self._configure, Call.INITIALIZE: self._initialize, Call.PULL: self._pull,
            Call.PUSH: self._push, Call.STATS: self._tell_stats, Call.BEGIN_CUT: self._begin_cut,
            Call.END_CUT: self._end_cut, Call.SAVE: self._save, Call.SAVED: self._wait_saved,
            Call.EXPORT: self._export, Call.TAKE: self._change, Call.ROUTE: self._route, Call.STOP: self._stop,
            Call.SQUARES: self._sum_squares,
        }  # fmt: skip

    def start(self) -> None:
        """Recovers what former incarnations acknowledged, then listens, once the disk has room for its address. Raises
        StorageError."""
        self._log.recover(self._holding.load, self._holding.apply)
        host, ports = os.environ.get("TRUELINE_HOST", "127.0.0.1"), list_ports(os.environ.get("TRUELINE_PORTS", ""))
        unix, tcp = self._lines.open(self._folder, host, ports)
        address = dial.ServerAddress(ref=self.ref, unix=unix, tcp=tcp, pid=os.getpid())
        data = msgspec.json.encode(address)
        repeat_until_room(lambda: files.write_atomic(self._folder / dial.ADDRESS, data, mode=0o600))

    def run(self) -> None:
        """Serves until STOP or `leave`."""
        while not self._stopping:
            self._lines.poll(max(0.0, self._retry_at - self._clock()) if self._lacking else None)
            if self._lacking and self._clock() >= self._retry_at:
                self._lacking = ""
                self._try_again()
        self._lines.flush(1.0)
        self._saves.close()
        self._log.close()
        self._lines.close()

    def leave(self) -> None:
        self._stopping = True

    def leave_on_sigterm(self) -> None:
        waking, waker = socket.socketpair()
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: self.leave())
        self._lines.watch(waking, lambda: _clear(waking))
        self._waker = waker

    def _answer(self, line: CallerLine, frame: ReceivedFrame) -> None:
        handler = self._handlers.get(frame.kind)
        if handler is None:
            raise FrameError(f"{frame.kind.name} is no request")
        try:
            handler(line, frame)
        except TruelineError as error:
            self._refuse(line, frame.number, error)

    def _refuse(self, line: CallerLine, number: int, error: TruelineError) -> None:
        failure = Failure(error.code, error.message, error.hint)
        self._lines.reply(line, number, failure, kind=Call.ERROR)

    def _forget(self, line: CallerLine) -> None:
        if line is self._cut_line:
            self._leave_cut()

    # what changes the state

    def _change(self, line: CallerLine, frame: ReceivedFrame) -> None:
        self._holding.held  # noqa: B018  raises for a server without a part
        self._keep(frame)
        self._lines.reply(line, frame.number)

    def _route(self, line: CallerLine, frame: ReceivedFrame) -> None:
        """The routing that it has already ends a move that came to nothing."""
        if frame.read(Routing) != self._holding.routing or self._holding.is_moving:
            self._change(line, frame)
        else:
            self._lines.reply(line, frame.number)
        self._try_again()

    def _keep(self, frame: ReceivedFrame) -> None:
        """Logs a frame, then applies it."""
        self._log.append(frame.data)
        try:
            self._holding.apply(frame)
        except BaseException:
            self._log.take_back(len(frame.data))
            raise

    def _configure(self, line: CallerLine, frame: ReceivedFrame) -> None:
        body = frame.read(Configure)
        if self._holding.check_configure(body):
            if body.restore:
                self._restore(body)
            else:
                self._keep(frame)
        self._lines.reply(line, frame.number)

    def _restore(self, body: Configure) -> None:
        """The snapshot, and not the checkpoint's files, is what the next incarnation reads."""
        fresh = Holding(self.name)
        fresh.restore(body)
        self._holding = fresh
        try:
            self._log.begin_snapshot(fresh.dump)
            self._log.end_snapshot()
        except TruelineError:
            self._holding = Holding(self.name)
            raise

    def _initialize(self, line: CallerLine, frame: ReceivedFrame) -> None:
        if not self._holding.held.initialized:
            self._keep(frame)
        self._lines.reply(line, frame.number)

    def _push(self, line: CallerLine, frame: ReceivedFrame, *, owned: bool = False) -> None:
        """`owned`: the frame's buffer is its own."""
        holding, request = self._holding, frame.read(PushRequest)
        held, key = holding.held, (request.epoch, request.minibatch)
        held.clock = time.thread_time
        if held.has(*key):
            self._duplicates += 1
            self._lines.reply(line, frame.number)
            return
        holding.check_routing(request.routing)
        holding.check_ready()
        push = holding.read_push(request, frame.arrays)
        held.check(push)
        waits = bool(self._lacking) or (holding.is_moving if self._cut is None else not self._cut.admits(key))
        if not waits and (self._has_no_memory(push) or self._has_no_room(frame)):
            waits = True
        if waits:
            if not owned:
                line.inbox.detach()
            self._waiting.append((line, frame))
            return
        began = time.process_time()
        try:
            held.push(push)
        except BaseException:
            self._log.take_back(len(frame.data))
            raise
        self._log.work_s += time.process_time() - began
        self._pushes += 1
        self._staleness[min(max(held.steps - 1 - request.pulled, 0), STALEST - 1)] += 1
        self._lines.reply(line, frame.number)
        if self._cut is not None and held.has(*key) and self._cut.note(key):  # not at the first part of a step
            self._tell_cut()
        if self._log.is_long(self._state_bytes):
            self._begin_snapshot()

    def _has_no_memory(self, push: Push) -> bool:
        """In a cut, which may hand rows to other servers, what is under way is applied."""
        why = self._memory.take(self._holding.held, push) if self._cut is None else ""
        if why:
            self._lack(why)
        return bool(why)

    def _has_no_room(self, frame: ReceivedFrame) -> bool:
        """Writes the frame to the log, if there is room for it."""
        try:
            self._log.append(frame.data)
        except StorageError as error:
            self._lack(error.message)
            return True
        return False

    def _lack(self, why: str) -> None:
        """Holds pushes back until the disk has room, or the system memory."""
        if why != self._told:
            events.emit("server.lacking", why=why)
        self._lacking = self._told = why
        self._retry_at = self._clock() + RETRY_S

    def _try_again(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for line, frame in waiting:
            try:
                self._push(line, frame, owned=True)
            except TruelineError as error:
                self._refuse(line, frame.number, error)

    def describe_tables(self) -> tuple[TableStats, ...]:
        return self._holding.held.stats if self._holding.is_configured else ()

    def _state_bytes(self) -> int:
        return sum(table.bytes for table in self.describe_tables())

    def _begin_snapshot(self) -> None:
        try:
            writing = self._log.begin_snapshot(self._holding.dump)
        except StorageError as error:
            events.emit("server.no_snapshot", why=error.message)
        else:
            self._lines.watch(writing, lambda: self._end_snapshot(writing))

    def _end_snapshot(self, writing: snapshot.ForkedWrite) -> None:
        self._lines.ignore(writing)
        try:
            self._log.end_snapshot()
        except TruelineError as error:
            events.emit("server.no_snapshot", why=error.message)

    # what does not

    def _pull(self, line: CallerLine, frame: ReceivedFrame) -> None:
        request, held = frame.read(PullRequest), self._holding.held
        held.clock = time.thread_time
        self._holding.check_routing(request.routing)
        if request.dense:
            self._holding.check_ready()
        if len(frame.arrays) != len(request.tables):
            raise FrameError(f"a pull of {len(request.tables)} tables has {len(frame.arrays)} arrays of ids")
        empty = np.empty if frame.room is None or request.half else frame.room.empty
        tables = list(zip(request.tables, frame.arrays, strict=True))
        rows, dense = held.pull(tables, request.dense, request.averaged, empty)
        if request.half:
            rows = [one.astype("<f2") for one in rows]
        self._pulls += 1
        arrays = [*rows, *dense]
        self._lines.reply(line, frame.number, PullReply(held.steps), arrays, given=not dense, room=frame.room)

    def _sum_squares(self, line: CallerLine, frame: ReceivedFrame) -> None:
        request = frame.read(SquaresRequest)
        squares = self._holding.held.sum_squares(request.epoch, request.minibatch)
        self._lines.reply(line, frame.number, Squares(squares))

    def _export(self, line: CallerLine, frame: ReceivedFrame) -> None:
        request = frame.read(ExportRequest)
        self._keep(frame)
        header, arrays = self._holding.held.export(list(request.buckets))
        self._lines.reply(line, frame.number, Moved(msgspec.Raw(msgspec.msgpack.encode(header))), arrays)

    def _tell_stats(self, line: CallerLine, frame: ReceivedFrame) -> None:
        holding = self._holding
        stats = ServerReport(
            ref=self.ref, pid=os.getpid(), routing=-1, initialized=False, steps=0, pulls=self._pulls,
            pushes=self._pushes, duplicates=self._duplicates, staleness=tuple(self._staleness),
            memory=resident_bytes(), queued=len(self._waiting), lacking=self._lacking,
        )  # fmt: skip
        if holding.routing is not None:
            held = holding.held
            stats = msgspec.structs.replace(
                stats, routing=holding.routing.version, initialized=held.initialized, steps=held.steps,
                applied=held.list_applied(), tables=self.describe_tables(), parts=held.num_parts,
            )  # fmt: skip
        self._lines.reply(line, frame.number, stats)

    # cuts and files

    def _begin_cut(self, line: CallerLine, frame: ReceivedFrame) -> None:
        body, held = frame.read(BeginCut), self._holding.held
        self._cut = Cut.begin(body.id, body.keys, held.has, held.list_applied())
        self._cut_line, self._cut_number, self._lacking = line, frame.number, ""
        self._try_again()  # a cut in the place of another may admit what waited
        if self._cut is not None and not self._cut.lacking:
            self._tell_cut()

    def _tell_cut(self) -> None:
        if self._cut_line is not None and self._cut_number >= 0:
            number, self._cut_number = self._cut_number, -1
            self._lines.reply(self._cut_line, number)

    def _end_cut(self, line: CallerLine, frame: ReceivedFrame) -> None:
        if self._cut is not None and self._cut.id == frame.read(EndCut).id:
            self._leave_cut()
        self._lines.reply(line, frame.number)

    def _leave_cut(self) -> None:
        self._cut = self._cut_line = None
        self._try_again()

    def _save(self, line: CallerLine, frame: ReceivedFrame) -> None:
        self._holding.held  # noqa: B018  raises for a server without a part
        self._saves.begin(Path(frame.read(SaveRequest).path), self._holding.dump)
        self._lines.reply(line, frame.number)

    def _wait_saved(self, line: CallerLine, frame: ReceivedFrame) -> None:
        self._saves.wait(Path(frame.read(SaveRequest).path), line, frame.number)

    def _stop(self, line: CallerLine, frame: ReceivedFrame) -> None:
        self._lines.reply(line, frame.number)
        self.leave()


def _clear(waking: socket.socket) -> None:
    waking.recv(64)


def main() -> int:
    """Serves in the job that the environment names (TRUELINE_JOB, _SECRET, _REF); returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    keep_freed()
    gc.freeze()
    job, ref = Path(os.environ["TRUELINE_JOB"]), os.environ["TRUELINE_REF"]
    secret, bound = os.environ["TRUELINE_SECRET"].encode(), int(os.environ.get("TRUELINE_PS_MEMORY", "0"))
    server: ParameterServer | None = None
    try:
        server = repeat_until_room(lambda: ParameterServer(job, ref, secret, memory=bound))
        server.leave_on_sigterm()
        server.start()
        server.run()
    except TruelineError as error:
        sys.stderr.write(f"{error.message}\n{error.hint}\n")
        return 1
    except MemoryError:
        sys.stderr.write(f"{describe_need(server.describe_tables() if server is not None else ())}\n")
        return 1
    return 0


if __name__ == "__main__":
    from trueline.engine.local.process import watch_lifeline

    watch_lifeline()
    sys.exit(main())
