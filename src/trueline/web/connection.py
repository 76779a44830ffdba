"""HTTP/1.1 over one connection: bytes in, requests out, answers back in order.

An `asyncio.Protocol`. It knows keep-alive, pipelining and who waits for whom, and nothing of models: an App answers
each request, at once or by a future; how requests are read is `receiving`'s. Why not a ready-made server:
docs/decisions/0004-http-stack.md. Sources: RFC 9110, RFC 9112.

A client that closes its side is taken to be gone, and what it waits for is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol, cast

from trueline.web.header_cache import HeaderCache
from trueline.web.limits import HttpLimits, Waits, judge
from trueline.web.messages import Answer, App, InlineFuture, Request, Response, path_of, render, render_plain
from trueline.web.parser import RequestParser, RequestRejected, UpgradeRequested
from trueline.web.streaming import StreamedBody

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class ConnectionOwner(Protocol):
    """What a Connection uses of its server."""

    app: App
    limits: HttpLimits
    loop: asyncio.AbstractEventLoop
    header_cache: HeaderCache
    date: bytes
    """The Date header line of this second."""
    draining: bool
    """Whether every response is the last of its connection."""

    def admit(self, connection: Connection) -> bool:
        """Counts the connection in; False when there are too many, and it has to be refused."""
        ...

    def forget(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """One client. Requests are answered one after the other, in the order in which they came."""

    __slots__ = (
        "_answering",
        "_app",
        "_closes",
        "_current",
        "_done_reading",
        "_header_cache",
        "_idle_since",
        "_lingering_since",
        "_loop",
        "_reading_paused",
        "_receiver",
        "_server",
        "_streaming",
        "_transport",
        "_waiting",
        "_writing_since",
    )

    def __init__(self, server: ConnectionOwner) -> None:
        self._server = server
        self._app = server.app
        self._loop = server.loop
        self._header_cache = server.header_cache
        self._waiting: deque[Request | Response] = deque()
        self._receiver = RequestParser(server.limits, server.header_cache, server.loop.time, self._waiting.append)
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
        receiver = self._receiver
        if receiver.since is None and not receiver.silent_bytes:  # between two requests
            request = self._header_cache.find(data)
            if request is not None and self._current is None and not self._waiting and self._writing_since is None:
                self._current = request
                answer = self._app.answer(request)
                if isinstance(answer, Response):
                    self._finish_plain(answer)
                else:
                    self._answering = answer
                    answer.add_done_callback(self._on_answered)
                return
            if request is not None:
                self._waiting.append(request)
                self._advance()
                return
        try:
            receiver.feed(data)
        except UpgradeRequested:
            self._done_reading = True
            if self._waiting and isinstance(self._waiting[-1], Request):
                self._waiting[-1].keep_alive = False
        except RequestRejected as refused:
            self._refuse(refused.status, str(refused))
        self._advance()

    def eof_received(self) -> None:
        """Closes: the client is gone (see the head of this module)."""

    def pause_writing(self) -> None:
        self._writing_since = self._loop.time()

    def resume_writing(self) -> None:
        self._writing_since = None
        if self._streaming is not None:
            self._write_pieces()
        self._advance()

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
        if self._receiver.continue_due and self._current is None and self._transport and not self._waiting:
            self._receiver.continue_due = False
            self._transport.write(_CONTINUE)
        self._pace_reading()

    def _begin(self, request: Request) -> None:
        self._current = request
        self._await_answer(self._app.answer(request))

    def _finish_plain(self, response: Response) -> None:
        """`_finish` for a request whose head is known, in few steps where the answer is as plain as the request."""
        if response.pieces is not None or response.close or self._server.draining or self._transport is None:
            self._finish(response)
            return
        self._transport.write(render_plain(response, self._server.date))
        self._current = None
        self._idle_since = self._loop.time()

    def _await_answer(self, answer: Answer) -> None:
        if isinstance(answer, Response):
            self._finish(answer)
        else:
            self._answering = answer
            answer.add_done_callback(self._on_answered)

    def _on_answered(self, answer: asyncio.Future[Response] | InlineFuture) -> None:
        self._answering = None
        if self._transport is None or answer.cancelled():
            return
        if self._current is not None and self._current.head is not None:
            self._finish_plain(answer.result())
            if not self._waiting and self._receiver.since is None:
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
        self._end_request(close=self._closes or self._server.draining)

    def _end_request(self, *, close: bool) -> None:
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

    def _refuse(self, status: int, message: str) -> None:
        """Queues the refusal behind what is still to be answered; nothing more is read."""
        self._done_reading = True
        self._receiver.stop()
        self._waiting.append(self._app.refuse(path_of(self._receiver.target), status, message))
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
        receiving = None if self._reading_paused or self._current is not None else self._receiver.since
        quiet = self._current is None and not self._waiting and self._receiver.since is None
        waits = Waits(
            writing=self._writing_since,
            lingering=self._lingering_since,
            receiving=receiving,
            received_bytes=self._receiver.num_bytes,
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
        quiet = self._current is None and not self._waiting and self._receiver.since is None
        if quiet and self._transport is not None:
            self._transport.close()
