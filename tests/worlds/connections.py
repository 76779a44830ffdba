"""An HTTP connection that is driven byte by byte, against a transport and a clock that the test holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from trueline.web.connection import Connection
from trueline.web.header_cache import HeaderCache
from trueline.web.messages import InlineFuture, Request, Response
from trueline.web.origin import PageRule
from trueline.web.parser import HttpLimits, RequestParser
from trueline.web.server import HttpServer

LIMITS = HttpLimits(chunks=50, body_bytes=1000, head_bytes=400, pipelined=4)


@dataclass
class Clock:
    now: float = 100.0

    due: list[Callable[[], object]] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def call_soon(self, call: Callable[..., object], *args: object) -> None:
        self.due.append(partial(call, *args))

    def create_future(self) -> InlineFuture:
        return InlineFuture()

    def turn(self) -> bool:
        """Runs what is due in the loop's next turn; False when nothing is."""
        due, self.due = self.due, []
        for call in due:
            call()
        return bool(due)


@dataclass
class Wire:
    """A transport that records what is written."""

    written: bytes = b""
    closed: bool = False
    aborted: bool = False
    eof: bool = False
    reading: bool = True
    client: str = "10.0.0.1"

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def answers(self) -> int:
        return self.written.count(b"HTTP/1.1 ")

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return (self.client, 1) if name == "peername" else None

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


@dataclass
class Echo:
    """Responds with method, path and body; requests to /later wait for the test."""

    seen: list[Request] = field(default_factory=list)
    later: list[asyncio.Future[Response]] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop | None = None

    def answer(self, request: Request) -> Response | asyncio.Future[Response]:
        self.seen.append(request)
        if request.path.startswith("/later"):
            assert self.loop is not None
            self.later.append(self.loop.create_future())
            return self.later[-1]
        return Response(200, f"{request.method} {request.path} ".encode() + bytes(request.body))

    def refuse(self, path: str, status: int, message: str) -> Response:
        return Response(status, message.encode())


@dataclass
class World:
    app: Echo
    clock: Clock
    server: HttpServer
    wire: Wire
    connection: Connection

    def send(self, data: bytes) -> bytes:
        """The response to `data`."""
        before = len(self.wire.written)
        self.connection.data_received(data)
        while self.clock.turn():
            pass
        return self.wire.written[before:]


def world(
    limits: HttpLimits = LIMITS,
    loop: asyncio.AbstractEventLoop | None = None,
    heads: HeaderCache | None = None,
    pages: PageRule | None = None,
) -> World:
    app, clock, wire = Echo(loop=loop), Clock(), Wire()
    server = HttpServer(app, limits, clock, pages=pages)  # type: ignore[arg-type]
    connection = server()
    if heads is not None:
        connection._heads = connection._parser._heads = heads
    connection.connection_made(wire)  # type: ignore[arg-type]
    return World(app, clock, server, wire, connection)


def known(whole: bytes) -> Request:
    """The request `whole`, as a connection makes it that has seen its head before."""
    heads = HeaderCache(HttpLimits().body_bytes)
    RequestParser(HttpLimits(), heads, lambda: 0.0, lambda _: None).feed(whole)
    found = heads.find(whole)
    assert found is not None
    return found


def get(path: str = "/a", *headers: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/{version}", "host: t", *headers, "", ""]).encode()


def post(body: bytes, *headers: str, path: str = "/a") -> bytes:
    head = [f"POST {path} HTTP/1.1", "host: t", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(head).encode() + body
