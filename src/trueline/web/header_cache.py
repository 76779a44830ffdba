"""Heads of requests that were read before, so that a client that asks the same way again is not parsed again. Pure.

A kept-alive client sends one head over and over: the same bytes, read by the same parser between two requests, mean
the same. So what the parser made of a whole head is kept under its very bytes, and a request that begins with them and
is there to its last byte needs no parser. Only plain requests are kept: HTTP/1.1, kept alive, with a body of a known
length or none. Whatever is not found here goes through the parser, which is the judge of what a request is.
"""

from __future__ import annotations

from trueline.web.messages import Request, RequestHead

END = b"\r\n\r\n"
MAX_HEAD_BYTES = 2048
"""A longer head is not kept."""
MAX_HEADS = 512
"""With more, all are forgotten: clients that put something new into every head gain nothing here, and cost no more."""
_METHODS = ("GET", "POST")
_NOT_PLAIN = frozenset([b"transfer-encoding", b"expect", b"upgrade"])


class HeaderCache:
    """The heads of all connections of one server."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, RequestHead] = {}

    def find(self, data: bytes) -> Request | None:
        """The request that `data` is, whole and alone, if its head is known."""
        body_at = data.find(END, 0, MAX_HEAD_BYTES) + 4
        head = self._known.get(data[:body_at])
        if head is None or len(data) - body_at != head.length:
            return None
        return Request(head.method, head.target, head.headers, data[body_at:], True, False, head)

    def keep(self, data: bytes, request: Request) -> None:
        """Keeps the head of `data`, of which the parser, before which nothing lay, has made `request`."""
        headers = request.headers
        body_at = data.find(END, 0, MAX_HEAD_BYTES) + 4
        plain = request.method in _METHODS and request.keep_alive and not request.http_1_0
        plain = plain and headers.keys().isdisjoint(_NOT_PLAIN)
        length = int(headers.get(b"content-length", 0))
        if not plain or body_at < 4 or len(data) - body_at != length or len(request.body) != length:
            return  # not one request alone, or one that the parser has to see
        if len(self._known) >= MAX_HEADS:
            self._known.clear()
        self._known[data[:body_at]] = RequestHead(request.method, request.target, request.path, headers, length)
