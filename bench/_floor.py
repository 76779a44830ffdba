"""The least that a Python server can cost: it reads as many bytes as a request has, writes as many as its answer has,
and does nothing else. What a server spends beyond it is its own; what it spends up to it are the kernel and the loop.

    python bench/_floor.py REQUEST_BYTES ANSWER_BYTES      prints its port, serves until its standard input ends
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_READ = 256 * 2**10


@contextlib.contextmanager
def floor(request_bytes: int, answer_bytes: int) -> Iterator[tuple[int, int]]:
    """The process and the port of such a server."""
    command = [sys.executable, str(Path(__file__).resolve()), str(request_bytes), str(answer_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.stdin.close()


def as_answer(size: int) -> bytes:
    """An answer of about `size` bytes, as far as a client of these benchmarks reads it."""
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"
    length = max(0, size - len(head % size))
    return head % length + b" " * length


def main(request_bytes: int, answer_bytes: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    print(listener.getsockname()[1], flush=True)
    poller, answer = select.epoll(), as_answer(answer_bytes)
    poller.register(listener.fileno(), select.EPOLLIN)
    poller.register(sys.stdin.fileno(), select.EPOLLHUP)
    clients: dict[int, socket.socket] = {}
    due: dict[int, int] = {}
    while True:
        for handle, _ in poller.poll():
            if handle == listener.fileno():
                made, _ = listener.accept()
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                clients[made.fileno()], due[made.fileno()] = made, request_bytes
                poller.register(made.fileno(), select.EPOLLIN)
            elif handle == sys.stdin.fileno():
                return
            elif data := clients[handle].recv(_READ):
                due[handle] -= len(data)
                if due[handle] <= 0:
                    due[handle] += request_bytes
                    clients[handle].send(answer)
            else:
                poller.unregister(handle)
                clients.pop(handle).close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
