"""Python values between the server and a process of its own code, with their arrays in shared memory.

A frame is a memfd that holds a pickle of protocol 5 and then its buffers (PEP 574); its descriptor and the sizes travel
in one packet. The receiver maps the buffers instead of copying them. Writing it releases the GIL.
"""

import array
import mmap
import os
import pickle
import socket
import struct
from typing import Any

ALIGNMENT = 64
"""Of each buffer: runtimes read arrays from where they are."""
_MAX_SIZES_BYTES = 64 * 2**10


class Ended(Exception):
    """The other side has ended."""


def send(sock: socket.socket, value: object) -> None:
    """Raises Ended."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(text), *(buffer.raw() for buffer in buffers)]
    memory = os.memfd_create("long", os.MFD_CLOEXEC)
    try:
        at = 0
        for part in parts:
            left, to = part, at
            while left:
                written = os.pwrite(memory, left, to)
                left, to = left[written:], to + written
            at += _align(len(part))
        os.ftruncate(memory, max(1, at))
        socket.send_fds(sock, [array.array("Q", [len(part) for part in parts]).tobytes()], [memory])
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Ended from error
    finally:
        os.close(memory)


def receive(sock: socket.socket) -> Any:
    """The next value. Raises Ended, TimeoutError."""
    try:
        packet, descriptors, _, _ = socket.recv_fds(sock, _MAX_SIZES_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError as error:
        raise Ended from error
    if not packet:
        raise Ended
    memory = descriptors[0]
    try:
        mapped = memoryview(mmap.mmap(memory, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(memory)
    parts, at = [], 0
    for (size,) in struct.iter_unpack("Q", packet):
        parts.append(mapped[at : at + size])
        at += _align(size)
    return pickle.loads(parts[0], buffers=parts[1:])


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
