"""Processes for the engine's tests."""

import os
import signal
import subprocess
import sys


def fail() -> int:
    print("failing")
    return 7


def wait() -> None:
    signal.pause()


def polite() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    print("ready", flush=True)
    signal.pause()


def stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        signal.pause()


def say() -> None:
    print(os.environ["TRUELINE_TEST_WORD"])


def show_imports() -> None:
    print("colorsys" in sys.modules)


def parent() -> None:
    """Starts a process, as a user's data set may, which ignores SIGTERM."""
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); signal.pause()"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    print(child.pid, flush=True)
    signal.pause()


def usual_parent() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    print(child.pid, flush=True)
    signal.pause()
