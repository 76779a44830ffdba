"""Tensors as raw bytes behind the JSON of a request: the protocol's binary tensor extension. Pure.

    Inference-Header-Content-Length: 123      the body's first 123 bytes are JSON, the rest are tensors in its order
    parameters.binary_data_size of an input   how many bytes are its own: little-endian, row-major, BOOL one byte each
    parameters.binary_data of an output       asks for that output as bytes; binary_data_output of the request for all

A length of 0 is a raw request: the whole body is the one input. Numbers are not copied: the arrays lie in the body.
Source: Triton's extension_binary_data page.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trueline.bundle.signature import DATATYPES, NUMPY_DTYPES, Signature, TensorSpec
from trueline.errors import RequestError

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

_LITTLE = sys.byteorder == "little"
_SMALL_BYTES = 4096
"""Of an array that is sooner copied than viewed."""
LENGTH_HEADER = b"inference-header-content-length"


def header_length(given: bytes, num_bytes: int) -> int:
    """Bytes of JSON at the head of a body of `num_bytes`. Raises RequestError.

    >>> header_length(b"12", 100)
    12
    """
    if not given.isdigit() or len(given) > 18 or int(given) > num_bytes:
        said = given[:32].decode("latin-1")
        raise RequestError(f"inference header size should be in range (0, {num_bytes}), got: {said}")
    return int(given)


class Tail:
    """The tensors behind the JSON, taken one after the other."""

    __slots__ = ("_at", "_bytes")

    def __init__(self, body: bytes | bytearray | memoryview) -> None:
        self._bytes = memoryview(body)
        self._at = 0

    def take(self, name: str, datatype: str, shape: Sequence[int], size: object) -> Array:
        """The next `size` bytes as an array. Raises RequestError when they are not what the shape says."""
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise RequestError(f"binary_data_size of input '{name}' is no number of bytes")
        piece = self._bytes[self._at : self._at + size]
        self._at += size
        return array_of(name, datatype, shape, piece)

    def check_empty(self) -> None:
        """Raises RequestError when bytes are left that belong to no input."""
        left = len(self._bytes) - self._at
        if left:
            raise RequestError(f"unexpected additional input data: {left} bytes belong to no input")


def array_of(name: str, datatype: str, shape: Sequence[int], piece: bytes | memoryview) -> Array:
    """The bytes of input `name` as an array. Raises RequestError when they are not what the shape says."""
    dtype = NUMPY_DTYPES[datatype]
    wanted = math.prod(shape) * dtype.itemsize
    if len(piece) != wanted:
        raise RequestError(f"unexpected size for input '{name}': {len(piece)} bytes, its shape says {_short(wanted)}")
    return _array(name, memoryview(piece), dtype).reshape(shape)


def _short(number: int) -> str:
    return str(number) if number < 10**20 else "more than 10^20"


def _array(name: str, piece: memoryview, dtype: np.dtype[np.generic]) -> Array:
    if dtype.kind == "b" and len(piece) and int(np.frombuffer(piece, np.uint8).max()) > 1:
        raise RequestError(f"input '{name}' is BOOL and holds bytes other than 0 and 1")
    little = dtype.newbyteorder("<")
    array: Array = np.frombuffer(piece, little)
    if array.dtype != dtype or not array.flags.aligned:  # a big-endian machine, or an odd place in the body
        return array.astype(dtype)
    return array


def raw_input(body: bytes | bytearray | memoryview, signature: Signature) -> dict[str, Array]:
    """The one input of a raw request: its free dimension follows from the number of bytes. Raises RequestError."""
    if len(signature.inputs) != 1:
        raise RequestError(f"a raw request is for models of one input, this one takes {len(signature.inputs)}")
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
    """The array's numbers as the wire has them. Raises RequestError for a dtype that the protocol has no word for."""
    if array.dtype not in DATATYPES:
        raise RequestError(f"output '{name}' has dtype {array.dtype}, which the protocol does not know")
    if _LITTLE and array.nbytes <= _SMALL_BYTES:
        return array.tobytes()
    little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    return little.reshape(-1).view(np.uint8).data
