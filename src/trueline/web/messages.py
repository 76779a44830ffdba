"""A request, an answer, and who turns one into the other. Pure; the bytes on the wire are RFC 9112's."""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable
from email.utils import formatdate
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote

import msgspec

from trueline.errors import RequestError
from trueline.web.streaming import StreamedBody

MAX_PARAMETERS = 64
JSON = b"application/json"
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: ".encode() for status in http.HTTPStatus
}


def _start(response: Response) -> bytes:
    """Status line and content type of an answer whose status is its own invention, or that names no content type."""
    line = _STATUS_LINES.get(response.status, b"HTTP/1.1 %d \r\ncontent-type: " % response.status)
    return line + response.content_type if response.content_type else line.removesuffix(b"\r\ncontent-type: ")


class RequestHead(msgspec.Struct, eq=False):
    """What is the same in all requests that begin with the same bytes (see `heads`)."""

    method: str
    target: bytes
    path: str
    headers: dict[bytes, bytes]
    """Of every request that begins so: not to be changed."""
    length: int
    """Bytes of the body."""
    asks: object = None
    """What the App makes of the head alone, for the requests to come: its own, and nobody else's."""


class Request(msgspec.Struct, eq=False):
    """One whole request. Header names are lower-case; the headers may be shared with further requests, and are not to
    be changed.
    """

    method: str
    target: bytes
    headers: dict[bytes, bytes]
    body: bytes | bytearray
    keep_alive: bool = True
    http_1_0: bool = False
    head: RequestHead | None = None
    """Where it is known; who changes headers or body takes it away. Such a request is plain: GET or POST, HTTP/1.1,
    kept alive.
    """

    @property
    def path(self) -> str:
        """Of the target."""
        return path_of(self.target) if self.head is None else self.head.path


class Response(msgspec.Struct):
    """One whole answer; `close` ends the connection after it."""

    status: int
    body: bytes
    content_type: bytes = JSON
    """Empty: the answer names none."""
    headers: bytes = b""
    """Further header lines, each ending in CRLF."""
    close: bool = False
    pieces: StreamedBody | None = None
    """What the body is made of as it comes; `body` is then empty."""
    lead: bytes = b""
    """The head of an answer that is asked for again and again, up to its date; empty: it is made of the rest."""


