"""Sources with an order of their own: records by weight, several sources in a ratio, batches of similar length.

    from trueline.data.sources.mixture import mix

    shuffle = "none"                                     # the order is the source's own

    def dataset(mode):
        if mode == "training":
            return mix(["web/*.parquet", "books/*.parquet"], [3, 1], seed=1)
        return "held-out.parquet"

A job counts the positions of the order as records. A record that is set aside is left out at all its positions.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trueline.data.loading.seeding import join_batches
from trueline.data.order.permutation import Indices, key_of
from trueline.data.order.record_orders import BucketedOrder, MixedOrder, PermutedOrder, RecordOrder, WeightedOrder
from trueline.data.source import Batch, Countable, Prefetching, Source, Unit, check_indices
from trueline.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class SampledDataset:
    """A recipe's data set: parts (URIs, Datasets) and an order over all their records."""

    parts: tuple[Any, ...]
    order: Callable[[Sequence[int]], RecordOrder]
    """Takes the number of records of each part."""
    words: str
    """Describes the order, for a fingerprint."""


def sample_by_weight(dataset: Any, weights: npt.ArrayLike, *, seed: int = 0, num_draws: int = 0) -> SampledDataset:
    """Samples `num_draws` records an epoch (default: as many as there are) by `weights`, with replacement.

    `dataset` is a URI or a map-style Dataset; `weights` has one value for each of its records.
    """
    values = np.asarray(weights, np.float64)

    def order(sizes: Sequence[int]) -> RecordOrder:
        _check_length(values, sizes[0], "weights")
        return WeightedOrder(values, seed=seed, num_draws=num_draws)

    return SampledDataset((dataset,), order, f"weighted:{seed}:{num_draws}:{_digest(values)}")


def mix(parts: Sequence[Any], weights: Sequence[float], *, seed: int = 0, num_records: int = 0) -> SampledDataset:
    """Every thousand records hold each of `parts` in exactly its share of `weights`; an epoch has `num_records`
    (default: the sum). A part that is used up begins again in another order; any other continues in the next epoch."""

    def order(sizes: Sequence[int]) -> RecordOrder:
        orders = [PermutedOrder(size, seed=key_of(seed, number)) for number, size in enumerate(sizes)]
        return MixedOrder(orders, weights, seed=seed, num_records=num_records)

    return SampledDataset(tuple(parts), order, f"mixed:{seed}:{num_records}:{list(weights)}")


def bucket_by_length(
    dataset: Any, lengths: npt.ArrayLike, *, batch: int, seed: int = 0, pool_batches: int = 100
) -> SampledDataset:
    """Every record once an epoch, in batches of similar length; `lengths` has one value for each record. `batch` has to
    be the recipe's `global_batch`, so that a step holds one bucket."""
    values = np.asarray(lengths)

    def order(sizes: Sequence[int]) -> RecordOrder:
        _check_length(values, sizes[0], "lengths")
        shuffled = PermutedOrder(sizes[0], seed=seed)
        return BucketedOrder(shuffled, values.__getitem__, batch=batch, seed=seed, pool_batches=pool_batches)

    return SampledDataset((dataset,), order, f"bucketed:{seed}:{batch}:{pool_batches}:{_digest(values)}")


class SampledSource:
    """A Source over the positions of `order`. `read` is of epoch 0; `SeededReader` reads other epochs."""

    def __init__(self, parts: Sequence[Source], sampled: SampledDataset) -> None:
        self.records = ConcatSource(parts)
        self.order = sampled.order([part.num_records for part in parts])
        self._words = sampled.words
        self.num_records = self.order.num_records
        self.units = (Unit(uri=self._words.partition(":")[0], offset=0, count=self.num_records),)
        self.forks = all(getattr(part, "forks", False) for part in parts)

    def read(self, indices: Indices) -> Batch:
        check_indices(indices, self.num_records, "the order")
        return self.records.read(self.order.at(indices, epoch=0))

    def check_missing(self) -> None:
        """Raises MissingValues as the parts do."""
        for part in self.records.parts:
            if isinstance(part, Countable):
                part.check_missing()

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self._words}|{self.records.fingerprint()}".encode()).hexdigest()


def record_lookup(source: Source) -> Callable[[Indices, int], Indices] | None:
    """For a source with an order of its own: the records of its parts at positions of an epoch."""
    if not isinstance(source, SampledSource):
        return None
    return lambda positions, epoch: source.order.at(positions, epoch=epoch)


def describe_record(source: Source, record: int) -> str:
    """The file, unit and part of a record, for messages. `record` counts all parts of a `SampledSource`."""
    if isinstance(source, SampledSource):
        part, inside = source.records.locate(record)
        parts = source.records.parts
        words = describe_record(parts[part], inside)
        return f"{words}, part {part + 1} of {len(parts)}" if len(parts) > 1 else words
    units = source.units
    number = bisect_right(units, record, key=lambda unit: unit.offset) - 1
    if number < 0:  # of a Source without units
        return f"record {record}"
    return f"record {record - units[number].offset} of {units[number].uri}"


class ConcatSource:
    """Several Sources, one after the other, with tensors of the same names, types and shapes."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self.parts = tuple(parts)
        self._starts = np.cumsum([0, *(part.num_records for part in parts)])
        self.num_records = int(self._starts[-1])

    @property
    def units(self) -> Sequence[Unit]:
        return [
            Unit(uri=unit.uri, offset=int(start) + unit.offset, count=unit.count)
            for start, part in zip(self._starts, self.parts, strict=False)
            for unit in part.units
        ]

    def read(self, indices: Indices) -> Batch:
        check_indices(indices, self.num_records, "the parts")
        shares = self._shares(indices)
        batches = [self.parts[number].read(inside) for number, _, inside in shares]
        if len(batches) == 1:
            return batches[0]
        places = np.argsort(np.concatenate([at for _, at, _ in shares]))
        try:
            return join_batches(batches, places)
        except (RuntimeError, KeyError, TypeError, IndexError) as error:
            raise DataError(
                f"records of {len(batches)} of the {len(self.parts)} parts do not make a batch: {error}",
                hint="feed has to return tensors of the same names, types and shapes for all parts",
            ) from error

    def locate(self, record: int) -> tuple[int, int]:
        """The part that holds `record`, and its number there."""
        number = int(np.searchsorted(self._starts, record, side="right")) - 1
        return number, record - int(self._starts[number])

    def prefetch(self, indices: Indices) -> None:
        for number, _, inside in self._shares(indices):
            part = self.parts[number]
            if isinstance(part, Prefetching):
                part.prefetch(inside)

    def fingerprint(self) -> str:
        return hashlib.sha256("|".join(part.fingerprint() for part in self.parts).encode()).hexdigest()

    def _shares(self, indices: Indices) -> list[tuple[int, Indices, Indices]]:
        """For each part with some of `indices`: its number, their places among `indices`, their numbers in the part."""
        owners = np.searchsorted(self._starts, indices, side="right") - 1
        places = [(number, np.flatnonzero(owners == number)) for number in np.unique(owners).tolist()]
        return [(number, at, indices[at] - self._starts[number]) for number, at in places]


def _check_length(values: npt.NDArray[Any], num_records: int, what: str) -> None:
    if values.shape != (num_records,):
        raise DataError(f"{what} of shape {list(values.shape)} for {num_records} records; expected one for each")


def _digest(values: npt.NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
