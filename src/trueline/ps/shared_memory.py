"""Memory that a worker and a server on one host share: large frames lie in it, and their places go through the socket.

    caller    a memfd of fixed size, beside its proof (SCM_RIGHTS, unix(7)) ──▶ the listener maps it
    request   the caller writes the frame, and leaves room for the reply
    reply     the listener writes the frame into that room

    place     magic, where the frame begins, its length, where the room begins, its length; in units of 8 bytes

The caller alone decides what lies where. A request's memory is free again when its reply has come, the room when the
reply's arrays are gone. A frame that finds no room goes through the socket as every other. Each connection has memory
of its own, which ends with it.
"""

import fcntl
import mmap
import os
import struct
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Buffer = memoryview | bytes

LEAST = 8 << 10
"""What is smaller, together with its reply, goes through the socket."""
SIZE = 256 << 20
"""Of addresses: memory is taken as it is needed."""
MOST = 1 << 32
HEADER = 4096
"""Bytes of a room for what comes before the arrays."""
MAGIC = b"TLS\1"
_UNIT = 8
_PLACE = struct.Struct("<4sIIIII")  # the last is not used: a place is as long as the head of a frame
_STEP = 4 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class FoundFrame(NamedTuple):
    data: memoryview
    room: "ReplyRoom | None"  # for the reply to it


