"""Guesses what the columns of records are, for `trueline init NAME my.csv --label COLUMN`.

One pass over the records, in memory that COUNTED values of each column bound. A column becomes a declaration, or is
left out for a reason that is said in words. Nothing is guessed about a label that would not train: that is an error.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueline.columns import cells
from trueline.columns.declared import NUMBERS, Category, Declared, Label, Number, Series, Text, input_names
from trueline.columns.encoders import split_text
from trueline.columns.fit import find_absent
from trueline.columns.series import find_lists, lists_of_array
from trueline.errors import DataError, closest, join_names

COUNTED = 10_000
"""Different values of a column that are counted; of one with more, the records up to there are."""
MAX_CLASSES = 20
"""A label of more different whole numbers is learnt as a number."""
_FEW = 20
_WORDS = 3
"""Texts of fewer words on average are categories."""
_ID = re.compile(r"(?i:(?:^|[\W_])(?:id|uuid|guid|key|index|row)$|^unnamed)|[a-z]I[dD]$")
_TAKEN = ("self", "torch", "nn")
"""Names that the generated `forward` uses itself."""


@dataclass(frozen=True, slots=True)
class ColumnGuess:
    """`declared` is None for a column that is left out; `why` says what the records have, or why it is left out."""

    name: str
    declared: Declared | None
    why: str


class _Seen:
    """What the records have in one column."""

    def __init__(self, field: pa.Field, reason: str) -> None:
        self.name, self.dtype, self.kind = field.name, field.type, cells.kind_of(field.type)
        self.reason = reason
        """Why a column that may be meant as numbers was read as text."""
        self.records = self.missing = 0
        self.values = Counter[str]()
        self.lengths, self.spaces = Counter[int](), 0
        """Texts by their number of words and signs; spaces between words in all of them."""
        self.low, self.high, self.infinite = math.inf, -math.inf, False
        self.sizes = Counter[int]()
        """Lists by the number of their numbers."""
        self.has_lists = self.kind in ("text", "list")

    def add(self, array: Any) -> None:
        crowded, absent = len(self.values) > COUNTED, find_absent(array)
        self.records, self.missing = self.records + len(array), self.missing + int(absent.sum())
        if self.is_number and not absent.all():
            try:
                values = cells.numbers_of_array(array, self.name)[~absent]
                self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
            except DataError:
                self.infinite = True
        if self.has_lists:
            self._add_lists(array)
        if crowded or not (self.is_number or self.kind in ("text", "boolean")):
            return
        for entry in pc.value_counts(array).to_pylist():
            key = cells.category_key(entry["values"])
            if key is not None:
                self.values[key] += entry["counts"]
                if self.kind == "text":
                    self.lengths[len(split_text(key, Text(max_length=1)))] += entry["counts"]
                    self.spaces += (len(key.split()) - 1) * entry["counts"]

    def _add_lists(self, array: Any) -> None:
        try:
            is_text = self.kind == "text"
            lists = find_lists(array.to_pylist(), self.name) if is_text else lists_of_array(array, self.name)
        except DataError:
            self.infinite = True
            return
        if lists is None:
            self.has_lists = False
            return
        self.sizes.update(lists.sizes[~lists.absent].tolist())
        finite = lists.numbers[~np.isnan(lists.numbers)]
        if len(finite):
            self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))

    @property
    def is_series(self) -> bool:
        return self.has_lists and self.low <= self.high

    @property
    def is_number(self) -> bool:
        return self.kind in ("whole", "number")

    @property
    def many(self) -> str:
        return f"{'more than ' if len(self.values) > COUNTED else ''}{min(len(self.values), COUNTED)} different values"

    @property
    def counted(self) -> int:
        """Records over which `values` are counted."""
        return sum(self.values.values())

    def gap(self) -> str:
        return f"no value in {self.missing} of {self.records} records" if self.missing else ""

    def words(self, share: float) -> int:
        """Words that `share` of the texts do not exceed."""
        return _quantile(self.lengths, share)


def _quantile(counted: Counter[int], share: float) -> int:
    """The length that `share` of those counted do not exceed."""
    reached, wanted = 0, share * counted.total()
    for length in sorted(counted):
        reached += counted[length]
        if reached >= wanted:
            return length
    return 0


def guess(
    schema: pa.Schema, tables: Iterable[pa.Table], label: str, reasons: dict[str, str]
) -> tuple[int, list[ColumnGuess]]:
    """The number of records, and a guess for each column, in order. `reasons`: why columns were read as text, by name.

    Raises DataError for a label that is absent or cannot be learnt, and if no column is left to learn from.
    """
    if label not in schema.names:
        near = closest(label, schema.names)
        raise DataError(
            f"there is no column '{label}' to learn; the records have {join_names(schema.names)}",
            hint=f"did you mean '{near}'?" if near else "name one of them: --label COLUMN",
        )
    seen = [_Seen(field, reasons.get(field.name, "")) for field in schema]
    for table in tables:
        for one in seen:
            one.add(cells.one_array(table.column(one.name)))
    taken = {*_TAKEN, NUMBERS}
    guesses = []
    for one in seen:
        found = guess_label(one) if one.name == label else guess_input(one)
        own = found.declared is not None and not isinstance(found.declared, Number)
        names = {*input_names({one.name: found.declared})} if own and found.declared else set()
        if names & taken:
            found = ColumnGuess(one.name, None, f"its name would hide '{min(names & taken)}' in the model: rename it")
        taken |= names
        guesses.append(found)
    if all(one.declared is None or isinstance(one.declared, Label) for one in guesses):
        raise DataError(
            f"no column is left to learn '{label}' from",
            hint="; ".join(f"{one.name}: {one.why}" for one in guesses if one.declared is None)[:600],
        )
    return seen[0].records, guesses


def guess_input(seen: _Seen) -> ColumnGuess:
    """What a column that is no label is."""
    for why in _objections(seen):
        return ColumnGuess(seen.name, None, why)
    declared: Declared
    if seen.is_number:
        declared = Number(missing="mean", indicator=True) if seen.missing else Number()
        parts = [f"{seen.low:g} to {seen.high:g}", seen.gap()]
    elif seen.is_series:
        declared = Series(max_length=_round_length(_quantile(seen.sizes, 0.95)))
        least, most = min(seen.sizes), max(seen.sizes)
        parts = [f"lists of {least} to {most} numbers, {seen.low:g} to {seen.high:g}", seen.gap()]
    elif _is_prose(seen):
        declared = Text(max_length=_round_length(seen.words(0.95)))
        parts = [f"{seen.words(0.5)} words in half of the texts, {seen.words(1)} at most", seen.gap()]
    else:
        declared = Category(rare=2) if 1 in seen.values.values() and len(seen.values) > 2 else Category()
        parts = [seen.many, seen.gap(), seen.reason]
    return ColumnGuess(seen.name, declared, ", ".join(filter(None, parts)))


def _round_length(length: int) -> int:
    return min(max(8, -(-length // 8) * 8), 256)


def _is_prose(seen: _Seen) -> bool:
    return seen.spaces >= (_WORDS - 1) * seen.counted and len(seen.values) > max(_FEW, seen.counted // 20)


def _objections(seen: _Seen) -> Iterator[str]:
    """Why a column is nothing to learn from."""
    if seen.missing == seen.records:
        yield "no record has a value"
    if pa.types.is_temporal(seen.dtype):
        yield f"it holds dates or times ({seen.dtype}): write what matters of them as numbers, e.g. weekday, days since"
    if seen.kind == "binary":
        yield "it is binary: declare it as Image(size=...) if it holds pictures"
    if seen.kind == "other":
        yield f"it holds {seen.dtype} values: write them as numbers, texts or categories"
    if seen.infinite:
        yield "it has an infinite number: correct it"
    if len(seen.values) == 1 and not seen.missing:
        yield f"it is {next(iter(seen.values))[:32]!r} in every record"
    different, counted = len(seen.values), seen.counted
    if seen.reason and different > _FEW:
        yield f"it is read as text because {seen.reason}: correct that"
    if seen.kind == "whole" and different == counted > 1:
        consecutive = seen.high - seen.low + 1 == seen.records - seen.missing
        if consecutive or _ID.search(seen.name):
            yield "it numbers the records, and so tells nothing about new ones"
    if seen.kind == "list" and not seen.is_series:
        yield "its lists hold no number"
    if seen.kind == "text" and not seen.is_series and different > max(_FEW, counted // 2) and not _is_prose(seen):
        yield f"it has {seen.many} in {counted} records, and so tells little about new ones"


def guess_label(seen: _Seen) -> ColumnGuess:
    """Classes for texts, truth values and few whole numbers, else a number. Raises DataError."""
    if seen.missing:
        raise DataError(
            f"label '{seen.name}' has {seen.gap()}", hint="a label needs a value: leave these records out of the file"
        )
    different = len(seen.values)
    if not seen.infinite and (seen.low == seen.high if seen.is_number else different == 1):
        raise DataError(f"label '{seen.name}' is the same in every record: there is nothing to learn")
    if seen.is_number and not seen.infinite:
        if seen.kind == "whole" and different <= MAX_CLASSES and different <= seen.records // 2:
            return ColumnGuess(seen.name, Label(), f"classes {_some(seen.values)}")
        return ColumnGuess(seen.name, Label(number=True, scale="standard"), f"{seen.low:g} to {seen.high:g}")
    objection = "it holds lists of numbers" if seen.kind == "list" else next(_objections(seen), "")
    if objection:
        raise DataError(f"'{seen.name}' cannot be the label: {objection}")
    return ColumnGuess(seen.name, Label(), f"classes {_some(seen.values)}")


def _some(values: Sequence[str] | Counter[str]) -> str:
    listed = sorted(values)
    return join_names([repr(one[:32]) for one in listed[:8]]) + (
        f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    )
