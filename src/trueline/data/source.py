"""Where records come from, behind one small seam.

A Source knows how many records it has, in which units they lie (a row group, a file, a tar slice), and reads
any of them by index. It knows nothing of epochs, workers or order: `order` says which records form step k, a
Source only fetches them. Implementations share one conformance suite, `tests/conformance/source.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from trueline.errors import DataError, RecipeError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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


def as_source(
    found: Any,
    *,
    mode: Mode,
    feed: Callable[..., Any] | None,
    recipe: str,
    vocabulary: Callable[[], Any] | None = None,
    tokenizer: Callable[[], Any] | None = None,
) -> Source:
    """Makes a Source of what a recipe's `dataset(mode)` returned: a map-style Dataset, the URI of records, or what is
    `drawn` from several of them.

    These become tensors by `feed`, or, without it, by their columns (`feeds`), texts by `vocabulary()` or
    `tokenizer()`. A Source is taken as it is. Raises RecipeError for anything else, DataError for records that cannot
    be listed, or whose columns make no tensors.
    """
    if isinstance(found, Source):
        return found
    from trueline.data.sources.mixture import Drawn, DrawnSource

    if isinstance(found, Drawn):
        how: dict[str, Any] = {"mode": mode, "feed": feed, "recipe": recipe}
        how |= {"vocabulary": vocabulary, "tokenizer": tokenizer}
        return DrawnSource([as_source(part, **how) for part in found.parts], found)
    uris = _uris(found)
    if uris:
        from trueline.data.open import open_source

        if feed is not None:
            return open_source(uris, feed, mode=mode)
        from trueline.data.loading.default_feed import DefaultFeed

        usual = DefaultFeed(vocabulary and vocabulary(), tokenizer and tokenizer())
        source = open_source(uris, usual, mode=mode)
        usual.check(source.records.schema, mode)
        return source
    indexed = hasattr(found, "__getitem__") and hasattr(found, "__len__")
    if indexed and not isinstance(found, tuple | dict):
        from trueline.data.sources.map_style import DatasetSource

        return DatasetSource(found, mode=mode)
    iterable = hasattr(found, "__iter__") and not isinstance(found, tuple | dict)
    why = ", which can be iterated but not indexed" if iterable else ""
    raise RecipeError(
        f"recipe {recipe}: dataset('{mode}') returned {type(found).__name__}{why}; "
        "expected a map-style Dataset (__len__ and __getitem__), or the URI of records",
        hint="elastic training reads any record by its index, so that none is lost or trained twice",
    )


def check_indices(indices: Indices, num_records: int, where: str) -> None:
    """Refuses to read nothing, or records that are not there. Raises DataError."""
    if len(indices) == 0:
        raise DataError(f"no records of {where} were asked for, expected at least one index")
    low, high = int(indices[0]), int(indices[-1])
    if high - low != len(indices) - 1 or not bool((indices[1:] > indices[:-1]).all()):  # not a run, which is quick
        low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= num_records:
        raise DataError(f"{where} has no record {low if low < 0 else high} (it has {num_records})")


def _uris(found: Any) -> list[str]:
    if isinstance(found, str | PathLike):
        return [fspath(found)]
    if isinstance(found, list | tuple) and all(isinstance(one, str | PathLike) for one in found):
        return [fspath(one) for one in found]
    return []
