"""Frames between the server and a handler's process: a JSON head and raw parts, without pickle.

One packet of a SOCK_SEQPACKET pair is one frame.

    prefix   kind (0: the body follows, 1: it is in the memfd whose descriptor comes along), lengths of head and body
    body     the head, then its parts; the head's `sizes` are their lengths

A body over INLINE_BYTES travels as a memfd, which each side copies once. It is read with pread: if the other side
shrinks it, the result is a short read, not a SIGBUS.
"""

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

INLINE_BYTES = 64 * 2**10
_PREFIX = struct.Struct("!BxxxIQ")
_INLINE, _MEMORY = 0, 1

Part = bytes | bytearray | memoryview
Head = dict[str, Any]
P = TypeVar("P", bytes, bytearray)


class Closed(Exception):
    """The other side has closed the socket."""


class Malformed(Exception):
    """The sender is not trusted any more."""


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, head: Head, parts: Sequence[Part] = ()) -> None:
    """Raises Closed; BlockingIOError if `sock` does not block and the other side does not read."""
    text = msgspec.json.encode({**head, "sizes": [len(part) for part in parts]})
    total = len(text) + sum(len(part) for part in parts)
    try:
        if total <= INLINE_BYTES:
            sock.send(b"".join((_PREFIX.pack(_INLINE, len(text), total), text, *parts)))
            return
        memory = os.memfd_create("frame", os.MFD_CLOEXEC)
        try:
            for piece in (text, *parts):
                _write(memory, piece)
            socket.send_fds(sock, [_PREFIX.pack(_MEMORY, len(text), total)], [memory])
        finally:
            os.close(memory)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed from error


def _write(memory: int, piece: Part) -> None:
    left = memoryview(piece)
    while left:
        left = left[os.write(memory, left) :]


@dataclass(slots=True, eq=False)
class Frame:
    """A frame that has come and is not yet read; one in a memfd may be read in a thread."""

    head_bytes: int
    num_bytes: int
    _inline: memoryview
    _memory: int | None = None

    def __del__(self) -> None:
        if self._memory is not None:
            os.close(self._memory)

    def read(self, kind: type[P]) -> tuple[Head, list[P]]:
        """Head and parts. Raises Malformed."""
        head, sizes = _head(self._piece(bytes, self.head_bytes, 0), self.num_bytes - self.head_bytes)
        parts, at = [], self.head_bytes
        for size in sizes:
            parts.append(self._piece(kind, size, at))
            at += size
        return head, parts

    def _piece(self, kind: type[P], size: int, at: int) -> P:
        if self._memory is None:
            return kind(self._inline[at : at + size])
        if kind is bytes:  # without a copy
            found = os.pread(self._memory, size, at)
            return kind(found if len(found) == size else _read(self._memory, size, at))
        return kind(_read(self._memory, size, at))


def receive(sock: socket.socket, max_bytes: int) -> tuple[Head, list[bytearray]]:
    """The next frame, read. Raises Closed, Malformed, BlockingIOError."""
    return receive_frame(sock, max_bytes).read(bytearray)


def receive_frame(sock: socket.socket, max_bytes: int) -> Frame:
    """The next frame. Raises Closed, Malformed (also for a body over `max_bytes`), BlockingIOError."""
    try:
        data, descriptors, flags, _ = socket.recv_fds(sock, _PREFIX.size + INLINE_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError as error:
        raise Closed from error
    try:
        if not data:
            raise Closed
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(data) < _PREFIX.size:
            raise Malformed(f"a packet of {len(data)} bytes is no frame")
        kind, head_bytes, total = _PREFIX.unpack_from(data)
        if head_bytes > total or total > max_bytes:
            raise Malformed(f"a frame of {total} bytes is over the limit of {max_bytes}")
        if kind == _MEMORY and len(descriptors) == 1:
            return Frame(head_bytes, total, memoryview(b""), descriptors.pop())
        if kind != _INLINE or descriptors or len(data) != _PREFIX.size + total:
            raise Malformed("a frame's prefix does not fit its body")
        return Frame(head_bytes, total, memoryview(data)[_PREFIX.size :])
    finally:
        for one in descriptors:
            os.close(one)


def _read(memory: int, size: int, at: int) -> bytearray:
    found = bytearray(size)
    view, done = memoryview(found), 0
    while done < size:
        count = os.preadv(memory, [view[done:]], at + done)
        if not count:
            raise Malformed("a frame's memory is shorter than its prefix says")
        done += count
    return found


def _head(text: bytes, parts_bytes: int) -> tuple[Head, list[int]]:
    try:
        head = msgspec.json.decode(text, type=dict[str, Any])
        sizes = msgspec.convert(head.pop("sizes"), list[int])
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"a frame's head is not understood: {error}") from error
    if any(size < 0 for size in sizes) or sum(sizes) != parts_bytes:
        raise Malformed("a frame's parts are not as long as its head says")
    return head, sizes
