"""JSON text to arrays, strictly: a value that the datatype cannot represent is rejected, never converted. Pure.

FP inputs accept integers, and reject numbers too large for the type. INT inputs reject fractions, booleans and
out-of-range values; BOOL inputs reject 0 and 1.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from trueline.bundle.signature import NUMPY_DTYPES
from trueline.errors import RequestError

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

MAX_DEPTH = 32
"""Dimensions of an input."""
_CODES = {2: "e", 4: "f", 8: "d"}
"""`struct`'s format of a float by its bytes."""
_BLANKS = b" \t\r\n"
_OPEN = ord("[")
_ELEMENTS: dict[str, type] = {"b": bool, "i": int, "u": int, "f": float}


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


class FlatReader:
    """Reads a flat list of `count` floats into the bytes of an array of `dtype`."""

    __slots__ = ("_count", "_decode", "_pack")

    def __init__(self, count: int, dtype: np.dtype[np.generic]) -> None:
        self._count = count
        self._decode = _decoder("f", 1).decode
        self._pack = struct.Struct(f"={count}{_CODES[dtype.itemsize]}").pack

    def __call__(self, text: memoryview) -> bytes | None:
        """None for what `parse` would reject, and for another count."""
        try:
            values = self._decode(text)
            return self._pack(*values) if len(values) == self._count else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
            return None


def parse(text: msgspec.Raw | bytes | memoryview, datatype: str, depth: int, name: str) -> Array:
    """The array of input `name` from JSON `text` with `depth` nested lists. Raises RequestError."""
    if depth > MAX_DEPTH:
        raise RequestError(f"data of input '{name}' nests more than {MAX_DEPTH} lists")
    dtype = NUMPY_DTYPES[datatype]
    try:
        values = _decoder(dtype.kind, depth).decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"data of input '{name}' is no {depth}-fold list of {datatype}: {error}") from error
    try:
        if depth == 1 and dtype.kind == "f" and values:
            packed = struct.pack(f"={len(values)}{_CODES[dtype.itemsize]}", *values)
            return np.frombuffer(packed, dtype)  # in half the time of np.array
        if dtype.kind != "f":
            return np.array(values, dtype=dtype)
        with np.errstate(over="raise"):
            return np.array(values, dtype=dtype)
    except (OverflowError, FloatingPointError) as error:
        raise RequestError(f"data of input '{name}' has a value out of the range of {datatype}") from error
    except ValueError as error:
        raise RequestError(f"data of input '{name}' is ragged: its lists differ in length") from error


def format_size(number: int) -> str:
    """For messages: a client may name any number."""
    return str(number) if abs(number) < 10**20 else ("more than 10^20" if number > 0 else "less than -10^20")
