"""A body while it arrives. A long one is in a file in memory, which other processes can map.

A `bytearray` grows by `realloc`, which copies what it has and holds the GIL: the event loop was blocked for 10 ms at a
time while 64 MiB came. Writing to a file in memory copies each piece once, without the GIL.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from queue import SimpleQueue

Body = bytes | bytearray | memoryview
SHARED_BYTES = 2**20
"""Bodies above this are in a file."""


class MappedFile(mmap.mmap):
    """A mapping that a thread ends when it is not used any more. Ending one of 64 MiB on the event loop took it 13 ms:
    the last reference to a file in memory, which a mapping is too, returns its pages."""

    def __del__(self) -> None:
        _CLOSER.close(self)

    def release(self) -> None:
        """In that thread."""
        with contextlib.suppress(BufferError):  # found in a cycle with its views: the next collection ends it
            self.close()


class SharedBody(MappedFile):
    """A whole body, mapped; the buffer behind a memoryview of it."""

    descriptor: int
    """Of its file; open while this is."""

    def release(self) -> None:
        super().release()
        os.close(self.descriptor)


class BodyBuffer:
    """Pieces in, one body out."""

    __slots__ = ("_descriptor", "_short", "_size")

    def __init__(self) -> None:
        self._short: bytes | bytearray = b""
        self._descriptor: int | None = None
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __del__(self) -> None:
        if self._descriptor is not None:
            _CLOSER.close(self._descriptor)

    def add(self, piece: bytes) -> None:
        """Raises MemoryError."""
        self._size += len(piece)
        if self._descriptor is not None:
            self._write(piece)
        elif self._size > SHARED_BYTES:
            try:
                self._descriptor = os.memfd_create("body", os.MFD_CLOEXEC)
            except OSError as error:
                raise MemoryError(f"no file for a body of {self._size} bytes: {error.strerror}") from error
            self._write(self._short)
            self._write(piece)
            self._short = b""
        elif not self._short:
            self._short = piece
        else:
            if not isinstance(self._short, bytearray):
                self._short = bytearray(self._short)
            self._short += piece

    def _write(self, piece: bytes | bytearray) -> None:
        assert self._descriptor is not None
        left = memoryview(piece)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            raise MemoryError(f"no memory for a body of {self._size} bytes: {error.strerror}") from error

    def take(self) -> Body:
        """The body; the buffer is then empty. Raises MemoryError."""
        if self._descriptor is None:
            body: Body = self._short
        else:
            try:
                mapped = SharedBody(self._descriptor, self._size, access=mmap.ACCESS_READ)
            except OSError as error:
                raise MemoryError(f"no memory for a body of {self._size} bytes: {error.strerror}") from error
            mapped.descriptor = self._descriptor
            body = memoryview(mapped)
        self._short, self._descriptor, self._size = b"", None, 0
        return body


class _Closer:
    """Closes files and ends mappings in a thread: the last one returns their memory, some milliseconds for 64 MiB."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[int | MappedFile] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def close(self, held: int | MappedFile) -> None:
        """May be called by a finalizer: a mapping lives on until the thread has it."""
        self._waiting.put(held)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="body-closer", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            held = self._waiting.get()
            if isinstance(held, MappedFile):
                held.release()
            else:
                os.close(held)
            del held


_CLOSER = _Closer()
