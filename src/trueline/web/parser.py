"""HTTP/1.1 as it is received: pieces of bytes in, whole requests out, within bounds.

llhttp (httptools) reads; here are what it may take (`Limits`) and the words for what is refused. Knows neither answers
nor transports. Sources: RFC 9110, RFC 9112.
"""

from __future__ import annotations

from collections.abc import Callable

import httptools

from trueline.web.header_cache import HeaderCache
from trueline.web.limits import HttpLimits
from trueline.web.messages import Request


class RequestRejected(Exception):
    """A request that will not be received; nothing after it is read."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class UpgradeRequested(Exception):
    """What follows the last request would be another protocol, and is not read."""


class RequestParser:
    """The requests of one connection, as they arrive. What is public says how far the one under way is."""

    __slots__ = (
        "_body",
        "_chunks",
        "_fresh",
        "_head_bytes",
        "_headers",
        "_heads",
        "_in_body",
        "_limits",
        "_now",
        "_parser",
        "_take",
        "continue_due",
        "num_bytes",
        "silent_bytes",
        "since",
        "target",
    )

    def __init__(
        self, limits: HttpLimits, heads: HeaderCache, now: Callable[[], float], take: Callable[[Request], object]
    ) -> None:
        """`take` gets each whole request; what is remembered of its head goes to `heads`."""
        self._limits = limits
        self._heads = heads
        self._now = now
        self._take = take
        self._parser = httptools.HttpRequestParser(self)
        self._fresh = b""
        self.since: float | None = None
        """When the request under way began; None between two."""
        self.num_bytes = 0
        """Of its body, so far."""
        self.silent_bytes = 0
        """Read since the parser said anything."""
        self.continue_due = False
        """Whether the client waits to be told to go on."""
        self._reset()

    def _reset(self) -> None:
        self.target = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: bytes | bytearray = b""
        self._chunks = 0
        self._head_bytes = 0
        self._in_body = False

    def feed(self, data: bytes) -> None:
        """Reads `data`. Raises Refused, Upgraded; what was whole before that has been taken."""
        self._fresh = data if self.since is None and not self.silent_bytes else b""
        self.silent_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            raise UpgradeRequested from error
        except httptools.HttpParserError as error:
            refused = _rejection_of(error)
            if refused is None:
                raise
            raise refused from error
        if self.silent_bytes > self._limits.head_bytes:
            raise RequestRejected(431, f"a header is over the {self._limits.head_bytes} bytes that this server takes")

    def stop(self) -> None:
        """Nothing more is fed."""
        self.since = None
        self.continue_due = False

    # parser

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
            raise RequestRejected(415, "bodies are read plain or chunked, in no other transfer coding")
        if (length is not None or coding is not None) and self._parser.should_upgrade():
            raise RequestRejected(400, "an Upgrade with a body is not answered here; send plain HTTP/1.1")
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
            self._heads.keep(self._fresh, request)
            self._fresh = b""
        self._take(request)


def _rejection_of(error: httptools.HttpParserError) -> RequestRejected | None:
    """What a parser's error means: a bound that was passed, no HTTP; None: a mistake of ours."""
    if isinstance(error.__context__, RequestRejected):
        return error.__context__
    if isinstance(error, httptools.HttpParserCallbackError):
        return None
    return RequestRejected(400, f"malformed HTTP request: {error}")
