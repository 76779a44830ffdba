"""HTTP/1.1 over one connection: bytes in, requests out, answers back in order.

An `asyncio.Protocol` on httptools (llhttp). It knows framing, limits, keep-alive and pipelining, and nothing of models:
an App answers each request, at once or by a future. Why not a ready-made server: docs/decisions/0004-http-stack.md.
Sources: RFC 9110, RFC 9112.

A client that closes its side is taken to be gone, and what it waits for is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

import httptools

from trueline.serve.heads import Heads
from trueline.serve.http import Answer, App, Later, Request, Response, date_line, path_of, plain, render
from trueline.serve.limits import Limits, Waits, judge
from trueline.serve.pieces import Pieces

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class _Refused(Exception):
    """Stops the parser in the middle of a request that will not be received."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Connection(asyncio.Protocol):
    """One client. Requests are answered one after the other, in the order in which they came."""

    __slots__ = (
        "_answering",
        "_app",
        "_body",
        "_chunks",
        "_closes",
        "_continue_due",
        "_current",
        "_done_reading",
        "_fresh",
        "_head_bytes",
        "_headers",
        "_heads",
        "_idle_since",
        "_in_body",
        "_lingering_since",
        "_loop",
        "_parser",
        "_reading_paused",
        "_received_bytes",
        "_receiving_since",
        "_server",
        "_silent_bytes",
        "_streaming",
        "_target",
        "_transport",
        "_waiting",
        "_writing_since",
    )

    def __init__(self, server: Server) -> None:
        self._server = server
        self._app = server.app
        self._loop = server.loop
        self._heads = server.heads
        self._fresh = b""
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request | Response] = deque()
        self._current: Request | None = None
        self._answering: asyncio.Future[Response] | Later | None = None
        self._streaming: Pieces | None = None
        self._closes = False
        self._transport: asyncio.Transport | None = None
        self._done_reading = False
        self._reading_paused = False
        self._continue_due = False
        self._silent_bytes = 0
        self._received_bytes = 0
        self._receiving_since: float | None = None
        self._writing_since: float | None = None
        self._lingering_since: float | None = None
        self._idle_since = server.loop.time()
        self._reset()

    def _reset(self) -> None:
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: bytes | bytearray = b""
        self._chunks = 0
        self._head_bytes = 0
        self._in_body = False

    # transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if not self._server.admit(self):
            self._refuse(503, f"this server has its {self._server.limits.connections} connections; come back later")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._waiting.clear()
        if self._answering is not None:
            self._answering.cancel()
        if self._streaming is not None:
            self._streaming.drop()
        self._server.forget(self)

    def data_received(self, data: bytes) -> None:
        if self._done_reading:
            return
        self._fresh = b""
        if self._receiving_since is None and not self._silent_bytes:  # between two requests
            request = self._heads.find(data)
            if request is not None and self._current is None and not self._waiting and self._writing_since is None:
                self._current = request
                answer = self._app.answer(request)
                if isinstance(answer, Response):
                    self._finish_plain(answer)
                else:
                    self._answering = answer
                    answer.add_done_callback(self._answered)
                return
            if request is not None:
                self._waiting.append(request)
                self._advance()
                return
            self._fresh = data
        self._silent_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._done_reading = True
            if self._waiting and isinstance(self._waiting[-1], Request):
                self._waiting[-1].keep_alive = False
        except httptools.HttpParserError as error:
            self._refuse_for(error)
        if self._silent_bytes > self._server.limits.head_bytes and not self._done_reading:
            self._refuse(431, f"a header is over the {self._server.limits.head_bytes} bytes that this server takes")
        self._advance()

    def eof_received(self) -> None:
        """Closes: the client is gone (see the head of this module)."""

    def pause_writing(self) -> None:
        self._writing_since = self._loop.time()

    def resume_writing(self) -> None:
        self._writing_since = None
        if self._streaming is not None:
            self._flow()
        self._advance()

    # parser

    def on_message_begin(self) -> None:
        self._reset()
        self._received_bytes = 0
        self._receiving_since = self._loop.time()

    def on_url(self, piece: bytes) -> None:
        self._target += piece
        self._count_head(len(piece))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        if not self._in_body:  # trailers are counted and dropped
            self._headers[name.lower()] = value

    def _count_head(self, size: int) -> None:
        self._silent_bytes = 0
        self._head_bytes += size
        if self._head_bytes > self._server.limits.head_bytes:
            raise _Refused(431, f"headers are over the {self._server.limits.head_bytes} bytes that this server takes")

    def on_headers_complete(self) -> None:
        self._silent_bytes = 0
        self._in_body = True
        headers = self._headers
        if b"host" not in headers and self._parser.get_http_version() == "1.1":
            raise _Refused(400, "HTTP/1.1 requests need a Host header")
        length, coding = headers.get(b"content-length"), headers.get(b"transfer-encoding")
        if length is not None and int(length) > self._server.limits.body_bytes:
            raise self._too_large(f"{int(length)} bytes")
        if coding is not None and coding.lower() != b"chunked":
            raise _Refused(415, "bodies are read plain or chunked, in no other transfer coding")
        if (length is not None or coding is not None) and self._parser.should_upgrade():
            raise _Refused(400, "an Upgrade with a body is not answered here; send plain HTTP/1.1")
        expect = headers.get(b"expect")
        if expect is not None:
            self._expect(expect)

    def _expect(self, expect: bytes) -> None:
        if expect.lower() != b"100-continue":
            raise _Refused(417, "this server meets no expectation but 100-continue")
        self._continue_due = True

    def _too_large(self, size: str) -> _Refused:
        return _Refused(413, f"the body has {size}, this server takes at most {self._server.limits.body_bytes}")

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > self._server.limits.chunks:
            raise _Refused(413, f"the body comes in more than {self._server.limits.chunks} chunks; send larger ones")

    def on_body(self, piece: bytes) -> None:
        self._silent_bytes = 0
        self._received_bytes += len(piece)
        if self._received_bytes > self._server.limits.body_bytes:
            raise self._too_large(f"more than {self._server.limits.body_bytes} bytes")
        if not self._body:
            self._body = piece
        else:
            if not isinstance(self._body, bytearray):
                self._body = bytearray(self._body)
            self._body += piece

    def on_message_complete(self) -> None:
        self._silent_bytes = 0
        self._receiving_since = None
        self._continue_due = False
        request = Request(
            self._parser.get_method().decode("ascii"),
            self._target,
            self._headers,
            self._body,
            self._parser.should_keep_alive(),
            self._parser.get_http_version() == "1.0",
        )
        self._reset()
        if self._fresh:
            self._heads.keep(self._fresh, request)
            self._fresh = b""
        self._waiting.append(request)

    # answers

    def _advance(self) -> None:
        """Answers what waits, until one takes its time or the client reads too slowly."""
        while self._waiting and self._current is None and self._transport and self._writing_since is None:
            item = self._waiting.popleft()
            if isinstance(item, Response):
                self._write(item, None, close=True)
                self._linger()
                return
            self._begin(item)
        if self._continue_due and self._current is None and self._transport and not self._waiting:
            self._continue_due = False
            self._transport.write(_CONTINUE)
        self._pace_reading()

    def _begin(self, request: Request) -> None:
        self._current = request
        self._take(self._app.answer(request))

    def _finish_plain(self, response: Response) -> None:
        """`_finish` for a request whose head is known, in few steps where the answer is as plain as the request."""
        if response.pieces is not None or response.close or self._server.draining or self._transport is None:
            self._finish(response)
            return
        self._transport.write(plain(response, self._server.date))
        self._current = None
        self._idle_since = self._loop.time()

    def _take(self, answer: Answer) -> None:
        if isinstance(answer, Response):
            self._finish(answer)
        else:
            self._answering = answer
            answer.add_done_callback(self._answered)

    def _answered(self, answer: asyncio.Future[Response] | Later) -> None:
        self._answering = None
        if self._transport is None or answer.cancelled():
            return
        if self._current is not None and self._current.head is not None:
            self._finish_plain(answer.result())
            if not self._waiting and self._receiving_since is None:
                return
        else:
            self._finish(answer.result())
        self._advance()

    def _finish(self, response: Response) -> None:
        request = self._current
        assert request is not None
        streamed = response.pieces is not None
        close = response.close or not request.keep_alive or self._server.draining or (streamed and request.http_1_0)
        self._write(response, request, close=close)
        if response.pieces is None:
            self._done(close=close)
        elif request.method == "HEAD":
            response.pieces.drop()
            self._done(close=close)
        else:
            self._streaming, self._closes = response.pieces, close
            self._streaming.listen(self._flowed)
            self._flow()

    def _flowed(self) -> None:
        self._flow()
        self._advance()

    def _flow(self) -> None:
        """Writes the pieces that are there, and their end; while the client reads slowly they wait."""
        pieces, request = self._streaming, self._current
        if pieces is None or request is None or self._transport is None or self._writing_since is not None:
            return
        for piece in pieces.take():
            self._transport.write(bytes(piece) if request.http_1_0 else b"%x\r\n%b\r\n" % (len(piece), bytes(piece)))
        if not pieces.over:
            return
        self._streaming = None
        if pieces.torn:
            self._transport.abort()  # the last chunk stays away: a client sees that this is not all
            return
        if not request.http_1_0:
            self._transport.write(b"0\r\n\r\n")
        self._done(close=self._closes or self._server.draining)

    def _done(self, *, close: bool) -> None:
        """The current request is answered."""
        self._current = None
        self._idle_since = self._loop.time()
        if close and self._transport is not None:
            self._done_reading = True
            self._waiting.clear()
            self._transport.close()

    def _write(self, response: Response, request: Request | None, *, close: bool) -> None:
        if self._transport is not None:
            self._transport.write(render(response, request, date=self._server.date, close=close))

    def _pace_reading(self) -> None:
        crowded = len(self._waiting) >= self._server.limits.pipelined or self._writing_since is not None
        if crowded == self._reading_paused or self._transport is None or self._transport.is_closing():
            return
        if crowded:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
        self._reading_paused = crowded

    # refusals

    def _refuse_for(self, error: Exception) -> None:
        cause = error.__context__
        if isinstance(cause, _Refused):
            self._refuse(cause.status, str(cause))
        elif isinstance(error, httptools.HttpParserCallbackError):
            raise error
        else:
            self._refuse(400, f"malformed HTTP request: {error}")

    def _refuse(self, status: int, message: str) -> None:
        """Queues the refusal behind what is still to be answered; nothing more is read."""
        self._done_reading = True
        self._continue_due = False
        self._receiving_since = None
        self._waiting.append(self._app.refuse(path_of(self._target), status, message))
        self._advance()

    def _linger(self) -> None:
        if self._transport is not None and self._transport.can_write_eof():
            self._lingering_since = self._loop.time()
            self._transport.write_eof()
        elif self._transport is not None:
            self._transport.close()

    # from the server

    def sweep(self, now: float) -> None:
        """Ends what has taken too long by `now`."""
        if self._transport is None:
            return
        receiving = None if self._reading_paused or self._current is not None else self._receiving_since
        quiet = self._current is None and not self._waiting and self._receiving_since is None
        waits = Waits(
            writing=self._writing_since,
            lingering=self._lingering_since,
            receiving=receiving,
            received_bytes=self._received_bytes,
            idle=self._idle_since if quiet else None,
        )
        verdict = judge(waits, now, self._server.limits)
        if verdict == "abort":
            self._transport.abort()
        elif verdict == "close":
            self._transport.close()
        elif verdict == "refuse":
            self._refuse(408, f"the request did not arrive within {self._server.limits.receive_s:g} s")

    def drain(self) -> None:
        """Closes now when nothing is under way; else the next answer is the last."""
        quiet = self._current is None and not self._waiting and self._receiving_since is None
        if quiet and self._transport is not None:
            self._transport.close()


class Server:
    """All connections of one App: their bounds, their sweeping, their end."""

    def __init__(self, app: App, limits: Limits, loop: asyncio.AbstractEventLoop) -> None:
        self.app = app
        self.limits = limits
        self.loop = loop
        self.draining = False
        self.heads = Heads()
        self.date = date_line()
        self._connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def __call__(self) -> Connection:
        """A protocol factory for `loop.create_server`."""
        return Connection(self)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def admit(self, connection: Connection) -> bool:
        """Counts the connection in; False when there are too many, and it is then to be refused."""
        self._connections.add(connection)
        self._empty.clear()
        return len(self._connections) <= self.limits.connections

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def sweep(self) -> None:
        """Ends every connection that has taken too long; call it about once a second."""
        self.date = date_line()
        now = self.loop.time()
        for connection in tuple(self._connections):
            connection.sweep(now)

    async def drain(self) -> None:
        """Returns when every request that had begun is answered and every connection closed."""
        self.draining = True
        for connection in tuple(self._connections):
            connection.drain()
        await self._empty.wait()
