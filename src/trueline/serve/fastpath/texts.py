"""JSON text with gaps: what the requests of one client have in common around the values that are new each time. Pure.

    {"id":"3f9a…","inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":
    └ text ┘    └ text ─────────────────────────────────────────────────────┘

A gap is the value of `id`, `timeout` or `priority`, or of a name that `codec` does not read (`codec.READ`): a string of
printable ASCII without escapes, or a plain number. Any such value means the same to `codec` but for itself, so the rest
of what `codec` decided stands. Everything else is text, compared byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from trueline.serve.tensors import codec

if TYPE_CHECKING:
    from collections.abc import Iterator

_STRING = rb"[ !#-\[\]-~]{0,256}"
_COUNT = rb"(?:0|[1-9][0-9]{0,14})"
_NUMBER = rb"-?" + _COUNT + rb"(?:\.[0-9]{1,17})?"
_BLANK = rb"[ \t\r\n]*"
_KEY = rb'"([A-Za-z0-9_.-]{1,64})"' + _BLANK + rb":" + _BLANK
"""Without the signs that can stand between two strings: no match begins at the end of a string."""
_PAIR = re.compile(_KEY + rb'(?:"(' + _STRING + rb')"|(' + _NUMBER + rb")(?=[ \t\r\n,}\]]))")
_PATTERNS = {kind: re.compile(text) for kind, text in (("s", _STRING), ("n", _NUMBER), ("c", _COUNT))}
_OWN = (b"id", b"timeout", b"priority")
"""Names whose values are read: they are gaps where they stand once, and are what the request says."""


class Gap(msgspec.Struct, frozen=True):
    """A value in the text, from `start` to `end`."""

    key: bytes
    start: int
    end: int
    kind: str
    """Of `_PATTERNS`."""


class GappedText:
    """Text with gaps."""

    __slots__ = ("first", "rest")

    def __init__(self, text: bytes, gaps: Sequence[Gap]) -> None:
        edges = [0, *[edge for gap in gaps for edge in (gap.start, gap.end)], len(text)]
        self.first, *rest = [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
        """The text up to the first gap."""
        self.rest = tuple([(_PATTERNS[gap.kind].match, text) for gap, text in zip(gaps, rest, strict=True)])
        """For each gap what its value is, and the text after it."""

    def match(self, body: bytes | bytearray, at: int, values: list[bytes]) -> int:
        """Where this text, which begins at `at`, ends in `body`, with its gaps' values added to `values`; -1: it is
        another.
        """
        if not body.startswith(self.first, at):
            return -1
        at += len(self.first)
        for value_at, text in self.rest:
            value = value_at(body, at)
            if value is None or not body.startswith(text, end := value.end()):
                return -1
            values.append(value.group())
            at = end + len(text)
        return at


class Texts(msgspec.Struct, frozen=True):
    """The texts of one form of requests, and which of their gaps are read; -1: none."""

    texts: tuple[GappedText, ...]
    id_at: int
    timeout_at: int
    priority_at: int

    @classmethod
    def of(cls, texts: Sequence[bytes], call: codec.InferCall) -> Texts:
        """The `texts` around the tensors of a request that `codec` decoded as `call`. They contain no backslash."""
        gaps = [list(_gaps_of(text, texts, call)) for text in texts]
        keys = [gap.key for one in gaps for gap in one]
        own = [keys.index(key) if key in keys else -1 for key in _OWN]
        return cls(tuple([GappedText(text, one) for text, one in zip(texts, gaps, strict=True)]), *own)

    def call(self, like: codec.InferCall, values: Sequence[bytes]) -> codec.InferCall:
        """`like`, which is without inputs, with what `values` say."""
        request_id, timeout_s, priority, cache = like.id, like.timeout_s, like.priority, like.json_cache
        if self.id_at >= 0:
            request_id, cache = bytes(values[self.id_at]).decode(), None
        if self.timeout_at >= 0:
            timeout_s = codec.timeout_s({"timeout": int(values[self.timeout_at])})
        if self.priority_at >= 0:
            priority = int(values[self.priority_at])
        return codec.InferCall({}, like.outputs, request_id, timeout_s, like.binary, priority, cache)

    def without_values(self, call: codec.InferCall) -> codec.InferCall:
        """`call` without what the gaps say, and without inputs."""
        request_id = None if self.id_at >= 0 else call.id
        timeout_s = None if self.timeout_at >= 0 else call.timeout_s
        priority = None if self.priority_at >= 0 else call.priority
        return msgspec.structs.replace(call, inputs={}, id=request_id, timeout_s=timeout_s, priority=priority)


def skeleton(text: bytes) -> bytes:
    """The same for all texts that differ in gaps alone.

    >>> skeleton(b'{"id":"7","inputs":[{"name":"x"'), skeleton(b'{"id":"8","inputs":[{"name":"x"')
    (b'{"id":"","inputs":[{"name":"x"', b'{"id":"","inputs":[{"name":"x"')
    """
    made, at = [], 0
    for pair in _PAIR.finditer(text):
        if pair[1] in _OWN or pair[1] not in codec.READ:
            group = 3 if pair[2] is None else 2
            made.append(text[at : pair.start(group)])
            at = pair.end(group)
    return b"".join([*made, text[at:]])


def _gaps_of(text: bytes, texts: Sequence[bytes], call: codec.InferCall) -> Iterator[Gap]:
    for pair in _PAIR.finditer(text):
        key, group = pair[1], 3 if pair[2] is None else 2
        if key in _OWN:
            quoted = b'"' + key + b'"'
            if sum([one.count(quoted) for one in texts]) == 1 and _is_read(key, pair[2], pair[3], call):
                yield Gap(key, *pair.span(group), "s" if key == b"id" else "c")
        elif key not in codec.READ:
            yield Gap(b"", *pair.span(group), "s" if group == 2 else "n")


def _is_read(key: bytes, text: bytes | None, number: bytes | None, call: codec.InferCall) -> bool:
    """Whether this value is the one that `call` has of `key`."""
    if key == b"id":
        return text is not None and call.id == text.decode()
    if number is None or not number.isdigit():
        return False
    if key == b"timeout":
        return call.timeout_s is not None and call.timeout_s == codec.timeout_s({"timeout": int(number)})
    return type(call.priority) is int and call.priority == int(number)
