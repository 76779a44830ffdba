"""The forms of infer requests to one version, cached: only the tensors of a request of a known form are read. Pure.

    a binary request   its JSON, and the number of bytes that follow
    a JSON request     the text before, between and after the `data` of its inputs

The text may have gaps, which are new in each request (`texts`). `codec.decode` checks and decides by the text, and by
the tensors, which are read here as `codec` reads them. What is unknown or fails here goes to `codec.decode`, which
decides what a request is and reports its errors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from trueline.bundle.signature import NUMPY_DTYPES, Signature
from trueline.errors import RequestError
from trueline.serve.fastpath.texts import GappedText, Texts, skeleton
from trueline.serve.tensors import arrays, codec
from trueline.serve.tensors.bounds import UNBOUNDED, RequestBounds

if TYPE_CHECKING:
    from trueline.bundle.signature import Array
    from trueline.serve.fastpath.bound_run import CachedReply, Spans

    Body = bytes | bytearray

MAX_TEMPLATES = 64
"""With more, those that fewest requests had go first."""
MAX_ALIKE = 4
"""Templates with the same text before the first tensor."""
MAX_BYTES = 1024
"""A longer text is not cached."""
_DATA = b'"data"'
_KEY = (b'"data":', b'"data": ')


class _Bytes(msgspec.Struct, frozen=True):
    """An input of a binary request."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    depth: int = 0

    def read(self, body: Body, start: int, end: int) -> Array | None:
        if start % self.dtype.itemsize:  # copied to an aligned place
            return np.ndarray(self.shape, self.dtype, body[start:end])
        return np.ndarray(self.shape, self.dtype, body, start)

    def read_bytes(self, body: Body, start: int, end: int) -> Body | None:
        return body[start:end]


