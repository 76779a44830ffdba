"""What every process of the local engine keeps to: it never outlives its launcher, nor returns into its parent's code.

The **lifeline** is a pipe. The launcher keeps the writing end and hands the reading end to every process that it
starts, and they to theirs. When the launcher ends, the kernel closes the pipe and every reader sees its end. Unlike
PR_SET_PDEATHSIG this reaches grandchildren and does not tie a worker to its direct parent.

A stopped process (SIGSTOP) reads nothing, so F_SETSIG makes the kernel send SIGCONT instead of SIGIO when the pipe
ends. Source: fcntl(2), "Signals".
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

LIFELINE = "TRUELINE_LIFELINE"
"""Environment variable with the descriptor of the lifeline's reading end."""


def watch_lifeline() -> None:
    """Starts a thread that ends this process (exit code 75) when the launcher ends; nothing without a lifeline."""
    handle = os.environ.get(LIFELINE)
    if handle is not None:
        wake_at_end(int(handle))
        threading.Thread(target=_wait, args=(int(handle),), name="lifeline", daemon=True).start()


def wake_at_end(handle: int) -> None:
    """Has the kernel send this process SIGCONT when the lifeline `handle` ends.

    The signal's receiver is a property of the open file, which processes share, so this opens the pipe again.
    """
    own = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK)  # without a writer it would block
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)


def _wait(handle: int) -> None:
    while os.read(handle, 1):
        continue
    os._exit(75)


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
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
