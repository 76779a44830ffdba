"""Columns of records as tensors: what a `feed` begins with.

    from trueline.data.tensors import tensor

    def feed(records, mode):                    # a pyarrow.Table
        return tensor(records["image"]), tensor(records["label"])

A source gives each table in memory that is nobody else's, so a tensor is a view of it and may be written. Memory that
must not be written (a mapped file, a Python bytes) is copied. torch is imported at the first call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from trueline.errors import DataError

if TYPE_CHECKING:
    import torch

FEED = "write feed(records, mode) -> (inputs, labels), where records is a pyarrow.Table"


def tensor(column: pa.ChunkedArray | pa.Array, name: str = "") -> torch.Tensor:
    """The values of `column`, record by record, in the dtype that they have there.

    Numbers and booleans become [n]; lists of numbers, all of one length, [n, length, ...]; binary, all of one length,
    uint8 [n, length]. Raises DataError, which names the column `name`, for missing values, for several lengths and for
    everything else.
    """
    array = _in_one_piece(column)
    shape = [len(array)]
    if array.null_count:
        raise DataError(f"column '{name}' has {array.null_count} records without a value", hint=FEED)
    while is_list(array.type):
        shape.append(_list_length(array, name))
        array = array.flatten()
        if array.null_count:
            raise DataError(f"column '{name}' has lists with {array.null_count} missing values", hint=FEED)
    if _is_binary(array.type):
        return _bytes(array, shape, name)
    return _values(array, name).reshape(shape)


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _in_one_piece(column: pa.ChunkedArray | pa.Array) -> Any:
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    whole = column.combine_chunks()
    return whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole


def _list_length(array: Any, name: str) -> int:
    if pa.types.is_fixed_size_list(array.type):
        return int(array.type.list_size)
    return _one_length(array.offsets.to_numpy(), name, "lists")


def _one_length(offsets: Any, name: str, what: str) -> int:
    """The length of each value, of values that lie between `offsets`."""
    length = int(offsets[1]) - int(offsets[0]) if len(offsets) > 1 else 0
    lengths = offsets[1:] - offsets[:-1]
    if (lengths != length).any():
        low, high = lengths.min(), lengths.max()
        raise DataError(f"column '{name}' has {what} of several lengths, from {low} to {high}", hint=FEED)
    return length


def _bytes(array: Any, shape: list[int], name: str) -> torch.Tensor:
    if pa.types.is_fixed_size_binary(array.type):
        width, buffer = array.type.byte_width, array.buffers()[1]
        return _view(buffer, "uint8", array.offset * width, len(array) * width).reshape(*shape, width)
    _, places, buffer = array.buffers()
    item = np.int64 if pa.types.is_large_binary(array.type) else np.int32
    if not len(array):
        return _view(None, "uint8", 0, 0).reshape(*shape, 0)
    offsets = np.frombuffer(places, item, len(array) + 1, array.offset * np.dtype(item).itemsize)
    width = _one_length(offsets, name, "values")
    return _view(buffer, "uint8", int(offsets[0]), len(array) * width).reshape(*shape, width)


def _values(array: Any, name: str) -> torch.Tensor:
    if not is_number(array.type):
        raise DataError(f"column '{name}' is {array.type}, which makes no tensor by itself", hint=FEED)
    if pa.types.is_boolean(array.type):  # bits in Arrow
        import torch

        return torch.from_numpy(array.to_numpy(zero_copy_only=False))
    dtype = np.dtype(array.type.to_pandas_dtype())
    return _view(array.buffers()[1], dtype.name, array.offset * dtype.itemsize, len(array) * dtype.itemsize)


def _view(buffer: Any, dtype: str, start: int, num_bytes: int) -> torch.Tensor:
    """`num_bytes` of `buffer` from the byte `start` on, flat; a copy where the buffer must not be written."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    if not num_bytes:
        return torch.empty(0, dtype=kind)
    if not buffer.is_mutable:
        buffer, start = bytearray(memoryview(buffer)[start : start + num_bytes]), 0
    return torch.frombuffer(buffer, dtype=kind, count=num_bytes // kind.itemsize, offset=start)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))
