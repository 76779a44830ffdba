"""Writes and reads large files past the page cache (O_DIRECT, open(2)).

Checkpoints are read rarely and replaced soon. In the page cache each costs more processor time than its digest, and
displaces other files. Where the file system has no O_DIRECT (tmpfs), or refuses an address, the cache is used.
"""

import errno
import fcntl
import mmap
import os
from typing import BinaryIO

BUFFER_BYTES = 8 << 20
ALIGNMENT = 4096


def make_buffer(size: int) -> mmap.mmap:
    """[size] Memory that begins at a page, as O_DIRECT wants it."""
    return mmap.mmap(-1, size)


class DirectFile:
    """Appends to an unbuffered file that is open for writing; nothing is there for a reader before `flush`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._buffer, self._filled, self._written = file, make_buffer(BUFFER_BYTES), 0, 0
        self._direct = False

    def write(self, data: bytes | memoryview) -> None:
        """Raises OSError."""
        left = memoryview(data)
        while left:
            count = min(len(left), BUFFER_BYTES - self._filled)
            self._buffer[self._filled : self._filled + count] = left[:count]
            self._filled, left = self._filled + count, left[count:]
            if self._filled == BUFFER_BYTES:
                self.flush()

    def align(self) -> int:
        """Fills up with zeros; returns the position, from which `read` can read."""
        self.write(bytes(-(self._written + self._filled) % ALIGNMENT))
        return self._written + self._filled

    def flush(self) -> None:
        """Raises OSError."""
        left = memoryview(self._buffer)[: self._filled]
        self._set_direct(self._filled % ALIGNMENT == 0 == self._written % ALIGNMENT)
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
        self._filled = 0

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
        self._file.close()
