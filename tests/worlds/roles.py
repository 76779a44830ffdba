"""Processes for the engine's tests."""

import os
import signal
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