class ReplyRoom:
    """Memory of the caller for the reply to one request. `at`: where it begins in all of the caller's memory."""

    def __init__(self, memory: memoryview, at: int) -> None:
        self._memory, self._begin = memory, at
        self._bytes: Bytes = np.frombuffer(memory, np.uint8)
        self._at = HEADER

    def empty(self, shape: tuple[int, int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """As numpy.empty; the next array of the reply, unless there is no more room."""
        count = shape[0] * shape[1]
        size = count * np.dtype(dtype).itemsize
        if not count or self._at + size > len(self._memory):
            return np.empty(shape, dtype)
        array = np.frombuffer(self._memory, dtype, count, self._at).reshape(shape)
        self._at += -(-size // 8) * 8
        return array

    def write(self, pieces: Sequence[Buffer]) -> bytes | None:
        """Writes a frame, in which arrays from `empty` stay where they are; its place. None when it does not fit."""
        start = at = HEADER - len(pieces[0])
        own = _find_address(self._bytes)
        copies: list[tuple[int, Bytes]] = []
        for piece in pieces:
            source: Bytes = np.frombuffer(piece, np.uint8)
            where = _find_address(source) - own
            if where != at:
                if 0 <= where < len(self._memory):  # one of its arrays, but not in this order
                    return None
                copies.append((at, source))
            at += len(piece)
        if start < 0 or at > len(self._memory):
            return None
        for to, source in copies:
            self._bytes[to : to + len(source)] = source
        return _pack(self._begin + start, at - start, self._begin, len(self._memory))


class ListenerMemory:
    """What a caller shares, at the listener."""

    def __init__(self, handle: int) -> None:
        """Maps it; the descriptor stays the caller's. Raises OSError, ValueError for what could become shorter."""
        size = os.fstat(handle).st_size
        if not fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or not 0 < size <= MOST:
            raise ValueError(f"{size} bytes of shared memory that are not sealed")
        self._memory = memoryview(mmap.mmap(handle, size))

    def find(self, place: Buffer) -> FoundFrame:
        """Raises ValueError for what lies outside."""
        _, frame, length, begin, size, _ = _PLACE.unpack_from(place)
        room = ReplyRoom(self._slice(begin, size), begin * _UNIT) if size * _UNIT > HEADER else None
        return FoundFrame(self._slice(frame, length), room)

    def _slice(self, begin: int, length: int) -> memoryview:
        if (begin + length) * _UNIT > len(self._memory):
            raise ValueError(f"a frame of {length * _UNIT} bytes at {begin * _UNIT} of {len(self._memory)}")
        return self._memory[begin * _UNIT : (begin + length) * _UNIT]


class CallerMemory:
    """What this process shares over one connection. `send`, `find` and `free` are called by one thread."""

    def __init__(self, size: int = SIZE) -> None:
        """Raises OSError where the system has no such memory."""
        self.handle = os.memfd_create("trueline-ps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.handle)
        os.ftruncate(self.handle, size)
        fcntl.fcntl(self.handle, fcntl.F_ADD_SEALS, _SEALS)
        self._bytes: Bytes = np.frombuffer(mmap.mmap(self.handle, size), np.uint8)
        self._base = _find_address(self._bytes)
        self._used = self._taken = 0
        """Where the part begins that was never used, and the part for which the system has given memory."""
        self._idle: dict[int, list[int]] = {}
        """Where free pieces begin, by size: the last one that was used is in the processor's caches."""
        self._freed: deque[tuple[int, int]] = deque()
        self._requests: dict[int, tuple[Bytes, int]] = {}
        self._rooms: dict[int, Bytes] = {}

    def send(self, number: int, pieces: Sequence[Buffer], reply: int = 0) -> bytes | None:
        """Writes the frame of request `number`, and leaves room for `reply` bytes of arrays; its place. None when it
        is small, or there is no room."""
        length = sum(map(len, pieces))
        if length + reply < LEAST or (request := self._take(length)) is None:
            return None
        at = 0
        for piece in pieces:
            request[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        room = self._take(HEADER + reply) if reply else None
        begin = size = 0
        if room is not None:
            begin, size = self._find_begin(room), len(room)
            self._rooms[begin] = room
        self._requests[number] = request, begin if size else -1
        return _pack(self._find_begin(request), length, begin, size)

    def find(self, place: Buffer) -> FoundFrame:
        """A reply; its memory stays as long as something holds it. Raises ValueError when there is no such room."""
        _, frame, length, begin, _, _ = _PLACE.unpack_from(place)
        room = self._rooms.get(begin * _UNIT)
        at = (frame - begin) * _UNIT
        if room is None or at < 0 or at + length * _UNIT > len(room):
            raise ValueError(f"a reply at {frame * _UNIT}, where no room was left for one")
        return FoundFrame(room.data[at : at + length * _UNIT], None)

    def free(self, number: int) -> None:
        """Ends request `number`, if it lies here."""
        _, begin = self._requests.pop(number, (None, -1))
        if begin >= 0:
            del self._rooms[begin]

    def _find_begin(self, piece: Bytes) -> int:
        return _find_address(piece) - self._base

    def _take(self, length: int) -> Bytes | None:
        size = _round_up(length)
        while self._freed:
            begin, of = self._freed.popleft()
            self._idle.setdefault(of, []).append(begin)
        at = -1 if self._idle.get(size) else self._extend(size)
        if at < 0:
            size = min((of for of, begins in self._idle.items() if of >= size and begins), default=0)
            if not size:
                return None
            at = self._idle[size].pop()
        piece = self._bytes[at : at + size]
        weakref.finalize(piece, self._freed.append, (at, size)).atexit = False
        return piece

    def _extend(self, size: int) -> int:
        """Where `size` bytes begin that were never used; -1: the system, or the mapping, has no more."""
        end = self._used + size
        if end > len(self._bytes):
            return -1
        if end > self._taken:
            more = min(-(-end // _STEP) * _STEP, len(self._bytes))
            try:
                os.posix_fallocate(self.handle, self._taken, more - self._taken)
            except OSError:
                return -1
            self._taken = more
        at, self._used = self._used, end
        return at


def _round_up(length: int) -> int:
    """Of a few sizes, at most a quarter larger than they need to be: frames of nearly one length take turns."""
    step = max(4096, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


def _pack(frame: int, length: int, room: int, size: int) -> bytes:
    return _PLACE.pack(MAGIC, frame // _UNIT, length // _UNIT, room // _UNIT, size // _UNIT, 0)


def _find_address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])
