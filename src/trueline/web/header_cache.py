"""A cache of parsed request heads by their bytes: a client that repeats its head is not parsed again. Pure.

Between two requests, the same head bytes mean the same to the parser. Only plain requests are cached: HTTP/1.1, kept
alive, with a body of a known length or none, and only a request that arrived whole is looked up. All others go through
the parser.
"""

from __future__ import annotations

from trueline.web.messages import Request, RequestHead

END = b"\r\n\r\n"
MAX_HEAD_BYTES = 2048
"""A longer head is not cached."""
MAX_HEADS = 512
"""With more, the cache is cleared: clients with something new in every head gain nothing and cost no more."""
_METHODS = ("GET", "POST")
_NOT_PLAIN = frozenset([b"transfer-encoding", b"expect", b"upgrade"])


class HeaderCache:
    """Shared by all connections of one server."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, RequestHead] = {}

    def find(self, data: bytes) -> Request | None:
        """The request, if `data` is exactly one whole request with a cached head."""
        body_at = data.find(END, 0, MAX_HEAD_BYTES) + 4
        head = self._known.get(data[:body_at])
        if head is None or len(data) - body_at != head.length:
            return None
        return Request(head.method, head.target, head.headers, data[body_at:], True, False, head)

    def keep(self, data: bytes, request: Request) -> None:
        """Caches the head of `data`, from which the parser has made `request`."""
        headers = request.headers
        body_at = data.find(END, 0, MAX_HEAD_BYTES) + 4
        plain = request.method in _METHODS and request.keep_alive and not request.http_1_0
        plain = plain and headers.keys().isdisjoint(_NOT_PLAIN)
        length = int(headers.get(b"content-length", 0))
        if not plain or body_at < 4 or len(data) - body_at != length or len(request.body) != length:
            return  # not one request alone, or one that needs the parser
        if len(self._known) >= MAX_HEADS:
            self._known.clear()
        self._known[data[:body_at]] = RequestHead(request.method, request.target, request.path, headers, length)
