"""What infer requests say beside their numbers, remembered: who asks the same way again is read by the numbers alone.
Pure.

    a binary request   its JSON head, byte for byte, and how many bytes follow it
    a JSON request     of one input: the text before its `data` and the text after it, byte for byte

Requests of one client differ in these hardly ever; all that is checked and decided by `oip.decode` depends on nothing
else, but for the numbers themselves, which are read by what it reads them with. Whatever is not found here, and
whatever fails here, goes to `oip.decode`, which is the judge of what a request is and has the words for what it is not.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from trueline.bundle.signature import NUMPY_DTYPES, Signature
from trueline.errors import RequestError
from trueline.serve.protocols.oip import codec, json_tensors

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

MAX_LAYOUTS = 64
"""With more, all are forgotten."""
MAX_BYTES = 1024
"""Of a text that is remembered."""
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
    even: bool
    """Whether it lies where its numbers may be read as they are."""


class Layout(Protocol):
    """What requests of one kind say beside their numbers."""

    @property
    def call(self) -> codec.Call:
        """What they ask, without inputs."""
        ...

    def pieces(self, body: bytes | bytearray) -> Sequence[bytes | bytearray] | None:
        """The bytes of each input, in `names`' order; None for a request of another kind, or one that is refused."""
        ...

    @property
    def names(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class _Binary:
    head: bytes
    places: tuple[_Place, ...]
    num_bytes: int
    call: codec.Call
    names: tuple[str, ...]

    def pieces(self, body: bytes | bytearray) -> Sequence[bytes | bytearray] | None:
        if len(body) - len(self.head) != self.num_bytes or not body.startswith(self.head):
            return None
        return [body[place.start : place.start + place.size] for place in self.places]


@dataclass(frozen=True, slots=True)
class _Json:
    begin: bytes
    end: bytes
    name: str
    datatype: str
    shape: tuple[int, ...]
    depth: int
    call: codec.Call
    names: tuple[str, ...]
    flat: json_tensors.Flat | None
    """Reads its numbers where they are one list of floats."""

    def pieces(self, body: bytes | bytearray) -> Sequence[bytes | bytearray] | None:
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
        """The input in `text`; None when it is not what the shape says, or not what goes."""
        try:
            if json_tensors.depth_of(text) != self.depth:
                return None
            array = json_tensors.parse(text, self.datatype, self.depth, self.name)
        except RequestError:
            return None
        return array.reshape(self.shape) if _fits(array, self) else None


class Layouts:
    """The requests that a model of `signature` is asked."""

    __slots__ = ("_binary", "_json", "_signature")

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self._binary: dict[bytes, _Binary] = {}
        self._json: dict[bytes, _Json] = {}

    def decode(self, body: bytes | bytearray, json_bytes: int | None = None) -> codec.Call:
        """What `oip.decode` answers. Raises RequestError."""
        call = self._known_json(body) if json_bytes is None else self._known_binary(body, json_bytes)
        if call is not None:
            return call
        call, given = codec.read(body, self._signature, json_bytes)
        if call.id is None:  # an id is another for each request
            if json_bytes is None:
                self._keep_json(body, call, given)
            else:
                self._keep_binary(bytes(body[:json_bytes]), call, given)
        return call

    def known(self, body: bytes | bytearray, json_bytes: int | None = None) -> Layout | None:
        """What is remembered of requests like this one."""
        if json_bytes is None:
            at = _numbers_at(body)
            return self._json.get(bytes(body[:at])) if at > 0 else None
        return self._binary.get(bytes(body[:json_bytes])) if 0 < json_bytes <= MAX_BYTES else None

    # raw bytes

    def _known_binary(self, body: bytes | bytearray, json_bytes: int) -> codec.Call | None:
        if json_bytes > MAX_BYTES:
            return None
        known = self._binary.get(bytes(body[:json_bytes]))
        if known is None or len(body) - json_bytes != known.num_bytes:
            return None
        inputs: dict[str, Array] = {}
        for place in known.places:
            if place.even:
                inputs[place.name] = np.ndarray(place.shape, place.dtype, body, place.start)
            else:  # numbers are copied to an even place
                piece = body[place.start : place.start + place.size]
                inputs[place.name] = np.ndarray(place.shape, place.dtype, piece)
        return known.call.of(inputs)

    def _keep_binary(self, head: bytes, call: codec.Call, inputs: Sequence[codec.GivenInput]) -> None:
        if not 0 < len(head) <= MAX_BYTES or sys.byteorder != "little":
            return
        places, start = [], len(head)
        for given in inputs:
            dtype = NUMPY_DTYPES[given.datatype]
            if given.parameters is None or "binary_data_size" not in given.parameters or dtype.kind == "b":
                return  # numbers in the JSON, or bytes that are looked at one by one
            size = math.prod(given.shape) * dtype.itemsize
            places.append(_Place(given.name, dtype, tuple(given.shape), start, size, start % dtype.itemsize == 0))
            start += size
        if len(self._binary) >= MAX_LAYOUTS:
            self._binary.clear()
        kept = call.of({})
        if set(call.wanted) == call.binary:
            kept = msgspec.structs.replace(kept, told={})
        names = tuple([place.name for place in places])
        self._binary[head] = _Binary(head, tuple(places), start - len(head), kept, names)

    # JSON

    def _known_json(self, body: bytes | bytearray) -> codec.Call | None:
        at = _numbers_at(body)
        known = self._json.get(bytes(body[:at])) if at > 0 else None
        if known is None or not body.endswith(known.end) or len(body) - at < len(known.end):
            return None
        array = known.read(memoryview(body)[at : len(body) - len(known.end)])
        return None if array is None else known.call.of({known.name: array})

    def _keep_json(self, body: bytes | bytearray, call: codec.Call, inputs: Sequence[codec.GivenInput]) -> None:
        at = _numbers_at(body)
        if at < 0 or len(inputs) != 1:
            return
        (given,) = inputs
        after = at + len(given.data)
        begin, end = bytes(body[:at]), bytes(body[after : after + MAX_BYTES])
        # Without escapes the only key `data` is the one that was read, and what follows it are the numbers.
        plain = (begin + end).count(_DATA) == 1 and begin.endswith(_KEY) and b"\\" not in begin + end
        if not plain or after + len(end) != len(body) or body[at:after] != bytes(given.data):
            return
        if len(self._json) >= MAX_LAYOUTS:
            self._json.clear()
        depth = json_tensors.depth_of(memoryview(given.data))
        shape, dtype = tuple(given.shape), NUMPY_DTYPES[given.datatype]
        count = math.prod(given.shape)
        flat = json_tensors.Flat(count, dtype) if depth == 1 and dtype.kind == "f" and count else None
        name = given.name
        self._json[begin] = _Json(begin, end, name, given.datatype, shape, depth, call.of({}), (name,), flat)


def _numbers_at(body: bytes | bytearray) -> int:
    """Where the list behind the first `data` begins; -1 when it is not near."""
    key_at = body.find(_DATA, 0, MAX_BYTES)
    return body.find(b"[", key_at, MAX_BYTES) if key_at >= 0 else -1


def _fits(array: Array, known: _Json) -> bool:
    """Whether the numbers are as many, and nest as, the shape says."""
    return array.shape == known.shape if known.depth > 1 else array.size == math.prod(known.shape)
