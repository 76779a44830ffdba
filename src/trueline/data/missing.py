"""Missing values in the columns of records: counted before training, and refused or filled by rule.

Missing is a null (an empty cell of CSV, `NA` in a column of numbers, NULL of a database) and NaN, also in lists. By
default a column with missing values is refused; a recipe's `missing` names another rule, for all columns or by column:

    missing = "mean"                                    missing = {"age": "mean", "city": "category", "visits": 0}

Counting reads up to MAX_CELLS cells, which takes about a second; of more it reads an even sample of units (Parquet's
statistics still count all nulls). What a sample misses ends the job when it is read: it is not set aside.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueline import files
from trueline.data.records import FileRecords, Records
from trueline.data.source import RULES
from trueline.errors import DataError, MissingValues, StorageError, closest, join_names
from trueline.storage.cache import cache_folder

Rule = str | int | float
MISSING = "<missing>"
MAX_CELLS = 20_000_000
_ROWS, _FEW = 65536, 64
_SHOWN = 5
_FLOAT32 = float(np.finfo(np.float32).max)
_KEPT_FROM = 1_000_000
"""Means over more records than this are kept in the cache folder."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A recipe's rules. `training` returns the URIs of the training records, over which means are taken."""

    rules: Rule | Mapping[str, Rule] = "refuse"
    training: Callable[[], Any] | None = None

    def rule(self, name: str, *, label: bool = False) -> tuple[Rule, bool]:
        """The rule of a column, and whether it was given by name. A rule for all does not hold for labels."""
        if isinstance(self.rules, Mapping):
            return self.rules.get(name, "refuse"), name in self.rules
        return ("refuse" if label else self.rules), False

    def needs_mean(self, schema: pa.Schema, labels: tuple[str, ...]) -> bool:
        return any(self._of(one, labels) == "mean" for one in schema)

    def _of(self, column: pa.Field, labels: tuple[str, ...]) -> Rule:
        """The rule of a column, where it suits the column's type. Raises DataError for one that was given by name."""
        rule, named = self.rule(column.name, label=column.name.lower() in labels)
        numbers, text = _is_number(column.type), _is_text(column.type)
        suits = numbers if rule == "mean" or not isinstance(rule, str) else text if rule == "category" else True
        suits = suits and (rule != "zero" or numbers or text)
        if named and not suits:
            kinds = "text" if rule == "category" else "numbers"
            raise DataError(
                f"missing is {rule!r} for column '{column.name}', which is {column.type}; that rule is for {kinds}",
                hint=f"one of {', '.join(RULES)}, or a number",
            )
        return rule if suits else "refuse"

    def values(self, schema: pa.Schema, labels: tuple[str, ...], training: Records) -> dict[str, float | str]:
        """What replaces missing values, by column. Raises DataError for unknown columns and unsuitable rules."""
        for name in self.rules if isinstance(self.rules, Mapping) else ():
            if name not in schema.names:
                near = closest(name, schema.names)
                raise DataError(
                    f"missing names column '{name}', and the records have {join_names(schema.names)}",
                    hint=f"did you mean '{near}'?" if near else "",
                )
        rules = {one.name: (self._of(one, labels), _is_text(one.type)) for one in schema}
        means = measure_means(training, [name for name, (rule, _) in rules.items() if rule == "mean"])
        values: dict[str, float | str] = {}
        for name, (rule, text) in rules.items():
            if rule == "mean":
                values[name] = means[name]
            elif rule == "zero":
                values[name] = "" if text else 0
            elif rule == "category":
                values[name] = MISSING
            elif not isinstance(rule, str):
                values[name] = rule
        return values


def fill(table: pa.Table, values: Mapping[str, float | str]) -> pa.Table:
    """`table` with its missing values replaced; whole numbers become float64 where the value is not whole."""
    for name, value in values.items():
        place = table.schema.get_field_index(name)
        if place < 0:
            continue
        column = table.column(place)
        if isinstance(value, float) and pa.types.is_integer(column.type):
            column = column.cast(pa.float64())  # a mean: every batch has one type, whether it lacks a value or not
        scalar = pa.scalar(value, column.type)
        if column.null_count:
            column = pc.fill_null(column, scalar)
        if pa.types.is_floating(column.type):
            absent = pc.is_nan(column)
            if pc.any(absent).as_py():
                column = pc.if_else(absent, scalar, column)
        table = table.set_column(place, name, column)
    return table


