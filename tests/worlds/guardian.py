"""Ends what a run of tests has started when pytest is killed: launchers, servers, agents, and what they have forked.

A process of its own waits for the end of a pipe that only pytest holds. It knows the others by a variable in their
environment, and forks of pytest, which have none of their own there, by the number that they write into the pipe.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "TRUELINE_TESTS"


def start() -> None:
    """Has this process guarded from now on."""
    mark, (reading, writing) = f"{os.getpid()}-{time.monotonic_ns()}", os.pipe()
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}
    subprocess.run(
        [sys.executable, "-S", __file__, mark], stdin=reading, start_new_session=True, env=unmarked, check=True
    )
    os.close(reading)
    os.environ[MARK] = mark

    def register() -> None:
        os.write(writing, f"{os.getpid()} {_read_start(os.getpid())}\n".encode())
        os.close(writing)

    os.register_at_fork(after_in_child=register)


def _read_start(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _find(mark: str) -> list[int]:
    """The living processes whose environment holds the mark."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is of another user
            if f"{MARK}={mark}\0".encode() in Path("/proc", name, "environ").read_bytes():
                found.append(int(name))
    return found


def main() -> None:
    if os.fork():  # no child of pytest: tests count these
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forks = [line.split() for line in sys.stdin.read().splitlines()]
    left = [int(pid) for pid, *began in forks if began == [_read_start(int(pid))]]
    left += _find(sys.argv[1])
    while left:  # until no new one appears: what is killed may have forked meanwhile
        for pid in left:
            with suppress(ProcessLookupError):
                ends = os.pidfd_open(pid)
                os.kill(pid, signal.SIGKILL)
                select.select([ends], [], [])
                os.close(ends)
        left = _find(sys.argv[1])


if __name__ == "__main__":
    main()
