"""Processes that outlived the agent that forked them: how the next agent finds them, sees them end, and kills them.

The agent writes ref, pid and start time of every process into a file beside its socket; the process does the same
before it does anything else, since either may be killed right after the fork. A pid alone may be somebody else's by
now; pid and start time together are one process (proc(5), field 22 of /proc/PID/stat), and a pidfd (pidfd_open(2))
that was opened before they were compared stays that process's for ever.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

import msgspec


class Born(msgspec.Struct, frozen=True):
    ref: str
    pid: int
    started: int
    """Clock ticks since the machine's boot."""


def started(pid: int) -> int | None:
    """When the process began; None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[19])


def record(path: Path, ref: str, pid: int) -> None:
    """Writes a process into `path`; a line is one write, so processes do not tear each other's."""
    line = msgspec.json.encode(Born(ref, pid, started(pid) or 0)) + b"\n"
    with contextlib.suppress(OSError):  # a full disk: should the agent die as well, the master's lease has to do
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)


def recorded(path: Path) -> list[Born]:
    """What former agents have forked; a line that a full disk tore is passed over."""
    found: dict[str, Born] = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(msgspec.DecodeError):
            born = msgspec.json.decode(line, type=Born)
            found[born.ref] = born
    return list(found.values())


def adopt(born: Born) -> int | None:
    """A pidfd of the process, readable when it has ended; None when it has ended already."""
    try:
        handle = os.pidfd_open(born.pid)
    except OSError:
        return None
    if started(born.pid) == born.started and not select.select([handle], [], [], 0)[0]:
        return handle
    os.close(handle)
    return None


def kill(handle: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, number)


def wait(handle: int) -> None:
    select.select([handle], [], [])
