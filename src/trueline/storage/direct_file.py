"""Writes and reads large files past the page cache (O_DIRECT, open(2)).

Checkpoints are read rarely and replaced soon. In the page cache each costs more processor time than its digest, and
displaces other files. Where the file system has no O_DIRECT (tmpfs), or refuses an address, the cache is used.

A thread writes one buffer to the disk while the next one is filled: what fills it (copies, a digest) costs as much time
as the disk does.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import BinaryIO, Self

BUFFER_BYTES = 8 << 20
ALIGNMENT = 4096
KEPT_BUFFERS = 2
"""Of a file that was closed, for the next one: to touch new memory takes twice the time of filling it."""
Fill = Callable[[memoryview], int]
"""Puts the next bytes of a content into memory, as many as fit; returns how many, 0 after the last ones."""


def make_buffer(size: int) -> mmap.mmap:
    """[size] Memory of this process alone, also after a fork, that begins at a page, as O_DIRECT wants it."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


_idle_buffers: list[mmap.mmap] = []


def _take_buffer() -> mmap.mmap:
    with suppress(IndexError):
        if len(buffer := _idle_buffers.pop()) == BUFFER_BYTES:
            return buffer
    return make_buffer(BUFFER_BYTES)


class DirectFile:
    """Appends to an unbuffered file that is open for writing; nothing is there for a reader before `flush`.

    `close`, or the end of a with block, ends the thread before it closes the file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._buffer, self._filled, self._written = file, _take_buffer(), 0, 0
        self._length = 0  # of all that `write` was given
        self._direct = False
        self._spare: mmap.mmap | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        """Of the other buffer."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def write(self, data: bytes | memoryview) -> None:
        """Raises OSError."""
        left = memoryview(data)
        while left:
            count = min(len(left), BUFFER_BYTES - self._filled)
            self._buffer[self._filled : self._filled + count] = left[:count]
            self._filled, self._length, left = self._filled + count, self._length + count, left[count:]
            if self._filled == BUFFER_BYTES:
                self._hand_over()

    def write_from(self, fill: Fill) -> None:
        """Appends all that `fill` puts into the memory that is written from. Raises OSError."""
        while count := fill(memoryview(self._buffer)[self._filled :]):
            self._filled, self._length = self._filled + count, self._length + count
            if self._filled == BUFFER_BYTES:
                self._hand_over()

    def _hand_over(self) -> None:
        """Writes the buffer in the thread, and continues with the other one."""
        self._await_written()
        if self._thread is None:
            self._thread, self._spare = ThreadPoolExecutor(1, "direct_file"), _take_buffer()
        assert self._spare is not None
        full, self._buffer, self._spare, self._filled = self._buffer, self._spare, self._buffer, 0
        try:
            self._writing = self._thread.submit(self._write_out, memoryview(full))
        except RuntimeError:  # the interpreter ends, and takes no work for its threads any more
            self._write_out(memoryview(full))

    def _await_written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def align(self) -> int:
        """Fills up with zeros; returns the position, from which `read` can read."""
        self.write(bytes(-self._length % ALIGNMENT))
        return self._length

    def flush(self) -> None:
        """Raises OSError."""
        self._await_written()
        rest = memoryview(self._buffer)[: self._filled]
        whole = self._filled - self._filled % ALIGNMENT
        for part in (rest[:whole], rest[whole:]):  # only the end of the file passes the page cache
            if part:
                self._write_out(part)
        self._filled = 0

    def _write_out(self, left: memoryview) -> None:
        self._set_direct(len(left) % ALIGNMENT == 0 == self._written % ALIGNMENT)
        while left:
            try:
                count = os.write(self._file.fileno(), left)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._set_direct(False)
                continue
            left, self._written = left[count:], self._written + count
            if left and count % ALIGNMENT:
                self._set_direct(False)

    def read(self, room: memoryview, at: int) -> int:
        """Reads into `room` from the flushed position `at`; returns how many bytes there were. Raises OSError."""
        self._set_direct(at % ALIGNMENT == 0 == len(room) % ALIGNMENT)
        return os.preadv(self._file.fileno(), [room], at)

    def _set_direct(self, direct: bool) -> None:
        flag = getattr(os, "O_DIRECT", 0)
        if direct == self._direct or not flag:
            return
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | flag if direct else flags & ~flag)
            self._direct = direct
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system without it
                raise

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        if not self._file.closed:
            self._file.close()
            used, self._buffer, self._spare = (self._buffer, self._spare), make_buffer(ALIGNMENT), None
            _idle_buffers.extend(one for one in used if one is not None and len(_idle_buffers) < KEPT_BUFFERS)
