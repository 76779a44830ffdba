"""Fitted columns in words, for pages and for `trueline bundle inspect`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trueline.columns.encoders import (
    FittedCategory,
    FittedColumn,
    FittedImage,
    FittedLabel,
    FittedNumber,
    FittedSeries,
    FittedText,
)
from trueline.columns.fitted import FittedColumns

HEAD = ("column", "is", "as fitted to the training records")
_NAMED = 8
"""Values that are listed by name."""
_SCALES = {"standard": ", scaled to mean 0 and deviation 1", "minmax": ", scaled to 0 to 1", "none": ""}


def rows_of(fitted: FittedColumns) -> list[tuple[str, str, str]]:
    """A row for each column: its name, its declaration's kind, and what it takes and how."""
    return [(one.name, type(one.declared).__name__, "; ".join(_facts(one, fitted.records))) for one in fitted.columns]


def _facts(column: FittedColumn, records: int) -> Iterable[str]:
    if isinstance(column, FittedNumber):
        yield f"{column.low:g} to {column.high:g}{_SCALES[column.declared.scale]}"
        rule = column.declared.missing
        filled = "is an error" if column.fill is None else f"becomes {column.fill:g}"
        yield f"a missing value {filled}{f', the {rule}' if rule in ('mean', 'median') else ''}"
    elif isinstance(column, FittedSeries):
        longest = f"longest had {column.longest}, and longer ones than {column.length} are cut"
        yield f"lists of numbers from {column.low:g} to {column.high:g}{_SCALES[column.declared.scale]}; the {longest}"
    elif isinstance(column, FittedCategory):
        yield f"{len(column.values)} values: {_list(column.values)}; others are unseen"
    elif isinstance(column, FittedText):
        yield f"{len(column.words)} {column.declared.unit}; texts longer than {column.length} are cut"
    elif isinstance(column, FittedImage):
        height, width = column.declared.height_width
        yield f"{'grey' if column.declared.channels == 1 else 'RGB'}, resized to {height} x {width}"
    elif column.declared.number:
        yield f"a number from {column.low:g} to {column.high:g}{_SCALES[column.declared.scale]}"
    else:
        counted = column.counts or [0] * len(column.classes)
        named = [f"{name} ({count})" for name, count in zip(column.classes, counted, strict=True)]
        yield f"{len(column.classes)} classes, with their records: {_list(named)}"
    if column.missing and not isinstance(column, FittedLabel):
        yield f"{column.missing} of {records} records had no value"


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(name[:32] for name in names[:_NAMED]) + more
