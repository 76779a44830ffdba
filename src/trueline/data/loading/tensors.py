"""Columns of records as tensors, for a `feed`.

    from trueline.data.loading.tensors import tensor

    def feed(records, mode):                    # a pyarrow.Table
        return tensor(records["image"]), tensor(records["label"])

Each table is in memory of its own, so a tensor is a writable view of it. Read-only memory (a mapped file, Python bytes)
is copied. torch is imported at the first call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trueline.errors import DataError

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]

_BINARY = {pa.lib.Type_BINARY, pa.lib.Type_LARGE_BINARY, pa.lib.Type_FIXED_SIZE_BINARY}
_LISTS = {pa.lib.Type_LIST, pa.lib.Type_LARGE_LIST, pa.lib.Type_FIXED_SIZE_LIST}
_DTYPES = {
    kind.id: np.dtype(kind.to_pandas_dtype())
    for kind in (
        pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(),
        pa.float16(), pa.float32(), pa.float64(),
    )
}  # fmt: skip
_CHUNKED = pa.ChunkedArray
_BYTE, _INT32, _INT64 = np.dtype(np.uint8), np.dtype(np.int32), np.dtype(np.int64)
FEED = "write feed(records, mode) -> (inputs, labels), where records is a pyarrow.Table"


def tensor(column: pa.ChunkedArray | pa.Array, name: str = "") -> torch.Tensor:
    """The values of `column` in their own dtype.

    Numbers and booleans become [n]; lists of numbers of one length [n, length, ...]; binary of one length uint8
    [n, length]. Raises DataError that names the column `name` for missing values, several lengths and other types.
    """
    from_numpy = _from_numpy()
    array = column.chunk(0) if type(column) is _CHUNKED and column.num_chunks == 1 else _in_one_piece(column)
    if array.null_count:
        raise DataError(f"column '{name}' has {array.null_count} records without a value", hint=FEED)
    kind = array.type
    dtype = _DTYPES.get(kind.id)
    if dtype is not None:  # most columns
        return from_numpy(_numbers(array, dtype))
    if kind.id in _BINARY:
        return from_numpy(_bytes(array, kind, name))
    shape = [len(array)]
    while is_list(kind):
        fixed = pa.types.is_fixed_size_list(kind)
        shape.append(int(kind.list_size) if fixed else _one_length(array.offsets.to_numpy(), name, "lists"))
        array = array.flatten()
        kind = array.type
        if array.null_count:
            raise DataError(f"column '{name}' has lists with {array.null_count} missing values", hint=FEED)
    values = _values(array, name)
    return from_numpy(values if len(shape) == 1 else values.reshape(*shape, *values.shape[1:]))


@lru_cache(maxsize=1)
def _from_numpy() -> Callable[[Array], torch.Tensor]:
    import torch

    return torch.from_numpy


def is_list(kind: pa.DataType) -> bool:
    return kind.id in _LISTS


def is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _in_one_piece(column: pa.ChunkedArray | pa.Array) -> Any:
    if not isinstance(column, pa.ChunkedArray):
        return column
    whole = column.combine_chunks()
    return whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole


def _one_length(offsets: Any, name: str, what: str) -> int:
    """The length of every value between `offsets`. Raises DataError."""
    count = len(offsets) - 1
    if count < 1:
        return 0
    first = int(offsets[0])
    length = (int(offsets[count]) - first) // count
    if offsets.tobytes() != _even(count, length, first, offsets.dtype.char):
        lengths = np.diff(offsets)
        low, high = lengths.min(), lengths.max()
        raise DataError(f"column '{name}' has {what} of several lengths, from {low} to {high}", hint=FEED)
    return length


@lru_cache(maxsize=64)
def _even(count: int, length: int, first: int, dtype: str) -> bytes:
    """The offsets of `count` values of one length, which are the same in most batches."""
    return (first + np.arange(count + 1) * length).astype(dtype).tobytes()


def _values(array: Any, name: str) -> Array:
    """Of an array without lists and nulls: numbers [n], bytes [n, length]."""
    kind = array.type
    dtype = _DTYPES.get(kind.id)
    if dtype is not None:
        return _numbers(array, dtype)
    if kind.id in _BINARY:
        return _bytes(array, kind, name)
    if not pa.types.is_boolean(kind):  # bits in Arrow
        raise DataError(f"column '{name}' is {kind}, which makes no tensor by itself", hint=FEED)
    bits: Array = array.to_numpy(zero_copy_only=False)
    return bits


def _numbers(array: Any, dtype: np.dtype[Any]) -> Array:
    return _view(array.buffers()[1], dtype, array.offset * dtype.itemsize, (len(array),))


def _bytes(array: Any, kind: Any, name: str) -> Array:
    """Binary values of one length, [n, length]."""
    count = len(array)
    if kind.id == pa.lib.Type_FIXED_SIZE_BINARY:
        width = kind.byte_width
        return _view(array.buffers()[1], _BYTE, array.offset * width, (count, width))
    if not count:
        return np.empty((0, 0), np.uint8)
    _, places, buffer = array.buffers()
    item = _INT64 if kind.id == pa.lib.Type_LARGE_BINARY else _INT32
    offsets = np.ndarray((count + 1,), item, places, array.offset * item.itemsize)
    return _view(buffer, _BYTE, int(offsets[0]), (count, _one_length(offsets, name, "values")))


def _view(buffer: Any, dtype: np.dtype[Any], at: int, shape: tuple[int, ...]) -> Array:
    """An array over `buffer` from byte `at`; a copy of a read-only buffer."""
    if not math.prod(shape):
        return np.empty(shape, dtype)
    array: Array = np.ndarray(shape, dtype, buffer, at)
    return array if array.flags.writeable else array.copy()
