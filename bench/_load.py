"""HTTP clients on plain sockets and one epoll: closed loop (next request after each response) or a fixed rate.

Responses are read by their Content-Length. A connection that the server closes while a response is due counts as status
0 and is opened again; one that gets no response until the end counts as status -1.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np

HUNG, LOST = -1, 0
Requests = bytes | Sequence[Sequence[bytes]]
"""The bytes that every connection sends again and again, or those that each connection sends in turn."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one request."""

    at: float
    took_s: float
    status: int


@dataclass(slots=True, eq=False)
class _Client:
    port: int
    requests: Iterator[bytes]
    sock: socket.socket = field(init=False)
    sent: float | None = None
    begun: float = 0.0
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    got: bytearray = field(default_factory=bytearray)

    def connect(self) -> int:
        self.sock = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        return self.sock.fileno()

    def ask(self, now: float, due: float | None = None) -> None:
        self.sent, self.begun = now, now if due is None else due
        self.got.clear()
        self.unsent = memoryview(next(self.requests))
        self.push()

    def push(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                self.unsent = self.unsent[self.sock.send(self.unsent) :]

    def status(self) -> int | None:
        """Of a complete response; None while it is incomplete."""
        head, end, _ = bytes(self.got[:8192]).partition(b"\r\n\r\n")
        if not end:
            return None
        lines = head.lower().split(b"\r\n")
        if any(line.startswith(b"transfer-encoding:") and b"chunked" in line for line in lines):
            return int(head[9:12]) if self.got.endswith(b"\r\n0\r\n\r\n") else None
        length = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")), 0)
        return int(head[9:12]) if len(self.got) >= len(head) + 4 + length else None


class _Crowd:
    def __init__(self, port: int, request: Requests, clients: int) -> None:
        self.poller = select.epoll()
        self.answers: list[Answer] = []
        self.free: deque[_Client] = deque()
        self.by_handle: dict[int, _Client] = {}
        for at in range(clients):
            own = [request] if isinstance(request, bytes) else request[at % len(request)]
            self._add(_Client(port, cycle(own)))

    def _add(self, one: _Client) -> None:
        handle = one.connect()
        self.by_handle[handle] = one
        self.poller.register(handle, select.EPOLLIN)
        self.free.append(one)

    def ask(self, due: float | None = None) -> None:
        one = self.free.popleft()
        try:
            one.ask(time.perf_counter(), due)
        except OSError:
            self._lost(one)
            return
        self._watch(one)

    def _watch(self, one: _Client) -> None:
        self.poller.modify(one.sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if one.unsent else 0))

    def turn(self, timeout_s: float) -> None:
        for handle, event in self.poller.poll(max(0.0, timeout_s)):
            one = self.by_handle[handle]
            try:
                if event & select.EPOLLOUT:
                    one.push()
                    self._watch(one)
                if event & ~select.EPOLLOUT:
                    self._read(one)
            except OSError:
                self._lost(one)

    def _read(self, one: _Client) -> None:
        piece = one.sock.recv(1 << 18)
        if not piece:
            self._lost(one)
            return
        one.got += piece
        status = one.status()
        if status is not None and one.sent is not None:
            self._note(one, status)
            self.free.append(one)

    def _note(self, one: _Client, status: int) -> None:
        now = time.perf_counter()
        self.answers.append(Answer(now, now - one.begun, status))
        one.sent = None

    def _lost(self, one: _Client) -> None:
        if one.sent is not None:
            self._note(one, LOST)
        self.by_handle.pop(one.sock.fileno())
        with contextlib.suppress(OSError):
            self.poller.unregister(one.sock.fileno())
        one.sock.close()
        if one in self.free:
            self.free.remove(one)
        self._add(_Client(one.port, one.requests))

    def finish(self, wait_s: float) -> list[Answer]:
        """Waits for due responses, counts missing ones, closes the connections."""
        until = time.perf_counter() + wait_s
        while any(one.sent is not None for one in self.by_handle.values()) and time.perf_counter() < until:
            self.turn(0.1)
        for one in self.by_handle.values():
            if one.sent is not None:
                self._note(one, HUNG)
            one.sock.close()
        self.poller.close()
        return self.answers


def closed_loop(port: int, request: Requests, *, clients: int, seconds: float, wait_s: float = 10.0) -> list[Answer]:
    """`clients` connections that send the next request after each response."""
    crowd = _Crowd(port, request, clients)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        while crowd.free:
            crowd.ask()
        crowd.turn(0.05)
    return crowd.finish(wait_s)


def paced(
    port: int, request: Requests, *, per_second: float, seconds: float, clients: int, wait_s: float = 10.0
) -> list[Answer]:
    """Requests at a fixed rate, whatever the responses; without a free connection a request waits for one, and its time
    counts from when it was due.
    """
    crowd = _Crowd(port, request, clients)
    began = time.perf_counter()
    num_asked, total = 0, int(per_second * seconds)
    while num_asked < total and time.perf_counter() < began + 2 * seconds:
        due = began + num_asked / per_second
        if crowd.free and due <= time.perf_counter():
            crowd.ask(due)
            num_asked += 1
            if num_asked % 8:
                continue
        crowd.turn(min(0.05, due - time.perf_counter()) if crowd.free else 0.05)
    return crowd.finish(wait_s)


def rate(answers: Sequence[Answer]) -> float:
    """Responses of status 200 per second."""
    good = [one.at for one in answers if one.status == 200]
    return (len(good) - 1) / max(1e-9, good[-1] - good[0]) if len(good) > 1 else 0.0


def quantile_ms(answers: Sequence[Answer], q: float, status: int = 200) -> float:
    """A quantile of the latencies of one status, in milliseconds; NaN without any."""
    took = [one.took_s for one in answers if one.status == status]
    return float(np.quantile(took, q)) * 1e3 if took else float("nan")


def http(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    """The bytes of a request."""
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", *headers, f"content-length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
