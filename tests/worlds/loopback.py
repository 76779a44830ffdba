"""Servers in processes of a test: ports for them, and waiting until they listen."""

from __future__ import annotations

import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

from worlds.waiting import until


def free_ports(count: int) -> list[int]:
    """Distinct free ports of 127.0.0.1."""
    with ExitStack() as held:
        return [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def until_listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Returns once `process` listens. Raises AssertionError with the end of its log."""

    def listens() -> bool:
        assert process.poll() is None, f"{log.stem} has ended: {log.read_text()[-2000:]}"
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    until(listens, lambda: f"{log.stem} listens: {log.read_text()[-2000:]}")
