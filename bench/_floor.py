"""The minimal cost of a Python server: it reads as many bytes as a request has, writes as many as its response has, and
does nothing else. A real server's cost above this floor is its own; the floor is the kernel and the event loop.

With a PROGRAM it also runs that once for each request, in bound arrays: it reads only the numbers of the request, and
checks, counts and batches nothing. A run costs more here than in a plain loop, since other code uses the caches between
two runs.

With `--refusing` the program runs continuously in a thread, and every request gets a 429. The runs that this loses are
lost by any server whose refusals wake the computing core. The response's `x-runs` counts the runs.

    python bench/_floor.py REQUEST_BYTES ANSWER_BYTES [PROGRAM [--refusing]]
                                                     prints its port, serves until its standard input ends
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_READ = 256 * 2**10


@contextlib.contextmanager
def floor(
    request_bytes: int, answer_bytes: int, program: Path | None = None, *, refusing: bool = False
) -> Iterator[tuple[int, int]]:
    """The process and the port of such a server; `program`, an ONNX model of one input, is run if given."""
    command = [sys.executable, str(Path(__file__).resolve()), str(request_bytes), str(answer_bytes)]
    command += [] if program is None else [str(program)]
    command += ["--refusing"] if refusing else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.stdin.close()


def as_answer(size: int) -> bytes:
    """A response of about `size` bytes, valid for the clients of these benchmarks."""
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"
    length = max(0, size - len(head % size))
    return head % length + b" " * length


def bound(program: str) -> Callable[[bytes], None]:
    """Runs the model on the numbers at the end of a request: one row, in bound arrays."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(program, options, providers=["CPUExecutionProvider"])
    (given,), (found,) = session.get_inputs(), session.get_outputs()
    arrays = [
        np.zeros([size if isinstance(size, int) else 1 for size in one.shape], np.float32) for one in (given, found)
    ]
    x, y = arrays
    binding, how = session.io_binding(), onnxruntime.RunOptions()
    binding.bind_input(given.name, "cpu", 0, np.float32, x.shape, x.ctypes.data)
    binding.bind_output(found.name, "cpu", 0, np.float32, y.shape, y.ctypes.data)
    view = x.reshape(-1).view(np.uint8).data

    def run(request: bytes) -> None:
        numbers = request[-len(view) :]
        view[: len(numbers)] = numbers
        session.run_with_iobinding(binding, how)

    return run


class Endless(threading.Thread):
    """Runs the program in an endless loop."""

    def __init__(self, run: Callable[[bytes], None]) -> None:
        super().__init__(daemon=True)
        self.program = run
        self.runs = 0

    def run(self) -> None:
        while True:
            self.program(b"")
            self.runs += 1

    def refuse(self, size: int) -> bytes:
        head = b"HTTP/1.1 429 Too Many Requests\r\nx-runs: %d\r\ncontent-length: %d\r\n\r\n" % (self.runs, size)
        return head + b" " * size


def main(request_bytes: int, answer_bytes: int, program: str = "", refusing: str = "") -> None:
    run = bound(program) if program else None
    endless = Endless(run) if run is not None and refusing else None
    if endless is not None:
        endless.start()
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
                os._exit(0)  # the endless thread is inside the runtime, which would end the process with a complaint
            elif data := clients[handle].recv(_READ):
                due[handle] -= len(data)
                if due[handle] <= 0:
                    due[handle] += request_bytes
                    if endless is not None:
                        clients[handle].send(endless.refuse(answer_bytes))
                        continue
                    if run is not None:
                        run(data)
                    clients[handle].send(answer)
            else:
                poller.unregister(handle)
                clients.pop(handle).close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
