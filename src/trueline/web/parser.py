"""Receives HTTP/1.1 within `HttpLimits`: bytes in, whole requests out.

llhttp (httptools) parses. This module knows neither responses nor transports. Sources: RFC 9110, RFC 9112.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import httptools
import msgspec

from trueline.web.body import BodyBuffer
from trueline.web.header_cache import HeaderCache
from trueline.web.messages import Request
from trueline.web.origin import PageRule

_HOST = re.compile(rb"(?:\[[0-9A-Za-z:.%_-]+\]|[0-9A-Za-z._~%!$&'()*+;=-]*)(?::[0-9]*)?")
CHUNKED_BYTES = 8 * 2**10
"""Expected of a body in chunks, which may end at any byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bounds of what one client may send."""

    body_bytes: int = 64 * 2**20
    head_bytes: int = 64 * 2**10
    chunks: int = 64 * 2**10
    """Of one body; each costs more than its bytes."""
    connections: int = 2048
    pipelined: int = 32
    """Requests read ahead on one connection before reading pauses."""
    idle_s: float = 75.0
    """A kept-alive connection without a request is closed after this."""
    spare: int = 64
    """Connections beyond `connections`, for health checks and the like."""
    head_s: float = 10.0
    """A request's head has this long to arrive."""
    receive_s: float = 20.0
    """A request has this long to arrive, plus the time of its bytes at `slowest_bytes_per_s`; and this long from one
    byte to the next."""
    slowest_bytes_per_s: int = 16 * 2**10
    write_s: float = 30.0
    """A client that reads nothing of its response for this long is cut off, and one that reads a long response more
    slowly than `slowest_bytes_per_s`, beyond this time."""
    linger_s: float = 2.0
    """After a refusal in the middle of a request, input is dropped for this long, so that the client reads why."""

    @property
    def buffered_bytes(self) -> int:
        """Of the long bodies of all connections together, half received or waiting."""
        return max(256 * 2**20, 4 * self.body_bytes)


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """Since when a connection has been in each state; None: it is not."""

    writing: float | None = None
    """The client has read nothing of what waits to be written."""
    sending: float | None = None
    """A long response is being written, of which `sent_bytes` were."""
    sent_bytes: int = 0
    lingering: float | None = None
    receiving: float | None = None
    in_head: bool = False
    received_bytes: int = 0
    silent: float | None = None
    """No byte of the request has come."""
    idle: float | None = None


Verdict = Literal["keep", "abort", "close", "refuse"]


