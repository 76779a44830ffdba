"""Writing while the disk is full: it is waited for, and nothing is lost.

Logs and lines of events are kept in memory meanwhile; a file that has to be there is waited for.
"""

import fcntl
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from trueline import events, files
from trueline.errors import DiskFull

Written = TypeVar("Written")
ROOM_S, PATIENCE_S, MOST_KEPT = 0.2, 60.0, 16 << 20
"""How often a full disk is looked at, how long for a file that has to be there, and the most bytes kept meanwhile."""


def write_when_room(path: Path, data: bytes, *, replace: bool = True) -> bool:
    """As `write_atomic`; while the disk is full it waits, for PATIENCE_S at most."""
    return repeat_until_room(lambda: files.write_atomic(path, data, replace=replace), PATIENCE_S)


def repeat_until_room(write: Callable[[], Written], patience_s: float = math.inf) -> Written:
    """The result of `write`, which is repeated while the disk is full, for `patience_s` at most.

    Raises StorageError.
    """
    until, told = time.monotonic() + patience_s, False
    while True:
        try:
            return write()
        except DiskFull as error:
            if time.monotonic() > until:
                raise
            if not told:
                events.emit("disk.waited", why=error.message)
            told = True
            time.sleep(ROOM_S)  # no system tells of room


def append_lines(path: Path, lines: bytes) -> None:
    """Appends whole lines to a file to which other processes append too, or none of them. Raises OSError."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        size, written = os.fstat(handle).st_size, 0
        if size and os.pread(handle, 1, size - 1) != b"\n":
            lines = b"\n" + lines  # a writer died within a line
        try:
            while written < len(lines):
                written += os.write(handle, lines[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)


class PatientWriter:
    """Passes data on to `write`, which raises OSError, or returns how much of it was written. What a full disk does not
    take is kept, the newest MOST_KEPT bytes, and a thread writes it once there is room."""

    def __init__(self, write: Callable[[bytes], int | None]) -> None:
        self._write, self._left, self._lock = write, bytearray(), threading.RLock()
        self._waiter: threading.Thread | None = None

    def write(self, data: bytes | memoryview) -> None:
        with self._lock:
            self._left += data
            if self._flush():
                return
            del self._left[: max(0, len(self._left) - MOST_KEPT)]
            if self._waiter is None or not self._waiter.is_alive():
                self._waiter = threading.Thread(target=self.wait, name="room", daemon=True)
                self._waiter.start()

    def wait(self, patience_s: float = math.inf) -> None:
        """Returns when all is written, or after `patience_s`."""
        until = time.monotonic() + patience_s
        while not self._flush() and time.monotonic() < until:
            time.sleep(ROOM_S)  # no system tells of room

    def _flush(self) -> bool:
        with self._lock:
            try:
                while self._left:
                    count = self._write(bytes(self._left))
                    del self._left[: len(self._left) if count is None else count]
            except OSError as error:
                if error.errno in files.NO_ROOM:
                    return False
                self._left.clear()
            return True
