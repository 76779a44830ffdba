"""Where records come from, behind one small seam.

A Source knows how many records it has, in which units they lie (a row group, a file, a tar slice), and reads
any of them by index. It knows nothing of epochs, workers or order: `order` says which records form step k, a
Source only fetches them. Implementations share one conformance suite, `tests/conformance/source.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from trueline.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from trueline.data.order.record_orders import RecordOrder

    Indices = npt.NDArray[np.int64]

Mode = Literal["training", "evaluation", "prediction"]
"""What records are for."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Records as tensors: `inputs` is what the model is called with, `labels` what the loss compares with.

    `inputs` is a Tensor, a tuple or list of them (positional arguments) or a dict (keyword arguments). The
    first dimension of every tensor counts the records.
    """

    inputs: Any
    labels: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A run of records that is cheap to read together, e.g. one Parquet row group."""

    uri: str
    offset: int
    """Index, in the whole source, of the unit's first record."""
    count: int


@runtime_checkable
class Source(Protocol):
    @property
    def num_records(self) -> int: ...

    @property
    def units(self) -> Sequence[Unit]: ...

    def read(self, indices: Indices) -> Batch:
        """The records `indices` (int64, any order, repeats allowed), in that order. Raises DataError."""
        ...

    def fingerprint(self) -> str:
        """A digest that changes when the records do (counts, names, sizes, times): goes into the lineage."""
        ...


@runtime_checkable
class Prefetching(Protocol):
    """A Source that can begin to read before it is asked."""

    def prefetch(self, indices: Indices) -> None:
        """Gets `indices` ready for the next `read` of just these, and returns at once. Harmless if it never comes."""
        ...


@runtime_checkable
class Forkable(Protocol):
    @property
    def forks(self) -> bool:
        """Whether a fork of this process may go on reading, over connections of its own where it needs any."""
        ...


@runtime_checkable
class Ordered(Protocol):
    """A Source with an order of its own: record i of epoch e is record `order.at([i], epoch=e)` of `records`."""

    @property
    def records(self) -> Source: ...

    @property
    def order(self) -> RecordOrder: ...


def check_indices(indices: Indices, num_records: int, where: str) -> None:
    """Refuses to read nothing, or records that are not there. Raises DataError."""
    if len(indices) == 0:
        raise DataError(f"no records of {where} were asked for, expected at least one index")
    low, high = int(indices[0]), int(indices[-1])
    if high - low != len(indices) - 1 or not bool((indices[1:] > indices[:-1]).all()):  # not a run, which is quick
        low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= num_records:
        raise DataError(f"{where} has no record {low if low < 0 else high} (it has {num_records})")
