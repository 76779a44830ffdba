"""Tensors to and from the two forms of the Open Inference Protocol: JSON numbers, and raw bytes behind the JSON. Pure.

JSON is read strictly: a value that the datatype cannot represent is rejected, never converted. FP inputs accept
integers, and reject numbers too large for the type. INT inputs reject fractions, booleans and out-of-range values; BOOL
inputs reject 0 and 1. Raw bytes (source: Triton's extension_binary_data page) are little-endian, row-major, BOOL one
byte each; arrays are views of the body:

    Inference-Header-Content-Length: 123      the body's first 123 bytes are JSON, the rest are tensors in its order;
                                              0 is a raw request: the whole body is the only input
    parameters.binary_data_size of an input   the number of its bytes
    parameters.binary_data of an output       requests that output as bytes; binary_data_output of the request all
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from trueline.bundle.signature import DATATYPES, NUMPY_DTYPES, Signature, TensorSpec
from trueline.errors import RequestError

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

MAX_DEPTH = 32
"""Dimensions of an input."""
_CODES = {"f": "  e f   d", "i": " bh i   q", "u": " BH I   Q", "b": " ?"}
"""`struct`'s formats by the kind of a dtype and the bytes of a value."""
_BLANKS = b" \t\r\n"
_OPEN = ord("[")
_ELEMENTS: dict[str, type] = {"b": bool, "i": int, "u": int, "f": float}
_LITTLE = sys.byteorder == "little"
_SMALL_BYTES = 4096
"""A smaller array is copied faster than viewed."""
PIECE_BYTES = 2**20
"""A longer flat list is read in pieces: its numbers would take twenty times as much memory as Python objects."""
LENGTH_HEADER = b"inference-header-content-length"


def depth_of(text: bytes | bytearray | memoryview) -> int:
    """Lists that open before the first value, at most MAX_DEPTH + 1.

    >>> depth_of(b" [ [1, 2]]"), depth_of(b"3")
    (2, 0)
    """
    depth = 0
    for byte in text:
        if byte == _OPEN:
            depth += 1
            if depth > MAX_DEPTH:
                break
        elif byte not in _BLANKS:
            break
    return depth


@lru_cache(maxsize=256)
def _decoder(kind: str, depth: int) -> msgspec.json.Decoder[Any]:
    nested: Any = _ELEMENTS[kind]
    for _ in range(depth):
        nested = list[nested]
    return msgspec.json.Decoder(nested)


def _struct_format(count: int, dtype: np.dtype[np.generic]) -> str:
    return f"={count}{_CODES[dtype.kind][dtype.itemsize]}"


def most_bytes(shape: Sequence[int]) -> int:
    """Bytes of JSON that the values of `shape` usually need at most; a longer text is counted before it is read."""
    return 64 * math.prod(shape) + 1024


class FlatReader:
    """Reads a flat list of `count` values into the bytes of an array of `dtype`."""

    __slots__ = ("_count", "_decode", "_most", "_pack")

    def __init__(self, count: int, dtype: np.dtype[np.generic]) -> None:
        self._count = count
        self._most = most_bytes((count,))
        self._decode = _decoder(dtype.kind, 1).decode
        self._pack = struct.Struct(_struct_format(count, dtype)).pack

    def __call__(self, text: memoryview) -> bytes | None:
        """None for what `parse` would reject, and for another count."""
        if len(text) > self._most:
            return None
        try:
            values = self._decode(text)
            return self._pack(*values) if len(values) == self._count else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, struct.error):
            return None


def parse(text: msgspec.Raw | bytes | memoryview, datatype: str, depth: int, name: str) -> Array:
    """The array of input `name` from JSON `text` with `depth` nested lists. Raises RequestError."""
    if depth > MAX_DEPTH:
        raise RequestError(f"data of input '{name}' nests more than {MAX_DEPTH} lists")
    if depth == 1 and len(view := memoryview(text)) > PIECE_BYTES:
        return np.concatenate([_parse_piece(piece, datatype, 1, name) for piece in _split_flat(view, name)])
    return _parse_piece(text, datatype, depth, name)


def _parse_piece(text: msgspec.Raw | bytes | memoryview, datatype: str, depth: int, name: str) -> Array:
    """A piece may be long: it has one number at least, of any number of digits."""
    dtype = NUMPY_DTYPES[datatype]
    try:
        values = _decoder(dtype.kind, depth).decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"data of input '{name}' is no {depth}-fold list of {datatype}: {error}") from error
    try:
        if depth == 1 and dtype.kind == "f" and values:
            packed = struct.pack(_struct_format(len(values), dtype), *values)
            return np.frombuffer(packed, dtype)  # in half the time of np.array
        if dtype.kind != "f":
            return np.array(values, dtype=dtype)
        with np.errstate(over="raise"):
            return np.array(values, dtype=dtype)
    except (OverflowError, FloatingPointError) as error:
        raise RequestError(f"data of input '{name}' has a value out of the range of {datatype}") from error
    except ValueError as error:
        raise RequestError(f"data of input '{name}' is ragged: its lists differ in length") from error