def measure_means(records: Records, names: list[str]) -> dict[str, float]:
    """The means of these columns over all `records`, in float64. Raises DataError for a column without any value."""
    if not names:
        return {}
    path, total = _cached_means(records, names), sum(unit.count for unit in records.units)
    with suppress(OSError, ValueError):
        return {name: float(value) for name, value in json.loads(path.read_bytes()).items()}
    sums, counts = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    for number, unit in enumerate(records.units):
        for table in stream_tables(records, number, unit.count):
            for name in names:
                present = np.asarray(table.column(name).drop_null().to_numpy(), np.float64)
                present = present[~np.isnan(present)]
                sums[name] += float(present.sum())
                counts[name] += len(present)
    empty = [name for name in names if not counts[name]]
    if empty:
        raise MissingValues(f"column '{empty[0]}' has no value in any of {total} records, and so no mean")
    means = {name: sums[name] / counts[name] for name in names}
    if total >= _KEPT_FROM:
        with suppress(StorageError):  # it is measured again
            files.write_atomic(path, json.dumps(means).encode())
    return means


def _cached_means(records: Records, names: list[str]) -> Path:
    key = hashlib.sha256(json.dumps([1, records.fingerprint(), names]).encode()).hexdigest()[:40]
    return cache_folder() / "index" / f"means-{key}.json"


@dataclass(slots=True)
class ColumnGap:
    """Missing values of a column, or values that float32 cannot hold: how many records, and the first of them."""

    column: str
    beyond: bool
    inside: bool = False
    """Whether they may lie in lists."""
    count: int = 0
    first: int = -1
    exact: bool = True


@dataclass(slots=True)
class Count:
    """What was counted over `seen` of `total` records."""

    total: int
    seen: int = 0
    gaps: dict[tuple[str, bool], ColumnGap] = field(default_factory=dict)

    def add(self, table: pa.Table, names: list[str], offset: int) -> None:
        self.seen += len(table)
        for name in names:
            start = offset
            for part in table.column(name).chunks:
                for beyond, where in enumerate(find_gaps(part)):
                    if where is not None:
                        self._enter(name, bool(beyond), where, start, inside=is_list(part.type))
                start += len(part)

    def _enter(self, name: str, beyond: bool, where: Any, offset: int, *, inside: bool) -> None:
        places = np.flatnonzero(where)
        if not len(places):
            return
        gap = self.gaps.setdefault((name, beyond), ColumnGap(name, beyond, inside))
        gap.count += len(places)
        gap.first = offset + int(places[0]) if gap.first < 0 else min(gap.first, offset + int(places[0]))


def find_gaps(column: pa.Array) -> tuple[Any, Any]:
    """[records] Which records lack a value, and which have one that float32 cannot hold; also in lists. None: none."""
    absent = pc.is_null(column).to_numpy(zero_copy_only=False) if column.null_count else None
    beyond = None
    if is_list(column.type):
        parents = pc.list_parent_indices(column).to_numpy()
        inner = [None if where is None else np.bincount(parents[where], minlength=len(column)) > 0
                 for where in find_gaps(pc.list_flatten(column))]  # fmt: skip
        absent, beyond = inner[0] if absent is None else absent if inner[0] is None else absent | inner[0], inner[1]
    elif pa.types.is_floating(column.type):
        values = np.asarray(pc.fill_null(column, 0).to_numpy(zero_copy_only=False), np.float64)
        held = np.abs(values) <= _FLOAT32
        if not held.all():
            nans = np.isnan(values)
            absent = nans if absent is None else absent | nans
            beyond = ~held & ~nans
    return absent, beyond


def _count_cells(records: Records, names: list[str]) -> int:
    """About how many cells a record has, those of lists included."""
    lists = [name for name in names if is_list(records.schema.field(name).type)]
    cells = max(len(records.schema), 1)
    if lists and records.units:
        table = records.load(0, 0, min(_FEW, records.units[0].count))
        for name in lists:
            values = table.column(name)
            while is_list(values.type):
                values = pc.list_flatten(values)
            cells += len(values) // max(len(table), 1)
    return cells