class InlineFuture:
    """An answer that is to come, for who makes many in one turn of the loop.

    It has what callers of an App use of a future, and tells them at once, not in the next turn: that turn costs more
    than the rest. For one thread.
    """

    __slots__ = ("_call", "_more", "_response", "gone")

    def __init__(self) -> None:
        self._call: Callable[[Any], object] | None = None
        self._more: list[Callable[[Any], object]] | None = None
        """The first to be told is nearly always the only one."""
        self._response: Response | None = None
        self.gone = False
        """Whether nobody waits for it any more."""

    def add_done_callback(self, call: Callable[[Any], object], /) -> None:
        """`call` gets this once the answer is there, or is not wanted any more."""
        if self.gone or self._response is not None:
            call(self)
        elif self._call is None:
            self._call = call
        elif self._more is None:
            self._more = [call]
        else:
            self._more.append(call)

    def done(self) -> bool:
        return self.gone or self._response is not None

    def cancelled(self) -> bool:
        return self.gone

    def result(self) -> Response:
        """Raises CancelledError for what was cancelled, InvalidStateError for what is still to come."""
        if self._response is None:
            raise asyncio.CancelledError if self.gone else asyncio.InvalidStateError
        return self._response

    def set_result(self, response: Response) -> None:
        """The answer is there; for nobody when it was cancelled."""
        if not self.gone:
            self._response = response
            self._tell()

    def cancel(self) -> bool:
        """Whether it had not come."""
        if self.done():
            return False
        self.gone = True
        self._tell()
        return True

    def _tell(self) -> None:
        call, more, self._call, self._more = self._call, self._more, None, None
        if call is not None:
            self._say(call)
        for call in more or ():
            self._say(call)

    def _say(self, call: Callable[[Any], object]) -> None:
        try:
            call(self)
        except Exception as error:  # noqa: BLE001 - blind on purpose: as a future does, for the others' sake
            why = {"message": "a callback of an answer failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(why)


Answer = Response | asyncio.Future[Response] | InlineFuture


class App(Protocol):
    """What stands behind the connections. Neither method raises."""

    def answer(self, request: Request) -> Answer: ...

    def refuse(self, path: str, status: int, message: str) -> Response:
        """The answer for a request that could not be received."""
        ...


def path_of(target: bytes) -> str:
    """The path of a request target, decoded, without its query.

    >>> path_of(b"/v2/models/a%20b?x=1"), path_of(b"http://host:80/ping")
    ('/v2/models/a b', '/ping')
    """
    if not target.startswith(b"/") and b"://" in target:
        target = b"/" + target.partition(b"://")[2].partition(b"/")[2]
    path = target.partition(b"?")[0].decode("latin-1")
    return unquote(path, errors="replace") if "%" in path else path


def query_of(target: bytes) -> dict[str, str]:
    """The parameters in a request target, decoded; of one that comes twice the last.

    >>> query_of(b"/invocations?model_name=a%20b&x=")
    {'model_name': 'a b', 'x': ''}
    """
    return dict(_pairs(target))


def query_all(target: bytes, name: str) -> list[str]:
    """Every value of one parameter in a request target, decoded.

    >>> query_all(b"/metrics?name[]=a&name%5B%5D=b&x=c", "name[]")
    ['a', 'b']
    """
    return [value for key, value in _pairs(target) if key == name]


def _pairs(target: bytes) -> list[tuple[str, str]]:
    """Raises RequestError."""
    text = target.partition(b"?")[2].partition(b"#")[0].decode("latin-1")
    try:
        return parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_PARAMETERS)
    except ValueError as error:
        raise RequestError(f"the query has more than {MAX_PARAMETERS} parameters") from error


def date_line() -> bytes:
    """The Date header of this second."""
    return b"date: %b\r\n" % formatdate(usegmt=True).encode()


def render_plain(response: Response, date: bytes) -> bytes:
    """The bytes of a whole answer to a request that is plain, on a connection that stays."""
    body = response.body
    if response.lead:
        return b"%b%b\r\n%b" % (response.lead, date, body)
    line = _STATUS_LINES.get(response.status)
    if line is None or not response.content_type:
        line = _start(response)
    else:
        line += response.content_type
    return b"%b\r\ncontent-length: %d\r\n%b%b\r\n%b" % (line, len(body), response.headers, date, body)


def render_lead(response: Response) -> bytes:
    """`Response.lead` for answers like this one, with bodies as long as its own.

    >>> render_lead(Response(200, b"{}"))
    b'HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\ncontent-length: 2\\r\\n'
    """
    return render_plain(response, b"").removesuffix(b"\r\n" + response.body)


def render(response: Response, request: Request | None, *, date: bytes, close: bool) -> bytes:
    """The answer's bytes; a HEAD request gets the head alone."""
    ordinary = request is not None and request.method != "HEAD" and not request.http_1_0 and not close
    if ordinary and response.pieces is None:
        return render_plain(response, date)
    line = _STATUS_LINES.get(response.status)
    if response.pieces is None:
        size = b"content-length: %d\r\n" % len(response.body)
    else:  # an old client reads until the connection ends
        size = b"" if request is not None and request.http_1_0 else b"transfer-encoding: chunked\r\n"
    head = b"%b\r\n%b%b%b" % (
        line + response.content_type if line is not None and response.content_type else _start(response),
        size,
        date,
        response.headers,
    )
    if close:
        head += b"connection: close\r\n"
    elif request is not None and request.http_1_0:
        head += b"connection: keep-alive\r\n"
    if request is not None and request.method == "HEAD":
        return head + b"\r\n"
    return b"%b\r\n%b" % (head, response.body)
