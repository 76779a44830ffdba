"""Runs functions on long bodies in processes beside the event loop, which answers others meanwhile.

Threads would not do: most that reads JSON holds the GIL until it has read all of it. One process takes bodies up to
MEDIUM_BYTES, another one longer ones, each one at a time. A process starts with the first body and ends when there was
none for some seconds.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeGuard, TypeVar

from trueline.errors import DeadlineExceeded, NotReady, Overloaded
from trueline.serve.offload import frames
from trueline.serve.offload.child import IDLE_S
from trueline.web.body import Body, SharedBody

LONG_BYTES = 64 * 2**10
"""A longer body of JSON is read beside the loop. Measured: the loop would take a millisecond for each 64 KiB."""
LONG_VALUES = LONG_BYTES // 8
"""More numbers are written as JSON beside the loop."""
MEDIUM_BYTES = 4 * 2**20
MAX_WAITING = 16
"""Bodies that wait for one process."""
TIMEOUT_S = 120.0

T = TypeVar("T")


class Offload:
    """The processes of one server."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lanes = (_Lane("medium"), _Lane("long"))

    def run(self, work: Callable[..., T], *args: object, num_bytes: int) -> asyncio.Future[T]:
        """What `work(*args)` returns, a function of a module; long bytes in `args` get there as a memoryview.

        Raises Overloaded when as many bodies wait. The future raises what `work` raises, NotReady when its process has
        ended, and DeadlineExceeded.
        """
        lane = self._lanes[num_bytes > MEDIUM_BYTES]
        if lane.num_waiting >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} bodies of this size wait to be read", hint="come back later")
        shared = [pickle.PickleBuffer(_owner_of(one)) if _is_long(one) else one for one in args]
        lane.num_waiting += 1
        done: asyncio.Future[T] = self._loop.run_in_executor(lane.thread, lane.exchange, (work, shared))
        done.add_done_callback(lambda _: lane.leave())
        return done

    def close(self) -> None:
        """Ends the processes; waiting work fails."""
        for lane in self._lanes:
            lane.close()


def _is_long(value: object) -> TypeGuard[Body]:
    return isinstance(value, Body) and len(value) > LONG_BYTES // 2


def _owner_of(body: Body) -> bytes | bytearray | SharedBody:
    """A body as the object that owns its memory. A buffer of a memoryview ends the interpreter of CPython 3.11 when the
    garbage collector finds both in a cycle: it clears the view, whose destructor then reads address 0x18."""
    if not isinstance(body, memoryview):
        return body
    owner = body.obj
    return owner if isinstance(owner, SharedBody) and len(owner) == len(body) else bytes(body)


class _Lane:
    """One process, and the thread that waits for it."""

    def __init__(self, name: str) -> None:
        self.num_waiting = 0
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"offload-{name}")
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._used = 0.0
        self._closed = False

    def leave(self) -> None:
        self.num_waiting -= 1

    def exchange(self, job: object) -> Any:
        """In the thread. Raises what the job raises, NotReady, DeadlineExceeded."""
        sock = self._sock
        if sock is None or time.monotonic() - self._used > IDLE_S / 2:
            sock = self._start()
        try:
            frames.send(sock, job)
            returned, value, ends = frames.receive(sock)
        except frames.Ended as error:
            self.stop()
            raise NotReady(
                "the process that reads long bodies has ended, perhaps for want of memory", hint="send a smaller body"
            ) from error
        except TimeoutError as error:
            self.stop()
            raise DeadlineExceeded(
                f"reading the body took more than {TIMEOUT_S:g} s", hint="send it in parts"
            ) from error
        self._used = time.monotonic()
        if ends:
            self.stop()
        if returned:
            return value
        try:
            raise value
        finally:
            del value, job  # the traceback holds this frame: the body would stay until the garbage collector comes

    def _start(self) -> socket.socket:
        self.stop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-m", "trueline.serve.offload.child", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], start_new_session=True
            )
        ours.settimeout(TIMEOUT_S)
        self._sock = ours
        if self._closed:
            self._process.kill()
        return ours

    def stop(self) -> None:
        """Ends the process."""
        sock, process, self._sock, self._process = self._sock, self._process, None, None
        if sock is not None:
            sock.close()
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Ends the process and the thread; the work that it does fails."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        self.thread.shutdown(cancel_futures=True)
        self.stop()