def _split_flat(text: memoryview, name: str) -> Iterator[bytes]:
    """A long list without lists in it as shorter ones, so that no more values than theirs are objects at a time.

    Raises RequestError for what cannot be one.
    """
    whole = bytes(text)
    begin, end = whole.find(b"[") + 1, whole.rfind(b"]")
    while begin <= end:
        comma = whole.find(b",", begin + PIECE_BYTES // 2, end)
        cut = end if comma < 0 else comma
        piece = whole[begin:cut]
        if not piece.strip():
            raise RequestError(f"data of input '{name}' is no list: it has a comma too many")
        yield b"[%b]" % piece
        begin = cut + 1


def format_size(number: int) -> str:
    """For messages: a client may name any number."""
    return str(number) if abs(number) < 10**20 else ("more than 10^20" if number > 0 else "less than -10^20")


def header_length(given: bytes, num_bytes: int) -> int:
    """Bytes of JSON at the head of a body of `num_bytes`. Raises RequestError.

    >>> header_length(b"12", 100)
    12
    """
    if not given.isdigit() or len(given) > 18 or int(given) > num_bytes:
        text = given[:32].decode("latin-1")
        raise RequestError(f"inference header size should be in range (0, {num_bytes}), got: {text}")
    return int(given)


class Tail:
    """The tensors behind the JSON, read one after the other."""

    __slots__ = ("_at", "_bytes")

    def __init__(self, body: bytes | bytearray | memoryview) -> None:
        self._bytes = memoryview(body)
        self._at = 0

    def take(self, name: str, datatype: str, shape: Sequence[int], size: object) -> Array:
        """The next `size` bytes as an array. Raises RequestError if they do not fit the shape."""
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise RequestError(f"binary_data_size of input '{name}' is no number of bytes")
        piece = self._bytes[self._at : self._at + size]
        self._at += size
        return array_of(name, datatype, shape, piece)

    def check_empty(self) -> None:
        """Raises RequestError if bytes are left over."""
        left = len(self._bytes) - self._at
        if left:
            raise RequestError(f"unexpected additional input data: {left} bytes belong to no input")


def array_of(name: str, datatype: str, shape: Sequence[int], piece: bytes | memoryview) -> Array:
    """The bytes of input `name` as an array. Raises RequestError if they do not fit the shape."""
    dtype = NUMPY_DTYPES[datatype]
    size = math.prod(shape) * dtype.itemsize
    if len(piece) != size:
        raise RequestError(
            f"unexpected size for input '{name}': {len(piece)} bytes, its shape says {format_size(size)}"
        )
    if dtype.kind == "b" and len(piece) and int(np.frombuffer(piece, np.uint8).max()) > 1:
        raise RequestError(f"input '{name}' is BOOL and holds bytes other than 0 and 1")
    array: Array = np.frombuffer(piece, dtype.newbyteorder("<"))
    if array.dtype != dtype or not array.flags.aligned:  # a big-endian machine, or an unaligned place in the body
        array = array.astype(dtype)
    return array.reshape(shape)


def raw_input(body: bytes | bytearray | memoryview, signature: Signature) -> dict[str, Array]:
    """The only input of a raw request, whose number of bytes gives its free dimension. Raises RequestError."""
    if len(signature.inputs) != 1:
        raise RequestError(f"a raw request needs a model of one input, this one has {len(signature.inputs)}")
    spec = signature.inputs[0]
    return {spec.name: Tail(body).take(spec.name, spec.datatype, _raw_shape(spec, len(body)), len(body))}


def _raw_shape(spec: TensorSpec, num_bytes: int) -> list[int]:
    free = [axis for axis, size in enumerate(spec.shape) if isinstance(size, str)]
    if len(free) > 2 or (len(free) == 2 and free[0] != 0):
        raise RequestError(f"a raw request has at most one free dimension beside the batch, '{spec.name}' has more")
    shape = [size if isinstance(size, int) else 1 for size in spec.shape]
    row = math.prod(shape) * spec.dtype.itemsize
    if free:
        if not row or num_bytes % row:
            raise RequestError(f"unexpected size for input '{spec.name}': {num_bytes} bytes are no multiple of {row}")
        shape[free[-1]] = num_bytes // row
    return shape


def as_bytes(name: str, array: Array) -> bytes | memoryview:
    """The array as the protocol sends it. Raises RequestError for a dtype that the protocol does not have."""
    if array.dtype not in DATATYPES:
        raise RequestError(f"output '{name}' has dtype {array.dtype}, which the protocol does not have")
    if _LITTLE and array.nbytes <= _SMALL_BYTES:
        return array.tobytes()
    little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    return little.reshape(-1).view(np.uint8).data
