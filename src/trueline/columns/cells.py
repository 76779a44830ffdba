"""Values of a column in one form, whether they come from a table (Arrow) or from the rows of a request (JSON).

Numbers become float64 with NaN where there is none, categories canonical texts, texts and images str and bytes. Raises
DataError that names the column, what was expected and what was received. Only functions of Arrow arrays import pyarrow.
"""

from __future__ import annotations

import base64
import binascii
import math
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from trueline.errors import DataError, closest, join_names

if TYPE_CHECKING:
    import pyarrow as pa

Floats = npt.NDArray[np.float64]
ValueKind = Literal["text", "whole", "number", "boolean", "binary", "list", "other"]
"""What a column held when it was fitted; requests have to send the same."""
NULL_SPELLINGS = frozenset(
    ["", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "N/A", "NA", "NULL",
     "NaN", "n/a", "nan", "null"]
)  # fmt: skip
"""Cells of CSV that are no value. Source: pyarrow.csv.ConvertOptions.null_values, with which CSV is read."""
_EXPECTED = {
    "text": "text", "whole": "a whole number", "number": "a number", "boolean": "true or false",
    "binary": "base64 text", "other": "text", "list": "a list of numbers",
}  # fmt: skip


def kind_of(dtype: pa.DataType) -> ValueKind:
    import pyarrow as pa

    inner = dtype.value_type if pa.types.is_dictionary(dtype) else dtype
    if pa.types.is_string(inner) or pa.types.is_large_string(inner):
        return "text"
    if pa.types.is_boolean(inner):
        return "boolean"
    if pa.types.is_integer(inner):
        return "whole"
    if pa.types.is_floating(inner) or pa.types.is_decimal(inner):
        return "number"
    if pa.types.is_binary(inner) or pa.types.is_large_binary(inner) or pa.types.is_fixed_size_binary(inner):
        return "binary"
    if is_list_type(inner) and kind_of(inner.value_type) in ("whole", "number"):
        return "list"
    return "other"


def is_list_type(dtype: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype))


def category_key(value: object) -> str | None:
    """The canonical text of a category; None for no value. A whole number is the same as int and as float, since
    a column of whole numbers with an empty cell is read as one of floats.

    >>> category_key(3), category_key(3.0), category_key(True), category_key(""), category_key("São")
    ('3', '3', 'true', None, 'São')
    """
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return repr(value) if isinstance(value, float) else str(value)


def describe(value: object) -> str:
    """A cell for messages: `the text 'abc'`."""
    names = {"str": "text", "int": "whole number", "float": "number", "bool": "truth value", "list": "list"}
    name = names.get(type(value).__name__, "object")
    return f"the {name} {str(value)[:32]!r}" if isinstance(value, str | int | float) else f"a {name}"


def wrong(column: str, row: int, kind: str, value: object) -> DataError:
    return DataError(f"column '{column}' of record {row}: expected {_EXPECTED.get(kind, kind)}, got {describe(value)}")


def expect_columns(declared: Iterable[str], there: Sequence[str]) -> None:
    """Raises DataError for a column that the records lack, with the nearest name that they have."""
    for name in declared:
        if name not in there:
            near = closest(name, there)
            raise DataError(
                f"the recipe declares column '{name}', and the records have {join_names(there)}",
                hint=f"did you mean '{near}'?" if near else "",
            )


def one_array(column: Any) -> Any:
    """The values of a column of a table as one array without a dictionary."""
    import pyarrow as pa

    array = column
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # a table without rows
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def numbers_of_array(array: Any, column: str, offset: int = -1) -> Floats:
    """[n] NaN for no value. Raises DataError for an array of anything but numbers, and for infinite ones; `offset`: the
    number of its first record among all, if that is known."""
    import pyarrow as pa

    if kind_of(array.type) not in ("whole", "number", "boolean") and not pa.types.is_null(array.type):
        raise DataError(
            f"column '{column}' is {array.type}, expected numbers",
            hint=f'declare it as Category() or Text(), e.g. columns = {{"{column}": Category()}}',
        )
    if pa.types.is_decimal(array.type) or pa.types.is_boolean(array.type) or pa.types.is_null(array.type):
        array = array.cast(pa.float64())
    values = np.asarray(array.to_numpy(zero_copy_only=False), np.float64)
    infinite = np.flatnonzero(np.isinf(values))
    if len(infinite):
        first = int(infinite[0])
        where = f"record {first} of its batch" if offset < 0 else f"row {offset + first + 1}"
        raise DataError(
            f"column '{column}' has an infinite number, first in {where}",
            hint='correct it, or leave the cell empty and declare what stands in its place: Number(missing="mean")',
        )
    return values


def numbers_of_cells(cells: Sequence[object], column: str, kind: ValueKind) -> Floats:
    """[n] NaN for no value. Raises DataError."""
    values = np.empty(len(cells), np.float64)
    for row, cell in enumerate(cells):
        if cell is None:
            values[row] = math.nan
        elif isinstance(cell, bool) != (kind == "boolean") or not isinstance(cell, int | float):
            raise wrong(column, row, "boolean" if kind == "boolean" else "number", cell)
        else:
            try:
                values[row] = cell
            except OverflowError as error:
                raise wrong(column, row, "a number that float64 holds", cell) from error
            if math.isinf(values[row]):
                raise wrong(column, row, "a finite number", cell)
    return values


def keys_of_cells(cells: Sequence[object], column: str, kind: ValueKind) -> list[str | None]:
    """Categories. Raises DataError for a cell of another type than the column had."""
    for row, cell in enumerate(cells):
        if cell is None or cell == "":
            continue
        fits = {
            "boolean": isinstance(cell, bool),
            "whole": not isinstance(cell, bool) and (isinstance(cell, int) or _is_whole(cell)),
            "number": not isinstance(cell, bool) and isinstance(cell, int | float),
        }.get(kind, isinstance(cell, str))
        if not fits:
            raise wrong(column, row, kind, cell)
    return [category_key(cell) for cell in cells]


def _is_whole(cell: object) -> bool:
    return isinstance(cell, float) and cell.is_integer()


def texts_of_cells(cells: Sequence[object], column: str) -> list[str | None]:
    for row, cell in enumerate(cells):
        if cell is not None and not isinstance(cell, str):
            raise wrong(column, row, "text", cell)
    return list(cells)  # type: ignore[arg-type]  # checked above


def bytes_of_cells(cells: Sequence[object], column: str) -> list[bytes | None]:
    """Images, of base64 texts."""
    found: list[bytes | None] = []
    for row, cell in enumerate(cells):
        if cell is not None and not isinstance(cell, str):
            raise wrong(column, row, "binary", cell)
        try:
            found.append(None if cell is None else base64.b64decode(cell, validate=True))
        except (binascii.Error, ValueError) as error:
            raise wrong(column, row, "binary", cell) from error
    return found


def cell_of_text(text: str, column: str, kind: ValueKind, row: int) -> object:
    """The cell that `text` of a CSV file is. Raises DataError."""
    if text.strip() in NULL_SPELLINGS:
        return None
    if kind == "boolean":
        if text.strip().lower() not in ("true", "false", "0", "1"):
            raise wrong(column, row, kind, text)
        return text.strip().lower() in ("true", "1")
    if kind in ("whole", "number"):
        try:
            return int(text)
        except ValueError:
            pass
        try:
            return float(text)
        except ValueError as error:
            raise wrong(column, row, kind, text) from error
    return text


def to_json(value: object) -> object:
    """A cell of a table as JSON has it: base64 for bytes, null for NaN, lists as lists, text for other values."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [to_json(one) for one in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
