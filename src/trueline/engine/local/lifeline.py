"""No process outlives the command that started it.

The launcher keeps the writing end of a pipe and hands the reading end to every process it starts, and they to
theirs. When the launcher ends, by whatever means, the kernel closes the pipe and every reader sees the end of it.
Unlike PR_SET_PDEATHSIG this reaches grandchildren and does not tie a worker's life to its direct parent's.

A process that stands still (SIGSTOP) reads nothing, so the kernel is asked to wake it when the pipe ends: F_SETSIG lets
it send SIGCONT instead of SIGIO. Source: fcntl(2), "Signals".
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading

VARIABLE = "TRUELINE_LIFELINE"


def watch_in_thread() -> None:
    """Ends this process (exit code 75) as soon as the launcher is gone; does nothing when there is no lifeline."""
    handle = os.environ.get(VARIABLE)
    if handle is not None:
        wake_at_end(int(handle))
        threading.Thread(target=_wait, args=(int(handle),), name="lifeline", daemon=True).start()


def wake_at_end(handle: int) -> None:
    """Has this process continue, if it stands still, when the lifeline `handle` ends.

    Who is told is a property of the open pipe, which processes share: this one opens it anew.
    """
    own = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK)  # without a writer it would wait for one
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)


def _wait(handle: int) -> None:
    while os.read(handle, 1):
        continue
    os._exit(75)
