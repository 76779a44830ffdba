"""Requests, responses, the App between them, and the bytes of a response (RFC 9112). Pure."""

import asyncio
import http
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote

import msgspec

from trueline.errors import RequestError
from trueline.web.body import Body

MAX_AHEAD_BYTES = 64 * 2**20
"""Buffered for a slow client. A handler cannot be paused, so its response is given up beyond this."""
MAX_PARAMETERS = 64
JSON = b"application/json"
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: ".encode() for status in http.HTTPStatus
}


class StreamBroken(Exception):
    """The response ended early: its handler failed, or the client read too slowly."""


class StreamedBody:
    """The body of a streamed response: a handler writes its pieces, one connection or call reads them."""

    def __init__(self, stop: Callable[[], None], *, max_ahead_bytes: int = MAX_AHEAD_BYTES) -> None:
        """`stop` is called when the reader leaves before the end."""
        self._stop = stop
        self._max_ahead = max_ahead_bytes
        self._ready: list[bytes | bytearray] = []
        self._ahead = 0
        self._wake: Callable[[], None] | None = None
        self.over = False
        """Whether the writer has ended; `take` may still return pieces."""
        self.torn = False

    # the writer's side

    def add(self, piece: bytes | bytearray) -> None:
        """Adds a piece; does nothing after the end."""
        if self.over or not piece:
            return
        self._ready.append(piece)
        self._ahead += len(piece)
        if self._ahead > self._max_ahead:
            self.end(torn=True)
            self._stop()
        elif self._wake is not None:
            self._wake()

    def end(self, *, torn: bool = False) -> None:
        """Ends the body; `torn`: it is not complete."""
        if self.over:
            return
        self.over, self.torn = True, torn
        if self._wake is not None:
            self._wake()

    # the reader's side

    def listen(self, wake: Callable[[], None]) -> None:
        """Calls `wake` when there are pieces to take, and at the end."""
        self._wake = wake

    def take(self) -> list[bytes | bytearray]:
        """The pieces since the last call."""
        pieces, self._ready, self._ahead = self._ready, [], 0
        return pieces

    def drop(self) -> None:
        """The reader leaves."""
        self._wake = None
        if not self.over:
            self.end(torn=True)
            self._stop()

    async def each(self) -> AsyncIterator[bytes | bytearray]:
        """The pieces as they come. Raises StreamBroken."""
        more = asyncio.Event()
        self.listen(more.set)
        try:
            while True:
                more.clear()
                over = self.over  # read before `take`: more pieces and the end may come while one is sent
                for piece in self.take():
                    yield piece
                if over and self.torn:
                    raise StreamBroken
                if over:
                    return
                await more.wait()
        finally:
            self.drop()

    async def whole(self) -> bytes:
        """All pieces joined. Raises StreamBroken."""
        return b"".join([piece async for piece in self.each()])


class RequestHead(msgspec.Struct, eq=False):
    """What requests share whose heads differ in the values of `varying` alone (see `header_cache`)."""

    method: str
    target: bytes
    path: str
    varying: frozenset[bytes]
    app_data: object = None
    """What the App derives from the head, for later requests: nothing that depends on the headers `varying`."""


class Request(msgspec.Struct, eq=False):
    """A whole request. Header names are lower-case; `headers` may be shared with other requests and is read-only."""

    method: str
    target: bytes
    headers: dict[bytes, bytes]
    body: Body
    """A long one is a memoryview."""
    keep_alive: bool = True
    http_1_0: bool = False
    head: RequestHead | None = None
    """Of a known head; a copy with other headers or body has none. Such a request is plain: GET or POST, HTTP/1.1,
    kept alive."""

    @property
    def path(self) -> str:
        """Of the target, decoded."""
        return path_of(self.target) if self.head is None else self.head.path


class Response(msgspec.Struct):
    """A whole response; `close` ends the connection after it."""

    status: int
    body: bytes
    content_type: bytes = JSON
    """Empty: no such header."""
    headers: bytes = b""
    """Further header lines, each ending in CRLF."""
    close: bool = False
    pieces: StreamedBody | None = None
    """The body of a streamed response; `body` is then empty."""
    lead: bytes = b""
    """A prepared head, up to the date, of a response that is sent many times; empty: rendered from the rest."""