class _Numbers(msgspec.Struct, frozen=True):
    """An input of a JSON request."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    depth: int
    flat: arrays.FlatReader | None
    """Of a flat list."""

    def read(self, body: Body, start: int, end: int) -> Array | None:
        """The input; None when it does not fit the shape, or is malformed."""
        text = memoryview(body)[start:end]
        try:
            if end - start > arrays.most_bytes(self.shape) or arrays.depth_of(text) != self.depth:
                return None
            array = arrays.parse(text, self.datatype, self.depth, self.name)
        except RequestError:
            return None
        fits = array.shape == self.shape if self.depth > 1 else array.size == math.prod(self.shape)
        return array.reshape(self.shape) if fits else None

    def read_bytes(self, body: Body, start: int, end: int) -> Body | None:
        if self.flat is not None:
            return self.flat(memoryview(body)[start:end])
        array = self.read(body, start, end)
        return None if array is None else array.tobytes()


class Template(msgspec.Struct, eq=False):
    """Requests of one form; `call` is what they ask, without inputs and without what their gaps say."""

    texts: Texts
    before: GappedText
    """The first of them."""
    after: Sequence[tuple[_Bytes | _Numbers, GappedText]]
    """Each input of a JSON request, and the text after it."""
    inputs: Sequence[_Bytes | _Numbers]
    call: codec.InferCall
    names: tuple[str, ...]
    """Of the inputs, in the order in which they lie in the request."""
    binary_bytes: int | None
    """That follow the JSON of a binary request."""
    places: Spans
    """Of the inputs behind the JSON of a binary request."""
    end: GappedText | None = None
    """The text after the last input of a JSON request."""
    reply: CachedReply | None = None
    """How these requests are answered, if it is cached."""
    tries: int = 0
    """To cache it."""
    uses: int = 0

    def match(self, body: Body, json_bytes: int | None, values: list[bytes]) -> Spans | None:
        """Where the inputs lie, with the values of the gaps added to `values`; None for a request of another form."""
        before = self.before
        if before.rest:
            at = before.match(body, 0, values)
        else:  # in place: this is what costs the shortest requests most
            at = len(before.first) if body.startswith(before.first) else -1
        if json_bytes is not None:
            if at != json_bytes or len(body) - at != self.binary_bytes:
                return None
            return [(at + start, at + end) for start, end in self.places]
        if at < 0 or self.binary_bytes is not None:
            return None
        spans = []
        for one, text in self.after:
            if text is self.end and not text.rest:
                end = len(body) - len(text.first)
                if end < at or not body.endswith(text.first):
                    return None
                spans.append((at, end))
                return spans
            end = body.find(b"]", at) + 1 if one.depth == 1 else body.find(text.first, at)
            if end < at:
                return None
            spans.append((at, end))
            at = text.match(body, end, values)
            if at < 0:
                return None
        return spans if at == len(body) else None

    def pieces(self, body: Body, spans: Spans) -> list[Body] | None:
        """The bytes of each input; None for malformed ones."""
        if self.binary_bytes is not None:
            return [body[start:end] for start, end in spans]
        made = []
        for one, (start, end) in zip(self.inputs, spans, strict=True):
            piece = one.read_bytes(body, start, end)
            if piece is None:
                return None
            made.append(piece)
        return made

    def decode(self, body: Body, spans: Spans, values: Sequence[bytes]) -> codec.InferCall | None:
        """The call; None for malformed inputs."""
        inputs: dict[str, Array] = {}
        for one, (start, end) in zip(self.inputs, spans, strict=True):
            array = one.read(body, start, end)
            if array is None:
                return None
            inputs[one.name] = array
        return (self.texts.call(self.call, values) if values else self.call).of(inputs)


class TemplateCache:
    """The templates of requests to one version, whose `signature` decides what they mean."""

    __slots__ = ("_bounds", "_by_text", "_last", "_made", "_signature", "_size")

    def __init__(self, signature: Signature, bounds: RequestBounds = UNBOUNDED) -> None:
        self._signature, self._bounds = signature, bounds
        self._by_text: dict[bytes, list[Template]] = {}
        self._last: Template | None = None
        self._size = self._made = 0

    def decode(self, body: Body, json_bytes: int | None = None) -> codec.InferCall:
        """`codec.decode`, by a cached template where there is one. Raises RequestError."""
        values: list[bytes] = []
        found = self.find(body, json_bytes, values, self._last)
        if found is not None:
            self._last = found[0]
            call = found[0].decode(body, found[1], values)
            if call is not None:
                return call
        call, given = codec.decode_with_inputs(body, self._signature, json_bytes, self._bounds)
        if found is None:
            if json_bytes is None:
                self._keep_json(body, call, given)
            else:
                self._keep_binary(bytes(body[:json_bytes]), call, given)
        return call

    def find(
        self, body: Body, json_bytes: int | None, values: list[bytes], likely: Template | None
    ) -> tuple[Template, Spans] | None:
        """The template of `body` and where its inputs lie, with the values of its gaps added to `values`; `likely` is
        tried first.
        """
        if likely is not None:
            spans = likely.match(body, json_bytes, values)
            if spans is not None:
                likely.uses += 1
                return likely, spans
        text = _first_text(body, json_bytes)
        for template in self._by_text.get(skeleton(text), ()) if text else ():
            values.clear()
            spans = template.match(body, json_bytes, values)
            if spans is not None:
                template.uses += 1
                return template, spans
        values.clear()
        return None

    def _keep_binary(self, head: bytes, call: codec.InferCall, inputs: Sequence[codec.GivenInput]) -> None:
        if not 0 < len(head) <= MAX_BYTES or sys.byteorder != "little" or b"\\" in head:
            return
        found, places, offset = [], [], 0
        for given in inputs:
            dtype = NUMPY_DTYPES[given.datatype]
            if given.parameters is None or "binary_data_size" not in given.parameters or dtype.kind == "b":
                return  # tensors in the JSON, or bytes that are checked one by one
            size = math.prod(given.shape) * dtype.itemsize
            found.append(_Bytes(given.name, dtype, tuple(given.shape)))
            places.append((offset, offset + size))
            offset += size
        if set(call.outputs) == call.binary:
            call = msgspec.structs.replace(call, json_cache={})
        self._keep([head], found, call, offset, places)

    def _keep_json(self, body: Body, call: codec.InferCall, inputs: Sequence[codec.GivenInput]) -> None:
        texts, found, after = [], [], 0
        for given in inputs:
            at = _data_at(body, after)
            if at < 0 or body[at : at + len(given.data)] != bytes(given.data):
                return
            texts.append(bytes(body[after:at]))
            after = at + len(given.data)
            depth = arrays.depth_of(memoryview(given.data))
            dtype, shape, count = NUMPY_DTYPES[given.datatype], tuple(given.shape), math.prod(given.shape)
            flat = arrays.FlatReader(count, dtype) if depth == 1 and count else None
            found.append(_Numbers(given.name, given.datatype, shape, depth, flat))
        texts.append(bytes(body[after : after + MAX_BYTES]))
        text = b"\0".join(texts)
        # Without escapes the only keys `data` are those that were read, and the inputs' data follows them.
        plain = text.count(_DATA) == len(inputs) and all(one.endswith(_KEY) for one in texts[:-1]) and b"\\" not in text
        if inputs and plain and after + len(texts[-1]) == len(body):
            self._keep(texts, found, call, None)

    def _keep(
        self,
        texts: Sequence[bytes],
        inputs: Sequence[_Bytes | _Numbers],
        call: codec.InferCall,
        binary_bytes: int | None,
        places: Spans = (),
    ) -> None:
        made = Texts.of(texts, call)
        call = made.without_values(call)
        if call.id is not None:
            return  # in a form that is no gap: another for each request
        key = skeleton(texts[0])
        alike = self._by_text.get(key, [])
        if len(alike) >= MAX_ALIKE:
            self._remove(key, min(alike, key=lambda one: one.uses))
        elif self._size >= MAX_TEMPLATES:
            self._remove(*min(self._all(), key=lambda pair: pair[1].uses))
        names = tuple([one.name for one in inputs])
        before, *after = made.texts
        around = tuple(zip(inputs, after, strict=True)) if after else ()
        end = after[-1] if after else None
        template = Template(made, before, around, inputs, call, names, binary_bytes, places, end)
        self._by_text.setdefault(key, []).append(template)
        self._size += 1
        self._made += 1
        if self._made % MAX_TEMPLATES == 0:  # what was used long ago counts less
            for _, template in self._all():
                template.uses //= 2

    def _all(self) -> list[tuple[bytes, Template]]:
        return [(key, one) for key, alike in self._by_text.items() for one in alike]

    def _remove(self, key: bytes, template: Template) -> None:
        alike = self._by_text[key]
        alike.remove(template)
        if not alike:
            del self._by_text[key]
        self._size -= 1


def _first_text(body: Body, json_bytes: int | None) -> bytes:
    """The text before the first tensor; empty when it is too long."""
    if json_bytes is None:
        return bytes(body[: max(0, _data_at(body, 0))])
    return bytes(body[:json_bytes]) if json_bytes <= MAX_BYTES else b""


def _data_at(body: Body, at: int) -> int:
    """Where the list behind the first `data` from `at` on begins; -1 when it is not near."""
    key_at = body.find(_DATA, at, at + MAX_BYTES)
    return body.find(b"[", key_at, at + MAX_BYTES) if key_at >= 0 else -1
