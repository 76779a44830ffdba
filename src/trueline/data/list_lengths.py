"""Finds columns of lists that are longer in some records than in others, of which a batch makes no tensor.

A batch that mixes them fails, and the model fails on single ones, so that these would be set aside once training has
begun, though the column is at fault, as with missing values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueline.data.missing import is_list, sample_tables
from trueline.data.records import Records
from trueline.errors import UnequalLengths

_SHOWN = 5


@dataclass(slots=True)
class UnequalLists:
    """How many records have lists of another length than record `example` has, and the first of them."""

    column: str
    example: int = -1
    shape: list[int] = field(default_factory=list)
    """The lengths in record `example`, those of lists in lists after it."""
    low: int = 0
    high: int = 0
    count: int = 0
    first: int = -1

    def add(self, column: pa.Array, offset: int) -> None:
        """Counts the records of `column`; the first of them is record `offset`."""
        other = self._find_other(column, 0)
        if self.example < 0 and self.shape:
            self.example = offset + int(pc.index(pc.is_valid(column), pa.scalar(True)).as_py())
        if other.any():
            self.count += int(other.sum())
            self.first = offset + int(other.argmax()) if self.first < 0 else self.first

    def _find_other(self, column: pa.Array, depth: int) -> Any:
        """[records] Which of them have another length than `shape` says, at this depth or inside."""
        lengths = pc.list_value_length(column)
        if lengths.null_count == len(lengths):
            return np.zeros(len(lengths), bool)
        if depth == len(self.shape):
            self.shape.append(lengths.drop_null()[0].as_py())
            self.low = self.high = self.shape[0]
        values = lengths.fill_null(self.shape[depth]).to_numpy()
        other = values != self.shape[depth]
        if not depth:
            self.low, self.high = min(self.low, int(values.min())), max(self.high, int(values.max()))
        if is_list(column.type.value_type):
            inner = self._find_other(pc.list_flatten(column), depth + 1)
            parents = pc.list_parent_indices(column).to_numpy()
            other = other | (np.bincount(parents[inner], minlength=len(column)) > 0)
        return other

    def describe(self, seen: str, where: str) -> str:
        """What was counted over `seen` records; `where` is the first that is unlike the example."""
        what = "lists of lists of many lengths"
        if self.low < self.high:
            what = f"lists of {self.low} to {self.high} values"
        shape = " x ".join(map(str, self.shape))
        return (
            f"column '{self.column}' has {what}: row {self.example + 1} has {shape}, and {self.count} of {seen} "
            f"records have another number, first in row {self.first + 1} ({where})"
        )


def find_unequal_lists(records: Records, names: list[str]) -> tuple[list[UnequalLists], str]:
    """Those of the columns `names` whose lists have several lengths, and of how many records, in words.

    Of more than MAX_CELLS cells an even sample is read. Raises DataError for what cannot be read.
    """
    found = {name: UnequalLists(name) for name in names if is_list(records.schema.field(name).type)}
    seen, total = 0, sum(unit.count for unit in records.units)
    for offset, table in sample_tables(records, list(found)) if found else ():
        seen += len(table)
        for name, lists in found.items():
            start = offset
            for part in table.column(name).chunks:
                lists.add(part, start)
                start += len(part)
    of = f"{total}" if seen >= total else f"{seen} sampled of {total}"
    return [lists for lists in found.values() if lists.count], of


def refuse(found: list[UnequalLists], seen: str, describe: Callable[[int], str]) -> None:
    """Raises UnequalLengths for what was found; `describe` gives a record's file and place in it."""
    if not found:
        return
    found = sorted(found, key=lambda lists: -lists.count)
    parts = [lists.describe(seen, describe(lists.first)) for lists in found[:_SHOWN]]
    if len(found) > _SHOWN:
        parts.append(f"and {len(found) - _SHOWN} more columns")
    raise UnequalLengths(
        "; ".join(parts),
        hint=f'correct the records, or declare columns = {{"{found[0].column}": Series(max_length={found[0].high})}}, '
        "which fills shorter lists up, or do so in feed(records, mode)",
    )
