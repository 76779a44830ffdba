"""Recognises the next request of a connection by its head, which is then not parsed again.

A client's requests have one head but for the values of some headers: the length of the body, ids, traces, tokens. What
two heads of a connection have in common is its `HeadLayout`: text, with gaps where their values differed. A request
that arrives whole and fits the layout is the one that the parser would make; any other goes to the parser.

Each connection has a layout of its own: no client sees, displaces or slows down what another one sent. Source: RFC 9112
for what a field line is; values with anything but printable ASCII are left to the parser.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from trueline.web import origin
from trueline.web.messages import Request, RequestHead

END = b"\r\n\r\n"
MAX_HEAD_BYTES = 2048
"""A longer head is left to the parser."""
MAX_MISSES = 8
"""In a row; after these a connection makes a layout of one head in `_LEARN_EVERY`: its heads have little in common."""
_LEARN_EVERY = 64
_METHODS = ("GET", "POST")
_NOT_PLAIN = frozenset([b"transfer-encoding", b"expect", b"upgrade", *origin.HEADERS])
_LENGTH = b"content-length"
_FIXED = frozenset([b"host", b"connection", b"te", b"trailer", b"keep-alive", b"proxy-connection"])
"""Headers by which a connection or its framing is decided: another value needs the parser."""
_VALUE = re.compile(rb"[!-~](?:[ -~]*[!-~])?")
_MAX_DIGITS = 15


class HeadLayout:
    """The heads that equal one head but for the values of `gaps`."""

    __slots__ = ("gaps", "head", "headers", "length", "start")

    def __init__(self, request: Request, lines: Sequence[bytes], gaps: Sequence[int]) -> None:
        """`lines` are those of the head of `request`, which the parser made; `gaps` index lines of the form
        `name: value`.
        """
        texts, names, text = [], [], b""
        for at, line in enumerate(lines):
            if at in gaps:
                name, value = _field(line)
                names.append(name)
                texts.append(text + line[: len(line) - len(value)])
                text = b"\r\n"
            else:
                text += line + b"\r\n"
        self.start, *rest = *texts, text + b"\r\n"
        """The text up to the first gap."""
        self.gaps = tuple(zip(names, rest, strict=True))
        """The name of each header that varies, and the text after its value."""
        self.headers = request.headers
        self.length = None if _LENGTH in names else int(request.headers.get(_LENGTH, 0))
        """Of the body; None: it varies."""
        self.head = RequestHead(request.method, request.target, request.path, frozenset(names))


class HeaderCache:
    """The layout of the heads of one connection.

    Only plain requests have one: GET or POST, HTTP/1.1, kept alive, with a body of a known length or none.
    """

    __slots__ = ("_body_bytes", "_gaps", "_layout", "_lines", "_misses")

    def __init__(self, body_bytes: int) -> None:
        """A request with a larger body than `body_bytes` is left to the parser, which rejects it."""
        self._body_bytes = body_bytes
        self._lines: list[bytes] = []
        self._gaps: set[int] = set()
        self._misses = 0
        self._layout: HeadLayout | None = None

    def find(self, data: bytes) -> Request | None:
        """The request, if `data` is exactly one whole request of a known layout."""
        layout = self._layout
        if layout is None or not data.startswith(layout.start):
            return None
        at, headers, length = len(layout.start), layout.headers, layout.length
        if layout.gaps:
            headers = headers.copy()
            for name, text in layout.gaps:
                value = _VALUE.match(data, at)
                if value is None or not data.startswith(text, end := value.end()):
                    return None
                headers[name] = value[0]
                at = end + len(text)
            if at > MAX_HEAD_BYTES:
                return None
            if length is None:
                digits = headers[_LENGTH]
                if not digits.isdigit() or len(digits) > _MAX_DIGITS or (length := int(digits)) > self._body_bytes:
                    return None
        if len(data) - at != length:
            return None
        self._misses, head = 0, layout.head
        return Request(head.method, head.target, headers, data[at:], True, False, head)

    def keep(self, data: bytes, request: Request) -> None:
        """Notes the head of `data`, from which the parser has made `request`."""
        body_at = data.find(END, 0, MAX_HEAD_BYTES) + 4
        headers = request.headers
        plain = request.method in _METHODS and request.keep_alive and not request.http_1_0
        if body_at < 4 or not plain or not headers.keys().isdisjoint(_NOT_PLAIN):
            return
        length = int(headers.get(_LENGTH, 0))
        if len(data) - body_at != length or len(request.body) != length:
            return  # not one request alone
        self._misses += 1
        if self._misses > MAX_MISSES and self._misses % _LEARN_EVERY:
            return
        lines = data[: body_at - 4].split(b"\r\n")
        self._gaps = self._common_gaps(lines, headers)
        self._lines = lines
        self._layout = HeadLayout(request, lines, sorted(self._gaps))

    def _common_gaps(self, lines: list[bytes], headers: dict[bytes, bytes]) -> set[int]:
        """Which of `lines` differ, or differed before, in their values alone; none if anything else differs."""
        old = self._lines
        if len(lines) != len(old) or len(lines) != len(headers) + 1 or lines[0] != old[0]:
            return set()
        gaps = set(self._gaps)
        for at, (line, was) in enumerate(zip(lines, old, strict=True)):
            if line == was and at not in gaps:
                continue
            name, value = _field(line)
            same = line[: len(line) - len(value)] == was[: len(was) - len(_field(was)[1])]
            if not same or name in _FIXED or headers.get(name) != value:
                return set()
            gaps.add(at)
        return gaps


def _field(line: bytes) -> tuple[bytes, bytes]:
    """The lower-case name of a field line and its value, without the blanks around it if the line ends in none."""
    name, _, value = line.partition(b":")
    return name.lower(), value.lstrip(b" ")