class InlineFuture:
    """A response that is to come. It has the methods of a future that callers of an App use.

    Callbacks run at once, not in the loop's next turn, which would cost more than the rest where many responses are
    made in one turn. For one thread.
    """

    __slots__ = ("_callbacks", "_response", "gone")

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], object]] = []
        self._response: Response | None = None
        self.gone = False
        """Whether it was cancelled."""

    def add_done_callback(self, call: Callable[[Any], object], /) -> None:
        """Calls `call(self)` once the response is set or this is cancelled."""
        if self.done():
            call(self)
        else:
            self._callbacks.append(call)

    def done(self) -> bool:
        return self.gone or self._response is not None

    def cancelled(self) -> bool:
        return self.gone

    def result(self) -> Response:
        """Raises CancelledError when this was cancelled, InvalidStateError before the response is set."""
        if self._response is None:
            raise asyncio.CancelledError if self.gone else asyncio.InvalidStateError
        return self._response

    def set_result(self, response: Response) -> None:
        """Drops the response when this was cancelled."""
        if not self.gone:
            self._response = response
            self._notify()

    def cancel(self) -> bool:
        """Whether this was still open."""
        if self.done():
            return False
        self.gone = True
        self._notify()
        return True

    def _notify(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for call in callbacks:
            try:
                call(self)
            except Exception as error:  # noqa: BLE001 - as a future does: the other callbacks run all the same
                context = {"message": "a callback of a response failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)


Answer = Response | asyncio.Future[Response] | InlineFuture


class App(Protocol):
    """Answers the requests of connections. Neither method raises."""

    def answer(self, request: Request) -> Answer: ...

    def refuse(self, path: str, status: int, message: str) -> Response:
        """The response to a request that could not be received."""
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


def segments_of(path: str) -> list[str]:
    """The segments of a path; slashes at its end make none, as in TorchServe (Java's String.split).

    >>> segments_of("/models/noop/"), segments_of("/"), segments_of("/a//b")
    (['models', 'noop'], [''], ['a', '', 'b'])
    """
    return path.rstrip("/").split("/")[1:] or [""]


def query_of(target: bytes) -> dict[str, str]:
    """The decoded parameters of a request target; the first of those with the same name, as in TorchServe.

    >>> query_of(b"/invocations?model_name=a%20b&x=")
    {'model_name': 'a b', 'x': ''}
    """
    found: dict[str, str] = {}
    for name, value in _pairs(target):
        found.setdefault(name, value)
    return found


def query_all(target: bytes, name: str) -> list[str]:
    """Every decoded value of one parameter of a request target.

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


_DAYS, _MONTHS = "MonTueWedThuFriSatSun", "JanFebMarAprMayJunJulAugSepOctNovDec"


def date_line() -> bytes:
    """The Date header line of this second."""
    at = time.gmtime()  # names that do not follow the process's locale, as strftime's do; email.utils is slow to import
    day, month = _DAYS[3 * at.tm_wday : 3 * at.tm_wday + 3], _MONTHS[3 * at.tm_mon - 3 : 3 * at.tm_mon]
    return time.strftime(f"date: {day}, %d {month} %Y %H:%M:%S GMT\r\n", at).encode()


def render_plain(response: Response, date: bytes) -> bytes:
    """The bytes of a whole response to a plain request, on a connection that stays open."""
    body = response.body
    if response.lead:
        return b"%b%b\r\n%b" % (response.lead, date, body)
    return b"%b\r\ncontent-length: %d\r\n%b%b\r\n%b" % (_start(response), len(body), response.headers, date, body)


def render_lead(response: Response) -> bytes:
    """`Response.lead` for responses that differ from this one in their body alone, of the same length.

    >>> render_lead(Response(200, b"{}"))
    b'HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\ncontent-length: 2\\r\\n'
    """
    return render_plain(response, b"").removesuffix(b"\r\n" + response.body)


def render(response: Response, request: Request | None, *, date: bytes, close: bool) -> bytes:
    """The response's bytes; a HEAD request gets the head alone."""
    head_only = request is not None and request.method == "HEAD"
    if request is not None and response.pieces is None and not (head_only or request.http_1_0 or close):
        return render_plain(response, date)
    head = render_head(response, request, date=date, close=close)
    return head if head_only else head + response.body


def render_head(response: Response, request: Request | None, *, date: bytes, close: bool) -> bytes:
    """The same up to the body."""
    old = request is not None and request.http_1_0
    if response.pieces is None:
        size = b"content-length: %d\r\n" % len(response.body)
    else:  # an HTTP/1.0 client reads until the connection ends
        size = b"" if old else b"transfer-encoding: chunked\r\n"
    connection = b"connection: close\r\n" if close else b"connection: keep-alive\r\n" if old else b""
    return b"%b\r\n%b%b%b%b\r\n" % (_start(response), size, date, response.headers, connection)


def _start(response: Response) -> bytes:
    """Status line and content type."""
    line = _STATUS_LINES.get(response.status)
    if line is None:  # a status of the App's own
        line = b"HTTP/1.1 %d \r\ncontent-type: " % response.status
    return line + response.content_type if response.content_type else line.removesuffix(b"\r\ncontent-type: ")
