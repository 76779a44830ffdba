"""Lists of numbers, whether they come from a table (Arrow), from a text of CSV or from a request (JSON), in one form.

`Lists` holds the numbers of all lists behind one another, and the length of each. A gap inside of a list is NaN.
Raises DataError that names the column. Only functions of Arrow arrays import pyarrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trueline.columns import cells
from trueline.errors import DataError

_NONE = -1
_GAPS = cells.NULL_SPELLINGS | {"None"}
_SEPARATORS = (";", ",")
_LEAST = 3
"""A text of fewer numbers without brackets may be something else: a telephone number, a date."""
_EXAMPLE = "[1.5, 2, 3] or 1.5 2 3"


@dataclass(frozen=True, slots=True)
class Lists:
    """`numbers` float64, NaN for a gap; `sizes` int64 [n], of a list that is missing 0; `absent` bool [n]."""

    numbers: cells.Floats
    sizes: npt.NDArray[np.int64]
    absent: npt.NDArray[np.bool_]

    def count_gaps(self) -> npt.NDArray[np.int64]:
        """[n] gaps inside of each list."""
        ends = np.cumsum(self.sizes)
        before = np.concatenate([[0], np.cumsum(np.isnan(self.numbers))])
        return np.asarray(before[ends] - before[ends - self.sizes], np.int64)

    def pad(self, length: int, filling: float) -> tuple[cells.Floats, npt.NDArray[np.bool_]]:
        """float64 [n, length], cut and filled up, and where a number is."""
        column = np.arange(len(self.numbers)) - np.repeat(np.cumsum(self.sizes) - self.sizes, self.sizes)
        row = np.repeat(np.arange(len(self.sizes)), self.sizes)
        kept = (column < length) & ~np.isnan(self.numbers)
        values = np.full((len(self.sizes), length), filling, np.float64)
        mask = np.zeros(values.shape, bool)
        values[row[kept], column[kept]] = self.numbers[kept]
        mask[row[kept], column[kept]] = True
        return values, mask


def lists_of_array(array: Any, column: str) -> Lists:
    """The lists of an Arrow array of lists or of texts. Raises DataError."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = cells.kind_of(array.type)
    if kind == "text" or pa.types.is_null(array.type):
        return lists_of_cells(array.to_pylist(), column)
    if kind != "list":
        raise DataError(f"column '{column}' is {array.type}, expected lists of numbers")
    sizes = pc.list_value_length(array)
    absent = sizes.is_null().to_numpy(zero_copy_only=False)
    counts = sizes.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    numbers = cells.numbers_of_array(array.flatten(), column)
    return Lists(numbers, counts, absent)


def lists_of_cells(given: Sequence[object], column: str) -> Lists:
    """The lists of JSON's values, or of texts. Raises DataError."""
    sizes = np.zeros(len(given), np.int64)
    absent = np.zeros(len(given), bool)
    numbers: list[float] = []
    for row, cell in enumerate(given):
        if cell is None or cell == "":
            absent[row] = True
            continue
        parts = _split(cell) if isinstance(cell, str) else cell
        if not isinstance(parts, list):
            raise cells.wrong(column, row, "list", cell)
        sizes[row] = len(parts)
        allowed = str if isinstance(cell, str) else int | float
        numbers.extend(_number(part, allowed, column, row, at) for at, part in enumerate(parts))
    return Lists(np.array(numbers, np.float64), sizes, absent)


def _number(part: Any, allowed: Any, column: str, row: int, at: int) -> float:
    where = f"column '{column}' of record {row}: expected a number at place {at} of the list"
    if part is None or (allowed is str and part in _GAPS):
        return math.nan
    if isinstance(part, bool) or not isinstance(part, allowed):
        raise DataError(f"{where}, got {cells.describe(part)}")
    try:
        value = float(part)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{where}, got {cells.describe(part)}", hint=f"write lists as {_EXAMPLE}") from error
    if math.isinf(value):
        raise DataError(f"{where}, got {value}")
    return value


def _split(text: str) -> list[str]:
    """The parts of a list in a text; brackets may stand around it.

    >>> _split("[1.5, 2, 3]"), _split("1.5 2 3"), _split("1;2"), _split("[]"), _split("1,,3")
    (['1.5', '2', '3'], ['1.5', '2', '3'], ['1', '2'], [], ['1', '', '3'])
    """
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1].strip()
    if not inner:
        return []
    separator = next((one for one in _SEPARATORS if one in inner), None)
    return [part.strip() for part in inner.split(separator)]


def find_lists(texts: Sequence[str | None], column: str) -> Lists | None:
    """The lists of `texts` if each is one: in brackets, or of three numbers or more. None if one is something else.

    >>> [find_lists([text], "x") is not None for text in ("[1.5, null]", "3 4 5", "12 34", "1 - 2", "[a]")]
    [True, True, False, False, False]
    """
    for text in texts:
        if text and not text.lstrip().startswith("[") and len(_split(text)) < _LEAST:
            return None
    try:
        return lists_of_cells(texts, column)
    except DataError:
        return None
