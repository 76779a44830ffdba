"""Runs a command and leaves nothing of it behind: `python -I -S guard.py PARENT COMMAND...`.

A process between a learner and its shell, by the standard library alone. What the shell starts stays below it, also
when it goes into the background (prctl(2), PR_SET_CHILD_SUBREAPER). All of it is killed when the shell has ended, when
this process gets SIGUSR1, and when its parent dies, by whatever means (PR_SET_PDEATHSIG).

SIGTERM reaches all of it as a notice. A shell dies of that at once, while what it runs may write a checkpoint: from
then on this process ends when nothing is left, or with SIGUSR1 of its parent, which knows how long a notice is.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

PDEATHSIG, SUBREAPER = 1, 36
POLL_S = 0.02


def adopt_orphans() -> None:
    """Makes this process the parent of what its descendants leave behind."""
    ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0)


def list_below(pid: int) -> Iterator[int]:
    """The living processes that descend from `pid`, nearest first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent, *_ = file.read().rpartition(b")")[2].split()
                if state not in (b"Z", b"X"):
                    children.setdefault(int(parent), []).append(int(name))
    found = [pid]
    for one in found:  # grows while it is walked
        found += children.get(one, [])
    yield from found[1:]


def signal_below(number: int) -> bool:
    """Signals what descends from this process; False: nothing does."""
    any_left = False
    for pid in list_below(os.getpid()):
        any_left = True
        with contextlib.suppress(OSError):
            os.kill(pid, number)
    return any_left


def kill_below() -> None:
    _wait_below(signal.SIGKILL)  # again and again: what is killed may have forked meanwhile


def _wait_below(number: int) -> None:
    """Signals what descends from this process until nothing does; 0 is no signal."""
    while signal_below(number):
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        time.sleep(POLL_S)


def die(number: int, frame: object) -> None:
    kill_below()
    os._exit(128 + signal.SIGKILL)


def main() -> None:
    adopt_orphans()
    signal.signal(signal.SIGUSR1, die)
    noticed: list[bool] = []

    def pass_on(number: int, frame: object) -> None:
        noticed.append(signal_below(number))

    signal.signal(signal.SIGTERM, pass_on)
    ctypes.CDLL(None, use_errno=True).prctl(PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        os._exit(128 + signal.SIGKILL)  # the parent died before
    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
    if noticed:
        signal_below(signal.SIGTERM)  # it was not there yet
    code = child.wait()
    if noticed:
        _wait_below(0)
    kill_below()
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
