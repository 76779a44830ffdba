"""How long this machine takes to move bytes, and how much a process has used: _machine.py BYTES moves over loopback.

Buffers of 256 MiB are used again and again, larger than any cache: no system call or page fault of first use counts.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

BUFFER = 256 << 20


def peak_bytes(pid: int) -> int:
    """The most memory that a living process has had resident (VmHWM, proc(5)); 0 if it has ended."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


def copy_s(size: int) -> float:
    """Seconds to copy `size` bytes in memory."""
    source, target = memoryview(os.urandom(1 << 20) * (BUFFER >> 20)), memoryview(bytearray(BUFFER))
    target[:] = source
    began = time.monotonic()
    for start in range(0, size, BUFFER):
        count = min(BUFFER, size - start)
        target[:count] = source[:count]
    return time.monotonic() - began


def disk_s(size: int, folder: Path) -> float:
    """Seconds to write `size` bytes to a new file in `folder` and fsync it."""
    source, path = memoryview(os.urandom(1 << 20) * (BUFFER >> 20)), folder / "written"
    began = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, BUFFER):
            piece = source[: size - start]
            while piece:
                piece = piece[file.write(piece) :]
        os.fsync(file.fileno())
    took_s = time.monotonic() - began
    path.unlink()
    return took_s


def start_move(size: int) -> subprocess.Popen[str]:
    """Starts a copy of `size` bytes from one process to another; prints its seconds."""
    return subprocess.Popen([sys.executable, __file__, str(size)], stdout=subprocess.PIPE, text=True)


def move_s(size: int) -> float:
    """Seconds to copy `size` bytes to another process over one loopback connection."""
    return float(start_move(size).communicate()[0])


def _move(size: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    buffer = memoryview(bytearray(os.urandom(1 << 20) * (BUFFER >> 20)))
    if os.fork() == 0:
        with socket.create_connection(listener.getsockname()) as line:
            line.recv(1)
            for start in range(0, size, BUFFER):
                line.sendall(buffer[: size - start])
        os._exit(0)
    line, _ = listener.accept()
    into = memoryview(bytearray(BUFFER))
    into[:] = buffer  # touches each page
    began, left = time.monotonic(), size
    line.sendall(b".")
    while left:
        left -= line.recv_into(into[: min(left, BUFFER)])
    print(time.monotonic() - began)
    os.wait()


if __name__ == "__main__":
    _move(int(sys.argv[1]))
