"""The text of infer requests around their tensors, cached: a client that repeats it has only its tensors read. Pure.

    a binary request   its JSON, byte for byte, and the number of bytes that follow
    a JSON request     with one input: the text before its `data` and the text after it, byte for byte

`codec.decode` checks and decides by this text, and by the tensors, which are read here as `codec` reads them. What is
unknown or fails here goes to `codec.decode`, which decides what a request is and reports its errors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from trueline.bundle.signature import NUMPY_DTYPES, Signature
from trueline.errors import RequestError
from trueline.serve.tensors import arrays, codec

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

MAX_TEMPLATES = 64
"""With more, all are dropped."""
MAX_BYTES = 1024
"""A longer text is not cached."""
_DATA = b'"data"'
_KEY = (b'"data":', b'"data": ')


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an input lies behind the JSON of a binary request."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    start: int
    """In the body."""
    size: int
    aligned: bool


@dataclass(frozen=True, slots=True)
class _Binary:
    """Requests with the JSON `head`; `call` is what they ask, without inputs."""

    head: bytes
    places: tuple[_Place, ...]
    num_bytes: int
    call: codec.InferCall
    names: tuple[str, ...]

    def pieces(self, body: bytes | bytearray) -> Sequence[bytes | bytearray] | None:
        """The bytes of each input, in the order of `names`; None for a request of another form, or a malformed one."""
        if len(body) - len(self.head) != self.num_bytes or not body.startswith(self.head):
            return None
        return [body[place.start : place.start + place.size] for place in self.places]


@dataclass(frozen=True, slots=True)
class _Json:
    """Requests of one input with the texts `begin` and `end` around its data."""

    begin: bytes
    end: bytes
    name: str
    datatype: str
    shape: tuple[int, ...]
    depth: int
    call: codec.InferCall
    names: tuple[str, ...]
    flat: arrays.FlatReader | None
    """Reads the data if it is one list of floats."""

    def pieces(self, body: bytes | bytearray) -> Sequence[bytes | bytearray] | None:
        """As `_Binary.pieces`."""
        begin, end = self.begin, self.end
        if not (body.startswith(begin) and body.endswith(end)) or len(body) < len(begin) + len(end):
            return None
        text = memoryview(body)[len(begin) : len(body) - len(end)]
        if self.flat is not None:
            piece = self.flat(text)
        else:
            array = self.read(text)
            piece = None if array is None else array.tobytes()
        return None if piece is None else (piece,)

    def read(self, text: memoryview) -> Array | None:
        """The input in `text`; None when it does not fit the shape, or is malformed."""
        try:
            if arrays.depth_of(text) != self.depth:
                return None
            array = arrays.parse(text, self.datatype, self.depth, self.name)
        except RequestError:
            return None
        fits = array.shape == self.shape if self.depth > 1 else array.size == math.prod(self.shape)
        return array.reshape(self.shape) if fits else None


Template = _Binary | _Json


class TemplateCache:
    """The templates of requests to one version, whose `signature` decides what they mean."""

    __slots__ = ("_binary", "_json", "_signature")

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self._binary: dict[bytes, _Binary] = {}
        self._json: dict[bytes, _Json] = {}

    def decode(self, body: bytes | bytearray, json_bytes: int | None = None) -> codec.InferCall:
        """`codec.decode`, by a cached template where there is one. Raises RequestError."""
        template = self.find(body, json_bytes)
        call = None
        if isinstance(template, _Json):
            call = _read_json(body, template)
        elif template is not None and len(body) - len(template.head) == template.num_bytes:
            call = _read_binary(body, template)
        if call is not None:
            return call
        call, given = codec.decode_with_inputs(body, self._signature, json_bytes)
        if call.id is None:  # an id is another for each request
            if json_bytes is None:
                self._keep_json(body, call, given)
            else:
                self._keep_binary(bytes(body[:json_bytes]), call, given)
        return call

    def find(self, body: bytes | bytearray, json_bytes: int | None = None) -> Template | None:
        """The template by the text before the tensors."""
        if json_bytes is None:
            at = _data_at(body)
            return self._json.get(bytes(body[:at])) if at > 0 else None
        return self._binary.get(bytes(body[:json_bytes])) if 0 < json_bytes <= MAX_BYTES else None

    def _keep_binary(self, head: bytes, call: codec.InferCall, inputs: Sequence[codec.GivenInput]) -> None:
        if not 0 < len(head) <= MAX_BYTES or sys.byteorder != "little":
            return
        places, start = [], len(head)
        for given in inputs:
            dtype = NUMPY_DTYPES[given.datatype]
            if given.parameters is None or "binary_data_size" not in given.parameters or dtype.kind == "b":
                return  # tensors in the JSON, or bytes that are checked one by one
            size = math.prod(given.shape) * dtype.itemsize
            places.append(_Place(given.name, dtype, tuple(given.shape), start, size, start % dtype.itemsize == 0))
            start += size
        if len(self._binary) >= MAX_TEMPLATES:
            self._binary.clear()
        call = call.of({})
        if set(call.outputs) == call.binary:
            call = msgspec.structs.replace(call, json_cache={})
        names = tuple([place.name for place in places])
        self._binary[head] = _Binary(head, tuple(places), start - len(head), call, names)

    def _keep_json(self, body: bytes | bytearray, call: codec.InferCall, inputs: Sequence[codec.GivenInput]) -> None:
        at = _data_at(body)
        if at < 0 or len(inputs) != 1:
            return
        (given,) = inputs
        after = at + len(given.data)
        begin, end = bytes(body[:at]), bytes(body[after : after + MAX_BYTES])
        # Without escapes the only key `data` is the one that was read, and the input's data follows it.
        plain = (begin + end).count(_DATA) == 1 and begin.endswith(_KEY) and b"\\" not in begin + end
        if not plain or after + len(end) != len(body) or body[at:after] != bytes(given.data):
            return
        if len(self._json) >= MAX_TEMPLATES:
            self._json.clear()
        depth = arrays.depth_of(memoryview(given.data))
        shape, dtype, count = tuple(given.shape), NUMPY_DTYPES[given.datatype], math.prod(given.shape)
        flat = arrays.FlatReader(count, dtype) if depth == 1 and dtype.kind == "f" and count else None
        name = given.name
        self._json[begin] = _Json(begin, end, name, given.datatype, shape, depth, call.of({}), (name,), flat)


def _read_binary(body: bytes | bytearray, template: _Binary) -> codec.InferCall:
    inputs: dict[str, Array] = {}
    for place in template.places:
        if place.aligned:
            inputs[place.name] = np.ndarray(place.shape, place.dtype, body, place.start)
        else:  # copied to an aligned place
            inputs[place.name] = np.ndarray(place.shape, place.dtype, body[place.start : place.start + place.size])
    return template.call.of(inputs)


def _read_json(body: bytes | bytearray, template: _Json) -> codec.InferCall | None:
    at, end = len(template.begin), template.end
    if not body.endswith(end) or len(body) - at < len(end):
        return None
    array = template.read(memoryview(body)[at : len(body) - len(end)])
    return None if array is None else template.call.of({template.name: array})


def _data_at(body: bytes | bytearray) -> int:
    """Where the list behind the first `data` begins; -1 when it is not near."""
    key_at = body.find(_DATA, 0, MAX_BYTES)
    return body.find(b"[", key_at, MAX_BYTES) if key_at >= 0 else -1
