"""Ends what handlers' processes leave behind: their own children, whichever way worker or server ended.

Every worker has the variable TRUELINE_HANDLER in its environment, and all processes that it starts inherit it, also
those in sessions of their own, which no process group contains. It names a folder that the server's process holds while
it lives, and the worker.

    a worker ends      the server ends all processes with the worker's mark
    the server ends    a guard, a small process of its own that waits for this, ends all processes with the server's
                       mark and deletes its temporary folders
    both are killed    the next server does it, at its start

A process that removes the variable from its environment is not found. Sources: proc(5), pidfd_open(2); prctl(2):
PR_SET_PDEATHSIG, which each worker uses besides, reaches no grandchildren.
"""

import atexit
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from trueline import files

MARK = "TRUELINE_HANDLER"
"""Environment variable: `FOLDER#WORKER`."""
_WAIT = "import os, sys; sys.stdin.buffer.read(); os.execv(sys.argv[1], sys.argv[1:])"
"""The guard, without any import: its standard input ends with the server."""
_ROUNDS = 10
"""A process may start another while it is looked for."""


class _Life:
    """The folder that this process holds, and its guard."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._pid = os.getpid()
        self._folder = files.TemporaryFolder("life")
        self._numbers = itertools.count()
        sweep = (sys.executable, "-P", "-m", __name__)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WAIT, *sweep],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name != MARK},
        )
        atexit.register(self.close)

    def next_mark(self) -> str:
        return f"{self._folder.path}#{next(self._numbers)}"

    def close(self) -> None:
        """At the regular end: what the guard would do, and nothing is left to it."""
        if self._pid != os.getpid():
            return  # a fork that ends
        self._guard.kill()
        self._guard.communicate()
        self._folder.remove()
        kill_orphans()


_life: _Life | None = None
_LOCK = threading.Lock()


def next_mark() -> str:
    """The mark of a new worker of this process. Raises OSError."""
    global _life
    with _LOCK:
        _life = _life or _Life()
        return _life.next_mark()


def kill_marked(mark: str) -> int:
    """Ends what the worker with this mark has started; returns their number."""
    return _kill(lambda pid, found: found == mark)


def kill_orphans() -> int:
    """Ends what handlers of dead servers have started; returns their number."""
    return _kill(lambda pid, found: not _has_server(pid, found))


def clean_up() -> None:
    """`kill_orphans`, and deletes the temporary folders of dead servers. Blocks; call it when a server starts."""
    kill_orphans()
    files.sweep_temporary()


def _has_server(pid: int, mark: str) -> bool:
    """Whether the mark's folder is held, where the process sees it (it may be in a container) or here."""
    folder = mark.rpartition("#")[0]
    return any(files.is_held(Path(root + folder)) for root in (f"/proc/{pid}/root", ""))


def _kill(condemned: Callable[[int, str], bool]) -> int:
    count = 0
    for _ in range(_ROUNDS):
        found = sum(_kill_one(pid, condemned) for pid in list(_list_pids()))
        if not found:
            break
        count += found
    return count


def _list_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal() and _mark_of(int(name)))


def _mark_of(pid: int) -> str:
    """Empty for a process without one, of another user, or that has ended."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == MARK.encode():
                return os.fsdecode(value)
    return ""


def _kill_one(pid: int, condemned: Callable[[int, str], bool]) -> bool:
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)  # from now on it is this process, however its number is used
        try:
            mark = _mark_of(pid)
            if mark and pid != os.getpid() and condemned(pid, mark):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                return True
        finally:
            os.close(handle)
    return False


if __name__ == "__main__":
    clean_up()