def judge(waits: Waits, now: float, limits: HttpLimits) -> Verdict:
    """Whether to keep a connection, close it, abort it, or refuse its half-received request."""
    if waits.writing is not None and now - waits.writing > limits.write_s:
        return "abort"
    if (
        waits.sending is not None
        and now - waits.sending > limits.write_s + waits.sent_bytes / limits.slowest_bytes_per_s
    ):
        return "abort"
    if waits.lingering is not None:
        return "close" if now - waits.lingering > limits.linger_s else "keep"
    if waits.receiving is not None:
        if waits.silent is not None and now - waits.silent > limits.receive_s:
            return "refuse"
        slowest_s = limits.receive_s + waits.received_bytes / limits.slowest_bytes_per_s
        return "refuse" if now - waits.receiving > (limits.head_s if waits.in_head else slowest_s) else "keep"
    if waits.idle is not None and now - waits.idle > limits.idle_s:
        return "close"
    return "keep"


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
        self,
        limits: HttpLimits,
        heads: HeaderCache,
        now: Callable[[], float],
        take: Callable[[Request], object],
        pages: PageRule | None = None,
    ) -> None:
        """`take` is called with each whole request; `heads` notes the head of one that arrived whole.

        `pages`: which web pages may send requests.
        """
        self._pages = pages
        self._limits = limits
        self._heads = heads
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
        self._body = BodyBuffer()
        self._chunks = 0
        self._head_bytes = 0
        self._in_body = False
        self._length = 0

    @property
    def in_head(self) -> bool:
        """Whether the current request's head has not ended."""
        return self.since is not None and not self._in_body

    @property
    def num_buffered(self) -> int:
        """Bytes of the current request's body that are held here."""
        return len(self._body)

    @property
    def num_missing(self) -> int:
        """Bytes of the current request's body that are still to come; an estimate for one that comes in chunks."""
        if not self._in_body or self.since is None:
            return 0
        return CHUNKED_BYTES if self._chunks else self._length - self.num_bytes

    def feed(self, data: bytes, begin: int = 0, end: int | None = None) -> None:
        """Parses `data[begin:end]`; the parts of one `data` are fed one after the other.

        Raises RequestRejected, UpgradeRequested, after whole requests before that have been taken.
        """
        if not begin:
            self._fresh = data if self.since is None and not self.silent_bytes else b""
        piece = data if not begin and end is None else memoryview(data)[begin:end]
        self.silent_bytes += len(piece)
        try:
            self._parser.feed_data(piece)
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
        self._body = BodyBuffer()

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
            name = name.lower()
            if name == b"host" and (name in self._headers or not _HOST.fullmatch(value)):
                raise RequestRejected(400, "a request has one Host header, a name or an address (RFC 9112, 3.2)")
            if name == b"transfer-encoding" and name in self._headers:
                value = self._headers[name] + b", " + value  # several lines are one list
            self._headers[name] = value

    def _count_head(self, size: int) -> None:
        self.silent_bytes = 0
        self._head_bytes += size
        if self._head_bytes > self._limits.head_bytes:
            raise RequestRejected(431, f"headers are over the {self._limits.head_bytes} bytes that this server takes")

    def on_headers_complete(self) -> None:
        self.silent_bytes = 0
        self._in_body = True
        headers, version = self._headers, self._parser.get_http_version()
        if version not in ("1.0", "1.1"):  # HTTP/0.9 has no head: a line of any text is a request
            raise RequestRejected(400, "this server speaks HTTP/1.1 and HTTP/1.0")
        if b"host" not in headers and version == "1.1":
            raise RequestRejected(400, "HTTP/1.1 requests need a Host header")
        if self._pages is not None:
            fault = self._pages.find_fault(self._parser.get_method().decode("ascii"), self.target, headers)
            if fault:
                raise RequestRejected(403, fault)
        length, coding = headers.get(b"content-length"), headers.get(b"transfer-encoding")
        if length is not None and int(length) > self._limits.body_bytes:
            raise self._too_large(f"{int(length)} bytes")
        self._length = 0 if length is None else int(length)
        if coding is not None and coding.lower() != b"chunked":
            raise RequestRejected(415, "the only transfer coding that is read is chunked")
        if (length is not None or coding is not None) and self._parser.should_upgrade():
            raise RequestRejected(400, "an Upgrade with a body is not supported; send plain HTTP/1.1")
        expect = headers.get(b"expect")
        if expect is not None:
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
        try:
            self._body.add(piece)
        except MemoryError as error:
            raise RequestRejected(503, f"{error}; send this one again later") from error

    def on_message_complete(self) -> None:
        self.silent_bytes = 0
        self.since = None
        self.continue_due = False
        try:
            body = self._body.take()
        except MemoryError as error:
            raise RequestRejected(503, f"{error}; send this one again later") from error
        request = Request(
            self._parser.get_method().decode("ascii"),
            self.target,
            self._headers,
            body,
            self._parser.should_keep_alive(),
            self._parser.get_http_version() == "1.0",
        )
        self._reset()
        if self._fresh:
            self._heads.keep(self._fresh, request)
            self._fresh = b""
        self._take(request)


def _rejection_of(error: httptools.HttpParserError) -> RequestRejected | None:
    """A limit that was passed, or bytes that are no HTTP; None for a defect of this module."""
    if isinstance(error.__context__, RequestRejected):
        return error.__context__
    if isinstance(error, httptools.HttpParserCallbackError):
        return None
    return RequestRejected(400, f"malformed HTTP request: {error}")
