"""Finds text among numbers (`-`, `?`, `1,5`) in columns of text whose other cells are numbers.

One such cell makes the column of a CSV file text, which a `feed` then parses itself. A record that this fails on would
be set aside once training has begun, though the column is at fault, as with missing values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trueline.data.missing import sample_tables
from trueline.data.records import Records
from trueline.errors import MissingValues

LOOK = 512
"""The first records, half of whose cells are numbers in a column that is meant as numbers."""
MOST_KINDS = 16
"""Different texts of a column that are tried."""
_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
_SHOWN = 3


@dataclass(slots=True)
class StrayText:
    """A text in a column of numbers: the first record that has it, and how many have."""

    column: str
    text: str
    first: int
    count: int = 0


def find_stray_text(records: Records, names: list[str]) -> tuple[list[StrayText], int]:
    """What is no number in the columns `names` whose cells are numbers otherwise, and a record that has none of it; -1:
    there is no such record. Raises DataError for what cannot be read."""
    look = records.load(0, 0, min(LOOK, records.units[0].count))
    meant = [name for name in names if _is_meant(look.column(name))]
    found: dict[tuple[str, str], StrayText] = {}
    plain = -1
    for offset, table in sample_tables(records, meant) if meant else ():
        odd = {name: _find_odd(table.column(name)) for name in meant}
        for name, where in odd.items():
            _enter(found, name, table.column(name), where, offset)
        if plain < 0:
            free = (at for at in range(min(len(table), LOOK)) if not any(where[at].as_py() for where in odd.values()))
            plain = next((offset + at for at in free), -1)
    return list(found.values()), plain


def _is_meant(column: pa.ChunkedArray) -> bool:
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return False
    values = column.drop_null()
    return bool(len(values)) and 2 * pc.sum(_find_odd(values)).as_py() <= len(values)


def _find_odd(column: pa.ChunkedArray) -> Any:
    return pc.fill_null(pc.invert(pc.match_substring_regex(column, _NUMBER)), False)


def _enter(found: dict[tuple[str, str], StrayText], name: str, column: Any, where: Any, offset: int) -> None:
    for at, text in _list_odd(column, where):
        if (name, text) not in found and sum(key[0] == name for key in found) >= MOST_KINDS:
            continue
        found.setdefault((name, text), StrayText(name, text, offset + at)).count += 1


def _list_odd(column: Any, where: Any) -> Iterator[tuple[int, str]]:
    places = pc.indices_nonzero(where)
    return zip(places.to_pylist(), column.take(places).to_pylist(), strict=True)


def cast(table: pa.Table, names: Collection[str]) -> pa.Table:
    """`table` with these columns of text, which are all numbers, as numbers."""
    for name in names:
        column = pc.cast(pc.utf8_trim_whitespace(table.column(name)), pa.float64())
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def refuse(found: list[StrayText], describe: Callable[[int], str], why: str = "") -> None:
    """Raises MissingValues for the texts that a feed fails on; `describe` gives a record's file and place in it. `why`:
    how it fails on the other records, since the column is read as text."""
    parts = []
    for name in dict.fromkeys(one.column for one in found):
        own = sorted((one for one in found if one.column == name), key=lambda one: one.first)
        texts = ", ".join(f"'{one.text[:64]}'" for one in own[:_SHOWN]) + (", ..." if len(own) > _SHOWN else "")
        first = own[0].first
        parts.append(
            f"column '{name}' has text among numbers, which feed fails on ({texts}), in "
            f"{sum(one.count for one in own)} records, first in row {first + 1} ({describe(first)})"
        )
    if parts and why:
        raise MissingValues(
            f"{'; '.join(parts)}; so the column is read as text, and {why}",
            hint="correct the records, or make numbers of texts in feed, where these are missing values",
        )
    if parts:
        raise MissingValues(
            "; ".join(parts),
            hint=f'correct the records, or handle these texts in feed; missing = {{"{found[0].column}": "keep"}} '
            "sets such records aside while training",
        )
