"""Reads the first JSON line of a child process, and ends it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import IO, Any

from trueline.errors import TruelineError, find_error_class


def first_record(stdout: IO[bytes], timeout_s: float) -> dict[str, Any] | None:
    """None when the process ends or `timeout_s` passes before there is a line."""
    line, until = b"", time.monotonic() + timeout_s
    while not line.endswith(b"\n"):
        left_s = until - time.monotonic()
        if left_s <= 0 or not select.select([stdout], [], [], left_s)[0]:
            return None
        piece = os.read(stdout.fileno(), 65536)
        if not piece:
            return None
        line += piece
    found: dict[str, Any] = json.loads(line)
    return found


def rebuild_error(code: str, record: Mapping[str, Any]) -> TruelineError:
    """The error that a child wrote as `code`, with `message` and `hint` in `record`."""
    return find_error_class(code)(str(record["message"]), hint=str(record.get("hint", "")))


def end(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Terminates the process, kills it after `timeout_s`, closes its pipes; returns its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    return process.returncode