def count_missing(records: Records, names: list[str]) -> Count:
    """Counts over all records, or over an even sample of MAX_CELLS cells. Raises DataError for what cannot be read."""
    count = Count(sum(unit.count for unit in records.units))
    if count.total > MAX_CELLS // _count_cells(records, names):
        _add_statistics(count, records, names)
    for offset, table in sample_tables(records, names):
        count.add(table, names, offset)
    return count


def sample_tables(records: Records, names: list[str]) -> Iterator[tuple[int, pa.Table]]:
    """All records, or an even sample of MAX_CELLS cells, in tables, each with the number of its first record."""
    units = records.units
    total = sum(unit.count for unit in units)
    left = MAX_CELLS // _count_cells(records, names)
    chosen = list(range(len(units)))
    if total > left:
        wanted = max(1, min(len(units), left // max(1, min(max(unit.count for unit in units), _ROWS))))
        chosen = sorted({round(place) for place in np.linspace(0, len(units) - 1, wanted)})
    rows = max(1, left // len(chosen)) if total > left else total
    for number in chosen:
        offset = units[number].offset
        for table in stream_tables(records, number, min(units[number].count, rows)):
            yield offset, table
            offset += len(table)


def stream_tables(records: Records, number: int, rows: int) -> Iterator[pa.Table]:
    """The first `rows` records of unit `number`, without more than a piece of it in memory where its format can."""
    stream = records.stream(number, _ROWS) if isinstance(records, FileRecords) else None
    if stream is None:
        yield records.load(number, 0, rows)
        return
    while rows > 0:
        table = next(stream)
        yield table.slice(0, rows)
        rows -= len(table)


def _add_statistics(count: Count, records: Records, names: list[str]) -> None:
    """Enters the nulls that Parquet's footers count, with the first record of the first row group that has one."""
    if not isinstance(records, FileRecords):
        return
    for number, unit in enumerate(records.units):
        nulls = records.null_counts(number)
        for name in names:
            if many := nulls.get(name, 0):
                gap = count.gaps.setdefault((name, False), ColumnGap(name, False))
                gap.count += many
                if gap.first < 0:
                    column = records.load(number, 0, unit.count).column(name)
                    gap.first = unit.offset + int(np.flatnonzero(pc.is_null(column).to_numpy())[0])


def refuse(count: Count, describe: Callable[[int], str], labels: tuple[str, ...] = ()) -> None:
    """Raises MissingValues for what was counted; `describe` gives a record's file and place in it. `labels`: names of
    columns in whose place nothing can stand."""
    if not count.gaps:
        return
    gaps = sorted(count.gaps.values(), key=lambda gap: -gap.count)
    seen = f"{count.total}" if count.seen >= count.total else f"{count.seen} sampled of {count.total}"
    parts = []
    for gap in gaps[:_SHOWN]:
        what = "no value, or a list with a missing one," if gap.inside else "no value"
        what = "a value that float32 cannot hold" if gap.beyond else what
        parts.append(
            f"column '{gap.column}' has {what} in {gap.count} of {seen} records, first in row {gap.first + 1} "
            f"({describe(gap.first)})"
        )
    if len(gaps) > _SHOWN:
        parts.append(f"and {len(gaps) - _SHOWN} more columns")
    named = next((gap.column for gap in gaps if not gap.beyond), None)
    if named in labels:
        raise MissingValues(
            "; ".join(parts),
            hint=f"a label needs a value in every record: correct the records, or leave those without '{named}' out "
            f'(missing = {{"{named}": "keep"}} where feed handles them, e.g. as ignored labels)',
        )
    if gaps[0].inside and not gaps[0].beyond:
        hint = f'correct the records, or declare columns = {{"{gaps[0].column}": Series(...)}}: gaps are padding then'
        raise MissingValues("; ".join(parts), hint=f'{hint}; missing = {{...: "keep"}} where feed handles them')
    if named is None:
        hint = f'correct the records, or clip them in feed, with missing = {{"{gaps[0].column}": "keep"}} in the recipe'
        raise MissingValues("; ".join(parts), hint=hint)
    raise MissingValues(
        "; ".join(parts),
        hint=f'correct the records, or say what stands in their place in the recipe: missing = {{"{named}": "mean"}} '
        '("zero", "category" for text, a number; "keep" where feed handles it); a label has none: leave such records '
        "out",
    )


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
