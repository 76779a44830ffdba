"""An HTTP/1.1 server of one App: keep-alive, pipelining, backpressure, time limits.

`parser` makes requests of bytes; an App answers each, at once or by a future; responses are sent in order. A client
that closes its side counts as gone, and its request is cancelled. Why not a ready-made server:
docs/decisions/0004-http-stack.md. Sources: RFC 9110, RFC 9112.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

from trueline.web.header_cache import HeaderCache
from trueline.web.messages import (
    App,
    InlineFuture,
    Request,
    Response,
    StreamedBody,
    date_line,
    path_of,
    render,
    render_plain,
)
from trueline.web.parser import HttpLimits, RequestParser, RequestRejected, UpgradeRequested, Waits, judge

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpServer:
    """The connections of one App; as a callable, the protocol factory of `loop.create_server`."""

    def __init__(self, app: App, limits: HttpLimits, loop: asyncio.AbstractEventLoop) -> None:
        self.app = app
        self.limits = limits
        self.loop = loop
        self.draining = False
        """Whether every response is the last of its connection."""
        self.date = date_line()
        """The Date header line of this second."""
        self._connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def __call__(self) -> Connection:
        return Connection(self)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def admit(self, connection: Connection) -> bool:
        """Counts the connection; False when there are too many, and it has to be refused."""
        self._connections.add(connection)
        self._empty.clear()
        return len(self._connections) <= self.limits.connections

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def sweep(self) -> None:
        """Ends every connection that is over a time limit; to be called about once a second."""
        self.date = date_line()
        now = self.loop.time()
        for connection in tuple(self._connections):
            connection.sweep(now)

    async def drain(self) -> None:
        """Returns when every request that had begun is answered and every connection is closed."""
        self.draining = True
        for connection in tuple(self._connections):
            connection.drain()
        await self._empty.wait()


class Connection(asyncio.Protocol):
    """Requests are answered one after the other, in order."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._app = server.app
        self._loop = server.loop
        self._heads = HeaderCache(server.limits.body_bytes)
        self._waiting: deque[Request | Response] = deque()
        self._parser = RequestParser(server.limits, self._heads, server.loop.time, self._waiting.append)
        self._current: Request | None = None
        self._answering: asyncio.Future[Response] | InlineFuture | None = None
        self._streaming: StreamedBody | None = None
        self._closes = False
        self._transport: asyncio.Transport | None = None
        self._done_reading = False
        self._reading_paused = False
        self._writing_since: float | None = None
        self._lingering_since: float | None = None
        self._idle_since = server.loop.time()

    # transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if not self._server.admit(self):
            self._refuse(503, f"this server has its {self._server.limits.connections} connections; try again later")

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
        parser = self._parser
        if parser.since is None and not parser.silent_bytes:  # between two requests
            request = self._heads.find(data)
            if request is not None and self._current is None and not self._waiting and self._writing_since is None:
                self._current = request
                answer = self._app.answer(request)
                if isinstance(answer, Response):
                    self._finish_plain(answer)
                else:
                    self._await(answer)
                return
            if request is not None:
                self._waiting.append(request)
                self._advance()
                return
        try:
            parser.feed(data)
        except UpgradeRequested:
            self._done_reading = True
            if self._waiting and isinstance(self._waiting[-1], Request):
                self._waiting[-1].keep_alive = False
        except RequestRejected as rejected:
            self._refuse(rejected.status, str(rejected))
        self._advance()

    def eof_received(self) -> None:
        """Returns None, by which asyncio closes the transport: the client counts as gone."""

    def pause_writing(self) -> None:
        self._writing_since = self._loop.time()

    def resume_writing(self) -> None:
        self._writing_since = None
        if self._streaming is not None:
            self._write_pieces()
        self._advance()

    # responses

    def _advance(self) -> None:
        """Answers waiting requests until one has to be awaited or the client reads too slowly."""
        while self._waiting and self._current is None and self._transport and self._writing_since is None:
            item = self._waiting.popleft()
            if isinstance(item, Response):
                self._write(item, None, close=True)
                self._linger()
                return
            self._current = item
            answer = self._app.answer(item)
            if isinstance(answer, Response):
                self._finish(answer)
            else:
                self._await(answer)
        if self._parser.continue_due and self._current is None and self._transport and not self._waiting:
            self._parser.continue_due = False
            self._transport.write(_CONTINUE)
        self._pace_reading()

    def _finish_plain(self, response: Response) -> None:
        """`_finish` for a request with a known head; takes few steps where the response is plain too."""
        if response.pieces is not None or response.close or self._server.draining or self._transport is None:
            self._finish(response)
            return
        self._transport.write(render_plain(response, self._server.date))
        self._current = None
        self._idle_since = self._loop.time()

    def _await(self, answer: asyncio.Future[Response] | InlineFuture) -> None:
        self._answering = answer
        answer.add_done_callback(self._on_answered)

    def _on_answered(self, answer: asyncio.Future[Response] | InlineFuture) -> None:
        self._answering = None
        if self._transport is None or answer.cancelled():
            return
        if self._current is not None and self._current.head is not None:
            self._finish_plain(answer.result())
            if not self._waiting and self._parser.since is None:
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
            self._end_request(close=close)
        elif request.method == "HEAD":
            response.pieces.drop()
            self._end_request(close=close)
        else:
            self._streaming, self._closes = response.pieces, close
            self._streaming.listen(self._on_piece)
            self._write_pieces()

    def _on_piece(self) -> None:
        self._write_pieces()
        self._advance()

    def _write_pieces(self) -> None:
        """Writes pieces and their end, as far as they are there and the client reads them."""
        pieces, request = self._streaming, self._current
        if pieces is None or request is None or self._transport is None or self._writing_since is not None:
            return
        for piece in pieces.take():
            self._transport.write(bytes(piece) if request.http_1_0 else b"%x\r\n%b\r\n" % (len(piece), bytes(piece)))
        if not pieces.over:
            return
        self._streaming = None
        if pieces.torn:
            self._transport.abort()  # without the last chunk: the client sees that the body is incomplete
            return
        if not request.http_1_0:
            self._transport.write(b"0\r\n\r\n")
        self._end_request(close=self._closes or self._server.draining)

    def _end_request(self, *, close: bool) -> None:
        """The current request has been answered."""
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

    def _refuse(self, status: int, message: str) -> None:
        """Queues a refusal behind the waiting requests; nothing more is read."""
        self._done_reading = True
        self._parser.stop()
        self._waiting.append(self._app.refuse(path_of(self._parser.target), status, message))
        self._advance()

    def _linger(self) -> None:
        if self._transport is not None and self._transport.can_write_eof():
            self._lingering_since = self._loop.time()
            self._transport.write_eof()
        elif self._transport is not None:
            self._transport.close()

    # called by the server

    def sweep(self, now: float) -> None:
        """Ends the connection, or its current request, when it is over a time limit."""
        if self._transport is None:
            return
        receiving = None if self._reading_paused or self._current is not None else self._parser.since
        waits = Waits(
            writing=self._writing_since,
            lingering=self._lingering_since,
            receiving=receiving,
            received_bytes=self._parser.num_bytes,
            idle=self._idle_since if self._is_idle() else None,
        )
        verdict = judge(waits, now, self._server.limits)
        if verdict == "abort":
            self._transport.abort()
        elif verdict == "close":
            self._transport.close()
        elif verdict == "refuse":
            self._refuse(408, f"the request did not arrive within {self._server.limits.receive_s:g} s")

    def drain(self) -> None:
        """Closes the connection now when it is idle, else after the next response."""
        if self._is_idle() and self._transport is not None:
            self._transport.close()

    def _is_idle(self) -> bool:
        return self._current is None and not self._waiting and self._parser.since is None
