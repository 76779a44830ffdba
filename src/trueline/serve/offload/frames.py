"""Python values between the server and a process of its own code, with their arrays in shared memory.

A frame is a memfd that holds a pickle of protocol 5 and then its buffers (PEP 574); its descriptor and the sizes travel
in one packet. The receiver maps the buffers instead of copying them. Writing it releases the GIL. A body that is in a
file already is not written again: its own descriptor travels.
"""

import mmap
import os
import pickle
import socket
import struct
from typing import Any

from trueline.web.body import MappedFile, SharedBody

ALIGNMENT = 64
"""Of each buffer: runtimes read arrays from where they are."""
MAX_FILES = 16
"""Descriptors in a frame."""
_MAX_SIZES_BYTES = 64 * 2**10
_SIZE = struct.Struct("=QQ")
"""Of each part: its size, and the file that it fills; 0: it is in the frame's own."""


class Ended(Exception):
    """The other side has ended."""


def send(sock: socket.socket, value: object) -> None:
    """Raises Ended."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(text), *(buffer.raw() for buffer in buffers)]
    memory = os.memfd_create("long", os.MFD_CLOEXEC)
    files, sizes, at = [memory], [], 0
    try:
        for part in parts:
            body: object = part
            while isinstance(body, memoryview):
                body = body.obj
            if isinstance(body, SharedBody) and len(part) == len(body) and len(files) < MAX_FILES:
                sizes.append(_SIZE.pack(len(part), len(files)))
                files.append(body.descriptor)
                continue
            sizes.append(_SIZE.pack(len(part), 0))
            left, to = part, at
            while left:
                written = os.pwrite(memory, left, to)
                left, to = left[written:], to + written
            at += _align(len(part))
        os.ftruncate(memory, max(1, at))
        socket.send_fds(sock, [b"".join(sizes)], files)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Ended from error
    finally:
        os.close(memory)


def receive(sock: socket.socket) -> Any:
    """The next value. Raises Ended, TimeoutError."""
    try:
        packet, descriptors, _, _ = socket.recv_fds(sock, _MAX_SIZES_BYTES, MAX_FILES, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError as error:
        raise Ended from error
    if not packet:
        raise Ended
    try:
        files = [memoryview(MappedFile(one, 0, access=mmap.ACCESS_READ)) for one in descriptors]
    finally:
        for one in descriptors:
            os.close(one)
    parts, at = [], 0
    for size, file in _SIZE.iter_unpack(packet):
        if file:
            parts.append(files[file])
            continue
        parts.append(files[0][at : at + size])
        at += _align(size)
    return pickle.loads(parts[0], buffers=parts[1:])


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
