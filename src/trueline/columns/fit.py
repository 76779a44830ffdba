"""Fits declared columns to records: one pass, in memory that depends on vocabularies and not on the number of records.

All counts and sums are exact, so neither the order nor the pieces in which the records come change the result. A median
needs three further passes over its columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueline.columns import cells
from trueline.columns.declared import Category, Declared, Image, Label, Number, Series, Text
from trueline.columns.encoders import (
    FittedCategory,
    FittedColumn,
    FittedImage,
    FittedLabel,
    FittedNumber,
    FittedSeries,
    FittedText,
    split_text,
)
from trueline.columns.fitted import FittedColumns
from trueline.columns.moments import ExactMoments, MedianSearch
from trueline.columns.series import lists_of_array
from trueline.errors import DataError, MissingValues, join_names

MAX_CLASSES = 10_000
"""More different labels are taken for numbers that were declared as classes."""
_NUMERIC = ("whole", "number", "boolean")
_LISTS = "declare it as Series(max_length=...)"
Tables = Callable[[Sequence[str]], Iterator[pa.Table]]
"""All training records in pieces, of the columns that are named; every call begins again."""


class _Fit(Protocol):
    def add(self, array: Any, offset: int) -> None:
        """The next values; `offset`: the number of the first record."""

    def finish(self, missing: int) -> FittedColumn: ...


def fit(
    declared: Mapping[str, Declared],
    tables: Tables,
    schema: pa.Schema,
    *,
    report: Callable[[int], None] = lambda done: None,
) -> FittedColumns:
    """Fits `declared` to the records of `tables`.

    Calls `report` with the number of records that were read. Raises DataError for columns that the records lack or that
    hold another type, MissingValues where the declaration says that a missing value is an error.
    """
    cells.expect_columns(declared, schema.names)
    fits = {name: _begin(name, one, cells.kind_of(schema.field(name).type)) for name, one in declared.items()}
    missing, first, records = Counter[str](), dict.fromkeys(declared, -1), 0
    for table in tables(list(declared)):
        for name, part in fits.items():
            array = cells.one_array(table.column(name))
            absent = find_absent(array)
            if count := int(np.count_nonzero(absent)):
                first[name] = records + int(np.flatnonzero(absent)[0]) if first[name] < 0 else first[name]
                missing[name] += count
            part.add(array, records)
        records += len(table)
        report(records)
    for name, one in declared.items():
        _refuse_missing(name, one, missing[name], records, first[name])
    _find_medians(fits, tables)
    return FittedColumns(
        records=records,
        columns=tuple(part.finish(missing[name]) for name, part in fits.items()),
        ignored=tuple(name for name in schema.names if name not in declared),
    )


def find_absent(array: Any) -> Any:
    """[n] bool: null, NaN or an empty text."""
    absent = pc.is_null(array, nan_is_null=True)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        absent = pc.or_(absent, pc.fill_null(pc.equal(array, ""), False))
    return absent.to_numpy(zero_copy_only=False)


def _refuse_missing(name: str, one: Declared, count: int, records: int, first: int) -> None:
    rule = "error" if isinstance(one, Label | Image) else one.missing
    if not count or rule != "error":
        return
    choices = {
        "number": 'Number(missing="mean"), "median" or a number',
        "category": 'Category(missing="own")', "text": 'Text(missing="empty", ...)',
        "series": 'Series(missing="empty", ...)',
    }  # fmt: skip
    kind = type(one).__name__.lower()
    advice = f"correct the records, or declare what stands in its place: {choices[kind]}" if kind in choices else ""
    raise MissingValues(
        f"column '{name}' has no value in {count} of {records} records, first in row {first + 1}",
        hint=advice or f"a {kind} needs a value in every record: correct the records, or leave these out",
    )


def _find_medians(fits: Mapping[str, _Fit], tables: Tables) -> None:
    """The passes after the first, for columns with medians."""
    searches = {
        name: part.search for name, part in fits.items() if isinstance(part, _NumberFit) and part.search is not None
    }
    if not searches:
        return
    for number in range(MedianSearch.PASSES):
        if number:
            for table in tables(list(searches)):
                for name, search in searches.items():
                    search.add(_finite(cells.numbers_of_array(cells.one_array(table.column(name)), name)))
        for search in searches.values():
            search.end_pass()


def _finite(values: cells.Floats) -> cells.Floats:
    return values[~np.isnan(values)]


def _begin(name: str, one: Declared, kind: cells.ValueKind) -> _Fit:
    if isinstance(one, Number) or (isinstance(one, Label) and one.number):
        if kind not in _NUMERIC:
            raise DataError(
                f"column '{name}' is {kind}, expected numbers for {type(one).__name__}",
                hint=f"declare it as {_alternative(one, kind)}",
            )
        return _NumberFit(name, one, kind)
    if isinstance(one, Text):
        if kind != "text":
            raise DataError(f"column '{name}' holds {kind} values, expected text", hint="declare it as Category()")
        return _TextFit(name, one, kind)
    if isinstance(one, Image):
        if kind != "binary":
            raise DataError(
                f"column '{name}' holds {kind} values, expected encoded images (binary)",
                hint="a folder of images with a folder for each class has the columns image and label",
            )
        return _ImageFit(name, one, kind)
    if isinstance(one, Series):
        if kind not in ("list", "text"):
            raise DataError(f"column '{name}' holds {kind} values, expected lists of numbers for Series")
        return _SeriesFit(name, one, kind)
    if kind == "list":
        raise DataError(
            f"column '{name}' holds lists of numbers, which are no {type(one).__name__.lower()}", hint=_LISTS
        )
    if kind == "binary":
        raise DataError(f"column '{name}' is binary, which is no category", hint="declare it as Image(size=...)")
    if isinstance(one, Label) and kind == "number":
        raise DataError(
            f"label '{name}' is a column of fractions, and Label() is for classes",
            hint=f'columns = {{"{name}": Label(number=True)}} learns a number',
        )
    return _CategoryFit(name, one, kind)


def _alternative(one: Declared, kind: cells.ValueKind) -> str:
    if kind == "list":
        return "Series(max_length=...)"
    return "Label()" if isinstance(one, Label) else "Category() or Text()"


def _scale(scale: str, moments: ExactMoments) -> tuple[float, float]:
    """What is subtracted from a number, and what divides it then."""
    if scale == "standard":
        return moments.mean, moments.deviation or 1.0
    if scale == "minmax":
        return moments.low, moments.high - moments.low or 1.0
    return 0.0, 1.0


class _NumberFit:
    def __init__(self, name: str, declared: Number | Label, kind: cells.ValueKind) -> None:
        self._name, self._declared, self._kind = name, declared, kind
        self._moments = ExactMoments()
        median = isinstance(declared, Number) and declared.missing == "median"
        self.search = MedianSearch() if median else None

    def add(self, array: Any, offset: int) -> None:
        values = _finite(cells.numbers_of_array(array, self._name, offset))
        if len(values):
            self._moments.add(values)
        if self.search is not None:
            self.search.add(values)

    def finish(self, missing: int) -> FittedColumn:
        moments, declared = self._moments, self._declared
        if not moments.count:
            raise MissingValues(f"column '{self._name}' has no value in any record", hint="leave it out of columns")
        offset, factor = _scale(declared.scale, moments)
        common: dict[str, Any] = {
            "name": self._name, "type": self._kind, "missing": missing, "offset": offset, "factor": factor,
            "low": moments.low, "high": moments.high,
        }  # fmt: skip
        if isinstance(declared, Label):
            return FittedLabel(declared=declared, **common)
        rule = declared.missing
        fill = None if rule == "error" else moments.mean if rule == "mean" else rule
        if self.search is not None:
            fill = self.search.median
        return FittedNumber(declared=declared, fill=None if fill is None else float(fill), **common)


class _CategoryFit:
    """Categories and classes: values are counted by canonical text."""

    def __init__(self, name: str, declared: Category | Label, kind: cells.ValueKind) -> None:
        self._name, self._declared, self._kind = name, declared, kind
        self._counts = Counter[str]()

    def add(self, array: Any, offset: int) -> None:
        for entry in pc.value_counts(array).to_pylist():
            key = cells.category_key(entry["values"])
            if key is not None:
                self._counts[key] += entry["counts"]
        if isinstance(self._declared, Label) and len(self._counts) > MAX_CLASSES:
            raise DataError(
                f"label '{self._name}' has more than {MAX_CLASSES} different values, which are no classes",
                hint=f'columns = {{"{self._name}": Label(number=True)}} learns a number',
            )

    def _sort_keys(self) -> list[str]:
        """Numbers in their order, texts in that of their code points."""
        if self._kind in ("whole", "number"):
            return sorted(self._counts, key=lambda key: (float(key), key))
        return sorted(self._counts)

    def finish(self, missing: int) -> FittedColumn:
        declared = self._declared
        common: dict[str, Any] = {"name": self._name, "type": self._kind, "missing": missing}
        if isinstance(declared, Category):
            values = declared.values or tuple(key for key in self._sort_keys() if self._counts[key] >= declared.rare)
            return FittedCategory(declared=declared, values=values, **common)
        classes = declared.classes or tuple(self._sort_keys())
        unknown = sorted(self._counts.keys() - set(classes))
        if unknown:
            raise DataError(f"label '{self._name}' has the value '{unknown[0][:64]}', which is none of its classes")
        if len(classes) < 2:
            raise DataError(f"label '{self._name}' has the one value {join_names(classes)}: there is nothing to learn")
        counts = tuple(self._counts[key] for key in classes)
        return FittedLabel(declared=declared, classes=classes, counts=counts, **common)


class _TextFit:
    def __init__(self, name: str, declared: Text, kind: cells.ValueKind) -> None:
        self._name, self._declared, self._kind = name, declared, kind
        self._counts, self._cut = Counter[str](), 0

    def add(self, array: Any, offset: int) -> None:
        for text in array.to_pylist():
            words = split_text(text or "", self._declared)
            self._counts.update(words)
            self._cut += len(words) > self._declared.max_length

    def finish(self, missing: int) -> FittedColumn:
        kept = [(-count, word) for word, count in self._counts.items() if count >= self._declared.min_count]
        words = tuple(word for _, word in sorted(kept)[: self._declared.vocabulary])
        return FittedText(
            name=self._name, type=self._kind, missing=missing, declared=self._declared, words=words, cut=self._cut
        )


class _ImageFit:
    def __init__(self, name: str, declared: Image, kind: cells.ValueKind) -> None:
        self._name, self._declared, self._kind = name, declared, kind

    def add(self, array: Any, offset: int) -> None:
        """Nothing: images are decoded when they are read."""

    def finish(self, missing: int) -> FittedColumn:
        return FittedImage(name=self._name, type=self._kind, missing=missing, declared=self._declared)


class _SeriesFit:
    def __init__(self, name: str, declared: Series, kind: cells.ValueKind) -> None:
        self._name, self._declared, self._kind = name, declared, kind
        self._moments = ExactMoments()
        self._longest = self._cut = self._gaps = 0

    def add(self, array: Any, offset: int) -> None:
        lists = lists_of_array(array, self._name)
        values, gaps = _finite(lists.numbers), lists.count_gaps() > 0
        if gaps.any() and self._declared.missing == "error":
            raise MissingValues(
                f"column '{self._name}' has a gap inside of a list, first in row {offset + int(gaps.argmax()) + 1}",
                hint='correct the records, or declare Series(missing="empty", ...), which masks gaps',
            )
        if len(values):
            self._moments.add(values)
        self._longest = max(self._longest, int(lists.sizes.max(initial=0)))
        self._cut += int((lists.sizes > self._declared.max_length).sum())
        self._gaps += int(gaps.sum())

    def finish(self, missing: int) -> FittedColumn:
        if not self._moments.count:
            raise MissingValues(f"column '{self._name}' has no number in any record", hint="leave it out of columns")
        offset, factor = _scale(self._declared.scale, self._moments)
        return FittedSeries(
            name=self._name, type=self._kind, missing=missing, declared=self._declared, offset=offset, factor=factor,
            low=self._moments.low, high=self._moments.high, longest=self._longest, cut=self._cut, gaps=self._gaps,
        )  # fmt: skip
