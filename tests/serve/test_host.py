"""The server's turns on the processor."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from trueline.serve import host


def read_own(name: str) -> str:
    """A line of the kernel's account of this thread."""
    lines = Path("/proc/thread-self/sched").read_text(encoding="ascii").splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith(name)), "")


def test_a_thread_with_short_turns_keeps_its_niceness_and_starts_threads_with_short_turns() -> None:
    if not Path("/proc/thread-self/sched").exists() or not read_own("se.slice"):
        pytest.skip("this kernel shows no turns of threads")
    found: list[str] = []

    def look() -> None:
        found.append(read_own("se.slice"))

    def begin() -> None:
        os.nice(3)  # of this thread alone
        host.take_short_turns()
        found.append(str(os.nice(0)))
        look()
        inner = threading.Thread(target=look)
        inner.start()
        inner.join()

    before = os.nice(0)
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert found == [str(min(19, before + 3)), str(host.SLICE_NS), str(host.SLICE_NS)]
