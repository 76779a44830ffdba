"""Processes that outlived their agent: the next agent finds them, watches them and kills them.

Agent and process both append ref, pid and start time to a file beside the agent's socket, since either may be killed
right after the fork. Pids are reused, but pid and start time identify a process (proc(5), field 22 of /proc/PID/stat).
A pidfd (pidfd_open(2)) that was opened before that comparison refers to this process for good.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

import msgspec


class Birth(msgspec.Struct, frozen=True):
    ref: str
    pid: int
    started: int
    """Clock ticks since the machine's boot."""


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


def adopt(birth: Birth) -> int | None:
    """Opens a pidfd of the process, readable when it ends; None when it has ended already."""
    try:
        handle = os.pidfd_open(birth.pid)
    except OSError:
        return None
    if read_start(birth.pid) == birth.started and not select.select([handle], [], [], 0)[0]:
        return handle
    os.close(handle)
    return None


def kill(handle: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, number)


def wait(handle: int) -> None:
    select.select([handle], [], [])
