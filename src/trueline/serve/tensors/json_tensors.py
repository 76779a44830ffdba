"""JSON text to arrays and back, strictly: a value that the datatype cannot hold is refused, never bent.

Pure. An integer is a fine FP number; a fraction, a boolean or an integer out of range is no INT. A number too large
for its FP type is refused (JSON has no infinity, so nobody asked for one). In answers NaN and the infinities become
`null`, since JSON has no word for them.
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
"""No input has more dimensions."""
_CODES = {2: "e", 4: "f", 8: "d"}
"""By bytes of a float, `struct`'s word for it."""
_BLANKS = b" \t\r\n"
_OPEN = ord("[")
_ELEMENTS: dict[str, type] = {"b": bool, "i": int, "u": int, "f": float}


def depth_of(text: bytes | bytearray | memoryview) -> int:
    """How many lists open before the first value; at most MAX_DEPTH + 1.

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
    wanted: Any = _ELEMENTS[kind]
    for _ in range(depth):
        wanted = list[wanted]
    return msgspec.json.Decoder(wanted)


@lru_cache(maxsize=256)
def _packer(count: int, itemsize: int) -> struct.Struct:
    return struct.Struct(f"<{count}{_CODES[itemsize]}")


class Flat:
    """Reads a flat list of `count` floats into the bytes that an array of `dtype` has on this machine."""

    __slots__ = ("_count", "_decode", "_pack")

    def __init__(self, count: int, dtype: np.dtype[np.generic]) -> None:
        self._count = count
        self._decode = _decoder("f", 1).decode
        self._pack = struct.Struct(f"={count}{_CODES[dtype.itemsize]}").pack

    def __call__(self, text: memoryview) -> bytes | None:
        """None for anything that `parse` would refuse, and for another count."""
        try:
            values = self._decode(text)
            return self._pack(*values) if len(values) == self._count else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
            return None


def _packed(values: list[float], dtype: np.dtype[np.generic]) -> Array:
    """`np.array(values, dtype)` of floats, in half of its time. Raises OverflowError."""
    packed = _packer(len(values), dtype.itemsize).pack(*values)
    return np.frombuffer(packed, dtype.newbyteorder("<")).astype(dtype, copy=False)


def parse(text: msgspec.Raw | bytes | memoryview, datatype: str, depth: int, name: str) -> Array:
    """The array of input `name` whose JSON `text` nests `depth` lists of numbers. Raises RequestError."""
    if depth > MAX_DEPTH:
        raise RequestError(f"data of input '{name}' nests more than {MAX_DEPTH} lists")
    dtype = NUMPY_DTYPES[datatype]
    try:
        values = _decoder(dtype.kind, depth).decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"data of input '{name}' is no {depth}-fold list of {datatype}: {error}") from error
    try:
        if depth == 1 and dtype.kind == "f" and values:
            return _packed(values, dtype)
        if dtype.kind != "f":
            return np.array(values, dtype=dtype)
        with np.errstate(over="raise"):
            return np.array(values, dtype=dtype)
    except (OverflowError, FloatingPointError) as error:
        raise RequestError(f"data of input '{name}' has a value out of the range of {datatype}") from error
    except ValueError as error:
        raise RequestError(f"data of input '{name}' is ragged: its lists differ in length") from error


def flat(array: Array) -> list[Any]:
    """The values in row-major order, for JSON."""
    values: list[Any] = array.ravel().tolist()
    return values
