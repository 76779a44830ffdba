"""One HTTP/1.1 connection: parses what it reads, answers in order, and leaves other connections their turn."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

from trueline.web.admission import Shared, explain_full
from trueline.web.header_cache import HeaderCache
from trueline.web.messages import (
    InlineFuture,
    Request,
    Response,
    StreamedBody,
    path_of,
    render,
    render_head,
    render_plain,
)
from trueline.web.parser import RequestParser, RequestRejected, UpgradeRequested, Waits, judge
from trueline.web.response_encoding import coding_for, encode

PIECE_BYTES = 2 * 2**10
"""Parsed at a time, where it may hold whole requests: one read holds thousands of small ones. 8 KiB took 2 ms."""
IN_A_TURN = 8
"""Requests of one connection that are answered before others have their turn."""
LONG_BYTES = 64 * 2**10
"""A longer body counts towards `HttpLimits.buffered_bytes`, and is written without being copied behind its head."""
AHEAD_BYTES = 2**20
"""Of bodies read on one connection while another request of it is answered."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(asyncio.Protocol):
    """Requests are answered one after the other, in order."""

    def __init__(self, server: Shared[Connection]) -> None:
        self._server = server
        self._app = server.app
        self._loop = server.loop
        self._heads = HeaderCache(server.limits.body_bytes)
        self._waiting: deque[Request | Response] = deque()
        self._parser = RequestParser(server.limits, self._heads, server.loop.time, self._waiting.append, server.pages)
        self.client = ""  # its address
        self._heard = 0.0  # when the last bytes of a request came that was not whole
        self._unfed = b""  # read and not yet parsed: other connections have their turn first
        self._resuming = False
        self._held = 0  # bytes of its bodies as counted in the server's
        self._current: Request | None = None
        self._answering: asyncio.Future[Response] | InlineFuture | None = None
        self._streaming: StreamedBody | None = None
        self._closes = False
        self._unsent_body = memoryview(b"")
        self._sending_since: float | None = None  # a long response
        self._sent_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._done_reading = False
        self._reading_paused = False
        self._writing_since: float | None = None
        self._lingering_since: float | None = None
        self._idle_since = server.loop.time()

    # transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.client = str(peer[0]) if peer else ""
        admission = self._server.admit(self)
        if admission == "vital":
            self._app = self._server.vital
        elif admission == "none":
            self.refuse(503, explain_full(self._server.limits))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._waiting.clear()
        self._unfed = b""
        if self._held:
            self._server.buffered -= self._held
            self._held = 0
        if self._answering is not None:
            self._answering.cancel()
        if self._streaming is not None:
            self._streaming.drop()
        self._server.forget(self)

    def data_received(self, data: bytes) -> None:
        if self._done_reading:
            return
        parser = self._parser
        if parser.since is None and not parser.silent_bytes and not self._unfed:  # between two requests
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
                if self._held or len(data) > LONG_BYTES:
                    self._count_held()
                self._advance()
                return
        self._heard = self._loop.time()
        if self._unfed:
            self._unfed += data
        else:
            self._feed(data)
            self._advance()
            if parser.num_buffered > LONG_BYTES and not self._reading_paused and self._transport is not None:
                self._transport.pause_reading()  # else the loop would read 32 times before others have their turn
                self._reading_paused = True
                self._resume_later()

    def _feed(self, data: bytes) -> None:
        """Parses `data` until enough requests wait; the rest has to wait too."""
        parser, size, at = self._parser, len(data), 0
        while at < size and not self._done_reading:
            if self._is_crowded():
                self._unfed = data[at:]
                return
            end = at + max(PIECE_BYTES, min(parser.num_missing, LONG_BYTES))
            try:
                parser.feed(data, at, None if end >= size else end)
            except UpgradeRequested:
                self._done_reading = True
                if self._waiting and isinstance(self._waiting[-1], Request):
                    self._waiting[-1].keep_alive = False
            except RequestRejected as rejected:
                self._queue_refusal(rejected.status, str(rejected))
            at = end
            if self._held or parser.num_bytes > LONG_BYTES:
                self._count_held()

    def _count_held(self) -> None:
        """Counts the bytes of bodies and answers that are held; refuses a request if the server holds too many."""
        waiting = sum(len(item.body) for item in self._waiting) + len(self._unsent_body) + self._parser.num_buffered
        now = waiting + (0 if self._current is None else len(self._current.body))
        grown, self._held = now - self._held, now
        self._server.buffered += grown
        limit = self._server.limits.buffered_bytes
        if grown <= 0 or self._server.buffered <= limit or self._server.find_room(self) or self.stalls_since is None:
            return
        self._queue_refusal(503, f"the server holds {limit} bytes of requests; send this one again later")

    def eof_received(self) -> None:
        """Returns None, by which asyncio closes the transport: the client counts as gone."""

    def pause_writing(self) -> None:
        self._writing_since = self._loop.time()

    def resume_writing(self) -> None:
        self._writing_since = None
        self._write_pieces()
        self._write_on()
        self._resume()

    # responses

    def _advance(self) -> None:
        """Answers waiting requests until one has to be awaited, the client reads too slowly, or it is others' turn."""
        left = IN_A_TURN
        while self._waiting and self._current is None and self._transport and self._writing_since is None:
            if not left:
                self._resume_later()
                break
            left -= 1
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
        if self._unfed and not self._is_crowded():
            self._resume_later()
        self._pace_reading()

    def _resume_later(self) -> None:
        if not self._resuming:
            self._resuming = True
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        self._resuming = False
        if self._unfed and not self._is_crowded():
            data, self._unfed = self._unfed, b""
            self._feed(data)
        self._advance()

    def _finish_plain(self, response: Response) -> None:
        """`_finish` for a request with a known head; takes few steps where the response is plain too."""
        special = response.pieces is not None or response.close or self._server.draining or self._transport is None
        if special or self._held or len(response.body) > LONG_BYTES:
            self._finish(response)
            return
        assert self._transport is not None
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
        coding = coding_for(request, response) if len(response.body) > LONG_BYTES else None
        if coding is not None:
            self._await(self._loop.run_in_executor(None, encode, response, coding))
            return
        streamed = response.pieces is not None
        close = response.close or not request.keep_alive or self._server.draining or (streamed and request.http_1_0)
        self._write(response, request, close=close)
        if self._unsent_body:
            self._write_on()
        elif response.pieces is None:
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
        self._current = self._sending_since = None
        self._idle_since = self._loop.time()
        if self._held:
            self._count_held()
        if close and self._transport is not None:
            self._done_reading = True
            self._waiting.clear()
            self._unfed = b""
            self._transport.close()

    def _write(self, response: Response, request: Request | None, *, close: bool) -> None:
        if self._transport is None:
            return
        if len(response.body) <= LONG_BYTES or request is None or request.method == "HEAD":
            self._transport.write(render(response, request, date=self._server.date, close=close))
            return
        self._transport.write(render_head(response, request, date=self._server.date, close=close))
        self._unsent_body, self._closes = memoryview(response.body), close
        self._sending_since, self._sent_bytes = self._loop.time(), 0
        self._count_held()

    def _write_on(self) -> None:
        """Writes the next part of a long body; others have their turn between two."""
        if not self._unsent_body or self._transport is None or self._writing_since is not None:
            return
        self._transport.write(self._unsent_body[: 4 * LONG_BYTES])
        self._unsent_body = self._unsent_body[4 * LONG_BYTES :]
        self._sent_bytes += 4 * LONG_BYTES
        if self._unsent_body:
            self._loop.call_soon(self._write_on)
            return
        self._end_request(close=self._closes)
        self._advance()

    def _is_crowded(self) -> bool:
        """Whether nothing more is to be read for now."""
        if len(self._waiting) >= self._server.limits.pipelined or self._writing_since is not None:
            return True
        return self._held > AHEAD_BYTES and (self._current is not None or bool(self._waiting))

    def _pace_reading(self) -> None:
        crowded = bool(self._unfed) or self._is_crowded()
        if crowded == self._reading_paused or self._transport is None or self._transport.is_closing():
            return
        if crowded:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
        self._reading_paused = crowded

    # refusals

    def refuse(self, status: int, message: str) -> None:
        """Refuses the request that is being received; nothing more is read."""
        self._queue_refusal(status, message)
        self._advance()

    def _queue_refusal(self, status: int, message: str) -> None:
        """Behind the waiting requests."""
        self._done_reading = True
        self._unfed = b""
        self._parser.stop()
        self._waiting.append(self._app.refuse(path_of(self._parser.target), status, message))
        if self._held:
            self._count_held()

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
            sending=self._sending_since,
            sent_bytes=self._sent_bytes,
            lingering=self._lingering_since,
            receiving=receiving,
            in_head=self._parser.in_head,
            silent=self._heard,
            received_bytes=self._parser.num_bytes,
            idle=self._idle_since if self._is_idle() else None,
        )
        verdict = judge(waits, now, self._server.limits)
        if verdict == "abort":
            self._transport.abort()
        elif verdict == "close":
            self._transport.close()
        elif verdict == "refuse":
            limits = self._server.limits
            allowed_s = limits.head_s if self._parser.in_head else limits.receive_s
            self.refuse(408, f"the request did not arrive within {allowed_s:g} s")

    def close(self) -> None:
        """Closes the connection, which has no whole request."""
        self._done_reading = True
        if self._transport is not None:
            self._transport.close()

    @property
    def spare_since(self) -> float | None:
        """Since when the connection has no whole request; None while it has, or receives a body."""
        if self._current is not None or self._waiting or self._transport is None or self._transport.is_closing():
            return None
        return self._parser.since or self._idle_since if self._parser.since is None or self._parser.in_head else None

    @property
    def stalls_since(self) -> float | None:
        """When the last bytes came, if it holds the beginning of a long body."""
        return self._heard if self._parser.num_buffered > LONG_BYTES else None

    def drain(self) -> None:
        """Closes the connection now when it is idle, else after the next response."""
        if self._is_idle() and self._transport is not None:
            self._transport.close()

    def _is_idle(self) -> bool:
        return self._current is None and not self._waiting and self._parser.since is None and not self._unfed
