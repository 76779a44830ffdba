"""The Source protocol: records by index, and the units (row group, file, tar slice) in which they are stored.

Implementations share `tests/conformance/source.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from trueline.errors import DataError

if TYPE_CHECKING:
    from trueline.data.order.permutation import Indices
    from trueline.data.order.record_orders import RecordOrder

Mode = Literal["training", "evaluation", "prediction"]


RULES = ("refuse", "keep", "mean", "zero", "category")
"""What a recipe's `missing` may say of missing values (`data/missing.py`), beside a number for a column. `keep`: the
feed gets nulls as they are; `category`: the word `<missing>`, in columns of text."""


def find_rule_fault(value: object) -> str:
    """What is wrong with a recipe's `missing`; empty: nothing.

    >>> find_rule_fault({"age": "mean", "visits": 0}), find_rule_fault("drop")[:16]
    ('', "missing = 'drop'")
    """
    by_column = isinstance(value, Mapping)
    for rule in value.values() if isinstance(value, Mapping) else [value]:
        number = isinstance(rule, int | float) and not isinstance(rule, bool) and math.isfinite(rule)
        if rule not in RULES if isinstance(rule, str) else not (number and by_column):
            return f"missing = {value!r}, expected one of {', '.join(RULES)}, or {{column: one of them or a number}}"
    return ""


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors whose first dimension counts the records. `inputs`: a Tensor, a tuple or list of them (the positional
    arguments) or a dict (the keyword arguments); `labels`: the loss's second argument."""

    inputs: Any
    labels: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Successive records that are cheap to read together, e.g. one Parquet row group."""

    uri: str
    offset: int
    """Index, in the whole source, of the unit's first record."""
    count: int


def split_units(where: str, count: int, unit_records: int) -> list[Unit]:
    """Units of `unit_records` each, the last of the rest."""
    starts = range(0, count, unit_records)
    return [Unit(uri=f"{where}#{at}", offset=at, count=min(unit_records, count - at)) for at in starts]


@runtime_checkable
class Source(Protocol):
    """With an attribute `forks` that is true, a fork of this process may read too, over connections of its own where it
    needs any."""

    @property
    def num_records(self) -> int: ...

    @property
    def units(self) -> Sequence[Unit]: ...

    def read(self, indices: Indices) -> Batch:
        """The records `indices` (int64, any order, repeats allowed), in that order. Raises DataError."""
        ...

    def fingerprint(self) -> str:
        """A digest that changes when the records do, for the lineage."""
        ...


class Readable(Protocol):
    """What reads the records of an epoch by their numbers."""

    def read(self, indices: Indices, *, epoch: int) -> Batch: ...


@runtime_checkable
class Prefetching(Protocol):
    """A Source that can read ahead."""

    def prefetch(self, indices: Indices) -> None:
        """Starts reading `indices` for a later `read` of exactly these, and returns at once."""
        ...


@runtime_checkable
class Countable(Protocol):
    """A Source that can count missing values before it is trained on."""

    def check_missing(self) -> None:
        """Raises MissingValues or UnequalLengths that names columns, counts and first records."""
        ...


@runtime_checkable
class CollatesBatches(Protocol):
    """A Source whose batches may be made by a function of a user's own."""

    def read_each(self, indices: Indices, seed: Callable[[int], None]) -> Batch | None:
        """One batch of records that are read one by one, each after `seed` of its place in `indices`. None if the
        function draws too, so that it has to get each record alone, or if there is none."""
        ...

    def expect_no_mixing(self, *, seed: int) -> None:
        """Raises UsageError if that function draws and mixes records: where something draws, records are read alone."""
        ...


@runtime_checkable
class Ordered(Protocol):
    """A Source with an order of its own: record i of epoch e is record `order.at([i], epoch=e)` of `records`."""

    @property
    def records(self) -> Source: ...

    @property
    def order(self) -> RecordOrder: ...


def check_indices(indices: Indices, num_records: int, where: str) -> None:
    """Raises DataError for no indices, or for one out of range."""
    if len(indices) == 0:
        raise DataError(f"no records of {where} were requested, expected at least one index")
    low, high = int(indices[0]), int(indices[-1])
    if high - low != len(indices) - 1 or not bool((indices[1:] > indices[:-1]).all()):  # not a run, which is quick
        low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= num_records:
        raise DataError(f"{where} has no record {low if low < 0 else high} (it has {num_records})")
