"""Processes of the local engine: they never outlive their launcher, and a new agent finds those of a dead one.

The **lifeline** is a pipe. The launcher keeps the writing end; every process inherits the reading end, and sees the end
of the pipe when the launcher ends. Unlike PR_SET_PDEATHSIG this reaches grandchildren. A stopped process (SIGSTOP)
reads nothing, so F_SETSIG makes the kernel send it SIGCONT when the pipe ends (fcntl(2), "Signals"). What the launcher
forks (a pool in a notebook) gives the writing end back at once. Each process ends with its process group, so that what
users' code has started in a worker does not stay behind.

**Orphans** have outlived their agent. Agent and process both append ref, pid and start time to a file beside the
agent's socket, since either may be killed right after the fork. Pids are reused; pid and start time identify a process
(proc(5), field 22 of /proc/PID/stat), and a pidfd that was opened before that comparison refers to it for good.
"""

import contextlib
import fcntl
import io
import os
import select
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from trueline import files
from trueline.full_disk import PATIENCE_S, ROOM_S, PatientWriter

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

LIFELINE = "TRUELINE_LIFELINE"
"""Environment variable with the descriptor of the lifeline's reading end."""
GRACE_S = 1.0
LAST_S = 2.0
"""How long the end of a process waits for room for the end of its log."""


@dataclass(slots=True)
class _ForkedBy:
    """The agent that has forked this process."""

    path: str = ""
    """Its socket; empty: none has."""


forked_by = _ForkedBy()


class Lifeline:
    """The launcher's side: a pipe whose writing end no other process has."""

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe()
        _held.add(self)

    def end(self) -> None:
        """Ends every process that watches it. May be repeated."""
        writing, self._writing = self._writing, -1
        if writing >= 0:
            os.close(writing)


_held = weakref.WeakSet[Lifeline]()


def _end_copies() -> None:
    for lifeline in list(_held):
        lifeline.end()


os.register_at_fork(after_in_child=_end_copies)


def signal_group(pid: int, number: int) -> bool:
    """Signals the process group that `pid` leads, in which is what users' code has started; False: there is none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
        return True
    return False


def end_groups(pids: Iterable[int]) -> None:
    """Ends the groups of ended leaders that are not reaped yet, so that no other group can have the number.

    SIGKILL comes after `GRACE_S`: Python's resource tracker removes a dead process's shared memory meanwhile.
    """
    left = [pid for pid in pids if signal_group(pid, signal.SIGTERM)]
    until = time.monotonic() + GRACE_S
    while (left := [pid for pid in left if _has_living(pid)]) and time.monotonic() < until:
        time.sleep(0.01)  # they are children of others: no event tells of their ends
    for pid in left:
        signal_group(pid, signal.SIGKILL)


def _has_living(group: int) -> bool:
    """Whether the process group has a member that is no zombie."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                state, _, its = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:3]
                if int(its) == group and state not in b"ZX":
                    return True
    return False


def watch_lifeline() -> None:
    """Starts a thread that ends this process (exit code 75) and its group when the launcher ends; nothing without a
    lifeline."""
    handle = os.environ.get(LIFELINE)
    if handle is not None:
        wake_at_end(int(handle))
        threading.Thread(target=_wait, args=(int(handle),), name="lifeline", daemon=True).start()


def wake_at_end(handle: int) -> None:
    """Has the kernel send this process, and not those that share the open file, SIGCONT when the lifeline ends."""
    own = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK)  # without a writer it would block
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)


def _wait(handle: int) -> None:
    while os.read(handle, 1):
        continue
    signal_group(os.getpid(), signal.SIGTERM)
    os._exit(75)


class LogFile(io.FileIO):
    """A process's log. What a full disk does not take is written later; `print` must not fail in a user's code."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self.writer = PatientWriter(partial(os.write, number))

    def write(self, data: "Buffer", /) -> int:
        self.writer.write(memoryview(data))
        return memoryview(data).nbytes


def log_output() -> None:
    """Has sys.stdout and sys.stderr, which are a log from now on, survive a full disk."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).flush()
        raw = io.BufferedWriter(LogFile(number))
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True))


def run_child(main: Callable[[], int | None]) -> NoReturn:
    """Runs `main` in a forked child and ends the process with its exit code (None: 0), or 1 when it raises."""
    code = 1
    try:
        code = main() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  the process boundary: report all, then end
        traceback.print_exc()
    finally:
        for output in (sys.stdout, sys.stderr):
            output.flush()
            if isinstance(log := getattr(getattr(output, "buffer", None), "raw", None), LogFile):
                log.writer.wait(LAST_S)
        os._exit(code)


def open_log(path: str) -> int:
    """A process's log, which exists afterwards: a full disk is waited for. Raises OSError."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            if error.errno not in files.NO_ROOM or time.monotonic() > until:
                raise
        time.sleep(ROOM_S)  # no system tells of room


class Birth(msgspec.Struct, frozen=True):
    ref: str
    pid: int
    started: int  # clock ticks since the machine's boot


def read_start(pid: int) -> int | None:
    """The process's start time in clock ticks since boot; None when it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[19])


def record_birth(path: Path, ref: str, pid: int) -> None:
    """Appends a process to `path`. A line is one write, so concurrent writers do not interleave."""
    line = msgspec.json.encode(Birth(ref, pid, read_start(pid) or 0)) + b"\n"
    with contextlib.suppress(OSError):  # a full disk: if the agent dies too, the master's lease remains
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)


def read_births(path: Path) -> list[Birth]:
    """The processes that former agents forked; skips a line that a full disk tore."""
    births: dict[str, Birth] = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(msgspec.DecodeError):
            birth = msgspec.json.decode(line, type=Birth)
            births[birth.ref] = birth
    return list(births.values())


def adopt_orphan(birth: Birth) -> int | None:
    """Opens a pidfd of the process, readable when it ends; None when it has ended already."""
    try:
        handle = os.pidfd_open(birth.pid)
    except OSError:
        return None
    if read_start(birth.pid) == birth.started and not select.select([handle], [], [], 0)[0]:
        return handle
    os.close(handle)
    return None
