"""Servers that are processes of a test: ports for them, and when they are there."""

from __future__ import annotations

import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now, each another one."""
    with ExitStack() as held:
        return [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def until_listening(process: subprocess.Popen[bytes], port: int, log: Path, patience_s: float = 120.0) -> None:
    """Returns once `process` listens. Raises AssertionError with the end of its log."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"{log.stem} does not listen: {log.read_text()[-2000:]}")
