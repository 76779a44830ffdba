"""Receives HTTP/1.1: bytes in, whole requests out, within `HttpLimits`.

llhttp (httptools) parses. This module knows neither responses nor transports. Sources: RFC 9110, RFC 9112.
"""

from __future__ import annotations

from collections.abc import Callable

import httptools

from trueline.web.header_cache import HeaderCache
from trueline.web.limits import HttpLimits
from trueline.web.messages import Request


class RequestRejected(Exception):
    """A request that is not received; nothing after it is read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class UpgradeRequested(Exception):
    """The client switches to another protocol after its last request; nothing after it is read."""


class RequestParser:
    """The requests of one connection as they arrive. Public attributes describe the current one."""

    def __init__(
        self, limits: HttpLimits, header_cache: HeaderCache, now: Callable[[], float], take: Callable[[Request], object]
    ) -> None:
        """`take` is called with each whole request."""
        self._limits = limits
        self._header_cache = header_cache
        self._now = now
        self._take = take
        self._parser = httptools.HttpRequestParser(self)
        self._fresh = b""
        self.since: float | None = None
        """When the current request began; None between two."""
        self.num_bytes = 0
        """Of its body, so far."""
        self.silent_bytes = 0
        """Read since the parser's last callback."""
        self.continue_due = False
        """Whether the client waits for 100 Continue."""
        self._reset()

    def _reset(self) -> None:
        self.target = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: bytes | bytearray = b""
        self._chunks = 0
        self._head_bytes = 0
        self._in_body = False

    def feed(self, data: bytes) -> None:
        """Raises RequestRejected, UpgradeRequested, after whole requests before that have been taken."""
        self._fresh = data if self.since is None and not self.silent_bytes else b""
        self.silent_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            raise UpgradeRequested from error
        except httptools.HttpParserError as error:
            rejected = _rejection_of(error)
            if rejected is None:
                raise
            raise rejected from error
        if self.silent_bytes > self._limits.head_bytes:
            raise RequestRejected(431, f"a header is over the {self._limits.head_bytes} bytes that this server takes")

    def stop(self) -> None:
        """Ends the current request; nothing more is fed."""
        self.since = None
        self.continue_due = False

    # httptools' callbacks

    def on_message_begin(self) -> None:
        self._reset()
        self.num_bytes = 0
        self.since = self._now()

    def on_url(self, piece: bytes) -> None:
        self.target += piece
        self._count_head(len(piece))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        if not self._in_body:  # trailers are counted and dropped
            self._headers[name.lower()] = value

    def _count_head(self, size: int) -> None:
        self.silent_bytes = 0
        self._head_bytes += size
        if self._head_bytes > self._limits.head_bytes:
            raise RequestRejected(431, f"headers are over the {self._limits.head_bytes} bytes that this server takes")

    def on_headers_complete(self) -> None:
        self.silent_bytes = 0
        self._in_body = True
        headers = self._headers
        if b"host" not in headers and self._parser.get_http_version() == "1.1":
            raise RequestRejected(400, "HTTP/1.1 requests need a Host header")
        length, coding = headers.get(b"content-length"), headers.get(b"transfer-encoding")
        if length is not None and int(length) > self._limits.body_bytes:
            raise self._too_large(f"{int(length)} bytes")
        if coding is not None and coding.lower() != b"chunked":
            raise RequestRejected(415, "the only transfer coding that is read is chunked")
        if (length is not None or coding is not None) and self._parser.should_upgrade():
            raise RequestRejected(400, "an Upgrade with a body is not supported; send plain HTTP/1.1")
        expect = headers.get(b"expect")
        if expect is not None:
            self._expect(expect)

    def _expect(self, expect: bytes) -> None:
        if expect.lower() != b"100-continue":
            raise RequestRejected(417, "this server meets no expectation but 100-continue")
        self.continue_due = True

    def _too_large(self, size: str) -> RequestRejected:
        return RequestRejected(413, f"the body has {size}, this server takes at most {self._limits.body_bytes}")

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > self._limits.chunks:
            raise RequestRejected(413, f"the body comes in more than {self._limits.chunks} chunks; send larger ones")

    def on_body(self, piece: bytes) -> None:
        self.silent_bytes = 0
        self.num_bytes += len(piece)
        if self.num_bytes > self._limits.body_bytes:
            raise self._too_large(f"more than {self._limits.body_bytes} bytes")
        if not self._body:
            self._body = piece
        else:
            if not isinstance(self._body, bytearray):
                self._body = bytearray(self._body)
            self._body += piece

    def on_message_complete(self) -> None:
        self.silent_bytes = 0
        self.since = None
        self.continue_due = False
        request = Request(
            self._parser.get_method().decode("ascii"),
            self.target,
            self._headers,
            self._body,
            self._parser.should_keep_alive(),
            self._parser.get_http_version() == "1.0",
        )
        self._reset()
        if self._fresh:
            self._header_cache.keep(self._fresh, request)
            self._fresh = b""
        self._take(request)


def _rejection_of(error: httptools.HttpParserError) -> RequestRejected | None:
    """A limit that was passed, or bytes that are no HTTP; None for a defect of this module."""
    if isinstance(error.__context__, RequestRejected):
        return error.__context__
    if isinstance(error, httptools.HttpParserCallbackError):
        return None
    return RequestRejected(400, f"malformed HTTP request: {error}")
