"""Columns of records as tensors, for a `feed`, and the feed of recipes that have none (`DefaultFeed`).

    from trueline.data.loading.tensors import tensor

    def feed(records, mode):                    # a pyarrow.Table
        return tensor(records["image"]), tensor(records["label"])

Each table is in memory of its own, so a tensor is a writable view of it. Read-only memory (a mapped file, Python bytes)
is copied. torch is imported at the first call.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trueline.data.records import TEXT_BECAUSE
from trueline.data.source import Mode
from trueline.errors import DataError, MissingValues, UnequalLengths, join_names

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]

_BINARY = {pa.lib.Type_BINARY, pa.lib.Type_LARGE_BINARY, pa.lib.Type_FIXED_SIZE_BINARY}
_LISTS = {pa.lib.Type_LIST, pa.lib.Type_LARGE_LIST, pa.lib.Type_FIXED_SIZE_LIST}
_NUMBERS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
_DTYPES = {pa.type_for_alias(name).id: np.dtype(name) for name in _NUMBERS.split()}
_CHUNKED = pa.ChunkedArray
_BYTE, _INT32, _INT64 = np.dtype(np.uint8), np.dtype(np.int32), np.dtype(np.int64)
LABELS = ("label", "labels", "target", "targets", "y")
_ORIGIN = ("__key__", "path")
RULE = "set missing = 'mean', 'zero', 'category' or {column: value} in the recipe, or handle it in feed(records, mode)"
FEED = "write feed(records, mode) -> (inputs, labels), where records is a pyarrow.Table"


def tensor(column: pa.ChunkedArray | pa.Array, name: str = "") -> torch.Tensor:
    """The values of `column` in their own dtype.

    Numbers and booleans become [n]; lists of numbers of one length [n, length, ...]; binary of one length uint8
    [n, length]. Raises DataError that names the column `name` for missing values, several lengths and other types.
    """
    from_numpy = _from_numpy()
    array: Any = column
    if isinstance(column, _CHUNKED):
        whole = column if column.num_chunks == 1 else column.combine_chunks()
        array = whole.chunk(0) if isinstance(whole, _CHUNKED) else whole
    if array.null_count:
        raise MissingValues(f"column '{name}' has {array.null_count} records without a value", hint=RULE)
    shape = [len(array)]
    while (kind := array.type).id in _LISTS:
        fixed = kind.id == pa.lib.Type_FIXED_SIZE_LIST
        shape.append(int(kind.list_size) if fixed else _one_length(array.offsets.to_numpy(), name, "lists"))
        array = array.flatten()
        if array.null_count:
            raise MissingValues(f"column '{name}' has lists with {array.null_count} missing values", hint=FEED)
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


def _one_length(offsets: Any, name: str, what: str) -> int:
    """The length of every value between `offsets`. Raises UnequalLengths."""
    count = len(offsets) - 1
    if count < 1:
        return 0
    first = int(offsets[0])
    length = (int(offsets[count]) - first) // count
    if offsets.tobytes() != _even(count, length, first, offsets.dtype.char):
        lengths = np.diff(offsets)
        low, high = lengths.min(), lengths.max()
        series = f'declare columns = {{"{name}": Series(max_length={high}), ...}}, or ' if what == "lists" else ""
        raise UnequalLengths(f"column '{name}' has {what} of several lengths, from {low} to {high}", hint=series + FEED)
    return length


@lru_cache(maxsize=64)
def _even(count: int, length: int, first: int, dtype: str) -> bytes:
    """The offsets of `count` values of one length, which are the same in most batches."""
    return (first + np.arange(count + 1) * length).astype(dtype).tobytes()


def _values(array: Any, name: str) -> Array:
    """Of an array without lists and nulls: numbers [n], bytes [n, length]."""
    kind = array.type
    dtype = _DTYPES.get(kind.id)
    if dtype is not None:  # most columns
        return _view(array.buffers()[1], dtype, array.offset * dtype.itemsize, (len(array),))
    if kind.id in _BINARY:
        return _bytes(array, kind, name)
    if not pa.types.is_boolean(kind):  # bits in Arrow
        raise DataError(f"column '{name}' is {kind}, which makes no tensor by itself", hint=FEED)
    bits: Array = array.to_numpy(zero_copy_only=False)
    return bits


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


class DefaultFeed:
    """Makes tensors of records by their schema.

        column                                    tensor
        whole numbers, booleans                   int64, bool          [n]
        floating point                            float32              [n]
        lists of numbers of one length            as their items       [n, length, ...]
        binary that is images                     float32 in [0, 1]    [n, channels, height, width]   needs Pillow
        text with a tokenizer                     what it returns

    The column `label` (`labels`, `target`, `targets`, `y`) holds the labels; the others are inputs. A single input is
    passed as it is; several that are plain numbers become the columns of one float32 tensor; any other several are
    passed by name. A column that would need a guess is refused, and needs a `feed`. `tokenizer` takes the texts of
    columns of text. For vocabularies, categories, missing values and scales a recipe declares `columns` instead.
    """

    def __init__(self, tokenizer: Callable[[list[str]], Any] | None = None) -> None:
        self._tokenizer = tokenizer

    def check(self, schema: pa.Schema, mode: Mode) -> None:
        """Raises DataError for columns that make no tensors, before any record is read."""
        for name in self.columns(schema, mode):
            self._kind(schema.field(name))

    def columns(self, schema: pa.Schema, mode: Mode) -> list[str]:
        """The columns that it reads."""
        label, inputs = split_columns(schema, mode)
        return [*([label] if label else []), *inputs]

    def __call__(self, records: pa.Table, mode: Mode) -> tuple[Any, Any]:
        label, names = split_columns(records.schema, mode)
        labels = None if label is None else self._tensor(records, label)
        if len(names) == 1:
            return self._tensor(records, names[0]), labels
        kinds = {self._kind(records.schema.field(name)) for name in names}
        if kinds <= {"number"}:
            import torch

            inputs = torch.empty((len(records), len(names)), dtype=torch.float32)
            for number, name in enumerate(names):
                inputs[:, number] = tensor(records.column(name), name)
            return inputs, labels
        return {name: self._tensor(records, name) for name in names}, labels

    def _kind(self, field: pa.Field) -> str:
        kind = field.type
        if is_number(kind):
            return "number"
        inner = kind
        while is_list(inner):
            inner = inner.value_type
        if inner is not kind and is_number(inner):
            return "list"
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return "image"
        if _is_text(kind):
            if self._tokenizer is not None:
                return "text"
            why = (field.metadata or {}).get(TEXT_BECAUSE.encode(), b"").decode()
            correct = "correct the values (an empty cell or NA is a missing one), or " if "is no number" in why else ""
            raise DataError(
                f"column '{field.name}' is text{f': {why}' if why else ''}, and has no declaration",
                hint=f'{correct}declare columns = {{"{field.name}": Category(), ...}} (or Text(max_length=...)) with '
                "from trueline.columns import Category, Label, Number, Text",
            )
        raise DataError(f"column '{field.name}' is {kind}, which makes no tensor by itself", hint=FEED)

    def _tensor(self, records: pa.Table, name: str) -> Any:
        field, column = records.schema.field(name), records.column(name)
        if column.null_count:
            raise MissingValues(f"column '{name}' has {column.null_count} records without a value", hint=RULE)
        kind = self._kind(field)
        if kind in ("number", "list"):
            return _narrow(tensor(column, name), name)
        if kind == "image":
            return _from_numpy()(decode_images(column, name))
        texts = column.cast(pa.string()).to_pylist()
        assert self._tokenizer is not None
        return self._tokenizer(texts)


def split_columns(schema: pa.Schema, mode: Mode) -> tuple[str | None, list[str]]:
    """The column of the labels (None where a prediction has none) and those of the inputs. Raises DataError.

    >>> split_columns(pa.schema([("x", pa.float32()), ("label", pa.int64())]), "training")
    ('label', ['x'])
    """
    labels = [name for name in schema.names if name.lower() in LABELS]
    if len(labels) > 1:
        raise DataError(f"{join_names(labels)} could each be the labels", hint=FEED)
    if not labels and mode != "prediction":
        raise DataError(
            f"no column is the labels: the records have {join_names(schema.names)}",
            hint=f"name one of them {join_names(LABELS)}, or " + FEED,
        )
    label = labels[0] if labels else None
    inputs = [name for name in schema.names if name != label]
    if not inputs:
        raise DataError(f"the records have the labels '{label}' and nothing to learn from", hint=FEED)
    return label, [name for name in inputs if name not in _ORIGIN] or inputs


def decode_images(column: pa.ChunkedArray, name: str) -> Array:
    """Encoded images of one size as float32 [n, channels, height, width] in [0, 1]. Raises DataError."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise DataError(
            f"column '{name}' is binary, which is read as images, and Pillow is not installed",
            hint="pip install pillow, or " + FEED,
        ) from error
    arrays = []
    for number, content in enumerate(column):
        try:
            with Image.open(io.BytesIO(content.as_py())) as image:
                plain = image if image.mode in ("L", "RGB") else image.convert("RGB")
                arrays.append(np.asarray(plain, np.float32) / 255)
        except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
            raise DataError(f"record {number} of the batch is no image in column '{name}': {error}") from error
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise DataError(
            f"column '{name}' has images of {len(shapes)} sizes, e.g. {shapes[0]} and {shapes[-1]}",
            hint="store them in one size, or resize them: " + FEED,
        )
    stacked = np.stack(arrays)
    return stacked[:, None] if stacked.ndim == 3 else np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))


def _narrow(values: torch.Tensor, name: str) -> torch.Tensor:
    """Converts to the dtypes of models."""
    import torch

    if values.dtype.is_floating_point:
        return values.to(torch.float32)
    if values.dtype == torch.bool:
        return values
    narrow = values.to(torch.int64)
    if values.dtype == torch.uint64 and len(narrow) and int(narrow.min()) < 0:
        raise DataError(f"column '{name}' has whole numbers above 2**63 - 1, which int64 cannot hold", hint=FEED)
    return narrow


def _is_text(kind: pa.DataType) -> bool:
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(inner) or pa.types.is_large_string(inner))
