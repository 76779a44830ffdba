"""Records from a map-style torch Dataset.

Items are `(inputs, label)`, in prediction mode also the inputs alone; torch's `default_collate` makes batches of them,
or a `collate_fn` that the Dataset has or that came with it in a DataLoader, whose other arguments do not count.
A record that cannot be read is an error that names it. torch is imported when the first batch is read.
"""

import copy
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from trueline.data.loading.random_state import generator_state
from trueline.data.loading.seeding import seed_generators
from trueline.data.order.permutation import Indices
from trueline.data.source import Batch, Mode, Unit, check_indices
from trueline.errors import DataError, UsageError, name_type

_SAMPLES, TRIES = 8, 3


class DatasetSource:
    """A Source over `dataset`, whose length is read once."""

    forks = True

    def __init__(self, dataset: Any, *, mode: Mode) -> None:
        self._batch_of: Callable[[list[Any]], Any] | None = getattr(dataset, "collate_fn", None)
        if hasattr(dataset, "batch_sampler") and hasattr(dataset, "dataset"):  # a DataLoader: the job makes the batches
            _refuse_sampler(dataset)
            dataset = dataset.dataset
        self._draws = False  # the function that makes batches
        self._dataset, self._mode, self._kind = dataset, mode, type(dataset).__qualname__
        try:
            self.num_records = len(dataset)
        except (TypeError, NotImplementedError) as error:
            raise DataError(f"dataset {self._kind} does not know its length: {error}") from error
        if self.num_records < 1:
            raise DataError(f"dataset {self._kind} for {mode} has no records")
        self.units = (Unit(uri=f"dataset:{self._kind}", offset=0, count=self.num_records),)

    def read(self, indices: Indices) -> Batch:
        check_indices(indices, self.num_records, f"dataset {self._kind}")
        numbers: list[int] = indices.tolist()
        items = self._items(numbers)
        if self._batch_of is not None:
            return self._collate_whole(self._batch_of, items, numbers)
        if set(map(type, items)) == {tuple} and set(map(len, items)) == {2}:  # nearly always; the rest is slower
            pairs = items
        else:
            pairs = [self._pair(index, item) for index, item in zip(numbers, items, strict=True)]
        values, labels = map(list, zip(*pairs, strict=True))
        inputs = self._collate(values, numbers, "inputs")
        return Batch(inputs, None if labels[0] is None else self._collate(labels, numbers, "labels"))

    def read_each(self, indices: Indices, seed: Callable[[int], None]) -> Batch | None:
        if self._batch_of is None or self._draws:
            return None
        check_indices(indices, self.num_records, f"dataset {self._kind}")
        numbers: list[int] = indices.tolist()
        items = []
        for place, number in enumerate(numbers):
            seed(place)
            items.append(self._items([number])[0])
        before = generator_state()
        batch = self._collate_whole(self._batch_of, items, numbers)
        self._draws = generator_state() != before
        return None if self._draws else batch

    def expect_no_mixing(self, *, seed: int) -> None:
        if self._batch_of is None or self.num_records < _SAMPLES:
            return
        spread = sorted({round(at) for at in np.linspace(0, self.num_records - 1, _SAMPLES)})
        with seed_generators(seed):
            items = [self._item(index) for index in spread]
        half = _SAMPLES // 2
        for trial in range(_SAMPLES):
            firsts = []
            for others in (range(1, half), range(half, _SAMPLES - 1)):
                with seed_generators(seed + trial):
                    made = self._batch_of([copy.deepcopy(items[at]) for at in (0, *others)])
                firsts.append(_first_record(made, half))
            if [len(part) for part in firsts[0]] == [len(part) for part in firsts[1]] and firsts[0] != firsts[1]:
                raise UsageError(
                    f"the collate_fn of dataset {self._kind} draws random numbers and mixes records: what it makes of "
                    f"record {spread[0]} depends on the others in its batch",
                    hint="where reading draws, each record is read alone, with a seed of its own, so nothing would be "
                    'mixed; mix the batch in the loop, with Options(reduction="mean", micro_batch=N): shards of N '
                    "records are then mixed, whichever worker has them",
                )

    def fingerprint(self) -> str:
        """Over type, length and a few items, read twice with seeded generators. Of items that still differ, since they
        draw from a generator of their own, only the form counts, and of those that cannot be read nothing."""
        digest = hashlib.sha256(f"{self._kind}:{self.num_records}".encode())
        for index in sorted({round(at) for at in np.linspace(0, self.num_records - 1, _SAMPLES)}):
            items = []
            for _ in range(2):
                items.append(self._item_patiently(index))
            first, second = (b"".join(_bytes_of(item)) for item in items)
            digest.update(first if first == second else b"".join(_bytes_of(items[0], content=False)))
        return digest.hexdigest()

    def _item_patiently(self, index: int) -> Any:
        """None for one that cannot be read: its step sets it aside, and an error that passes ends no job."""
        for _ in range(TRIES):
            with suppress(DataError), seed_generators(0):
                return self._item(index)
        return None

    def _items(self, numbers: list[int]) -> Sequence[Any]:
        dataset = self._dataset
        get_items = getattr(dataset, "__getitems__", None)
        try:
            items: Sequence[Any] = [dataset[index] for index in numbers] if get_items is None else get_items(numbers)
        except Exception as error:
            for index in numbers:
                self._item(index)
            raise self._unreadable(f"records {numbers}", error) from error
        if len(items) != len(numbers):
            raise DataError(f"dataset {self._kind} returned {len(items)} items for {len(numbers)} indices")
        return items

    def _item(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            raise self._unreadable(f"record {index}", error) from error

    def _unreadable(self, what: str, error: Exception) -> DataError:
        return DataError(f"{what} of dataset {self._kind} cannot be read: {type(error).__name__}: {error}")

    def _pair(self, index: int, item: Any) -> tuple[Any, Any]:
        if isinstance(item, tuple | list) and len(item) == 2:
            return item[0], item[1]
        if self._mode == "prediction":
            return (item[0] if isinstance(item, tuple | list) and len(item) == 1 else item), None
        count = f" of {len(item)}" if isinstance(item, tuple | list) else ""
        raise DataError(
            f"record {index} of dataset {self._kind} is {name_type(item)}{count}, expected (inputs, label)",
            hint="several inputs go in a tuple or dict of their own: ((first, second), label)",
        )

    def _collate_whole(self, batch_of: Callable[[list[Any]], Any], items: Sequence[Any], numbers: list[int]) -> Batch:
        """What the user's `collate_fn` makes of the items."""
        made = batch_of(list(items))
        if isinstance(made, tuple | list) and len(made) == 2:
            return Batch(made[0], made[1])
        if self._mode == "prediction":
            return Batch(made, None)
        raise DataError(
            f"collate_fn made {name_type(made)} of records {numbers[:8]} of dataset {self._kind}, expected "
            "(inputs, labels)",
            hint="several inputs go in a tuple or dict of their own: ((first, second), label)",
        )

    def _collate(self, values: list[Any], numbers: list[int], what: str) -> Any:
        from torch.utils.data import default_collate

        try:
            return default_collate(values)
        except (TypeError, RuntimeError, ValueError, KeyError) as error:
            raise DataError(
                f"{what} of records {numbers[:8]} of dataset {self._kind} do not make a batch: {error}",
                hint="all records of one batch need equal shapes and types; pad or crop them in the dataset",
            ) from error


def _refuse_sampler(loader: Any) -> None:
    """Raises UsageError for a DataLoader that draws or orders records in a way of its own."""
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
    from torch.utils.data.distributed import DistributedSampler

    batches, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    if type(batches) not in (BatchSampler, type(None)):
        sampler = batches
    plain = type(sampler) in (SequentialSampler, RandomSampler, DistributedSampler, type(None))
    count = len(loader.dataset) if hasattr(loader.dataset, "__len__") else 0
    if plain and not getattr(sampler, "replacement", False) and getattr(sampler, "num_samples", count) <= count:
        return
    raise UsageError(
        f"the DataLoader has {name_type(sampler)}, and a job takes each record once an epoch, in its own order",
        hint="give the data set itself: a part as torch.utils.data.Subset, weights by trueline.data.sources.mixture."
        'sample_by_weight, an order by Options(shuffle="none")',
    )


def _first_record(batch: Any, count: int) -> list[list[str]]:
    """The values of the first of `count` records in each tensor of `batch`."""
    from torch.utils._pytree import tree_leaves

    leaves = [leaf for leaf in tree_leaves(batch) if hasattr(leaf, "numpy") and leaf.dim() and len(leaf) == count]
    return [list(map(repr, leaf[0].detach().flatten().tolist())) for leaf in leaves]


def _raw_bytes(value: Any) -> bytes:
    """The bytes of an array or a tensor, whose type numpy may not have (bfloat16)."""
    if not hasattr(value, "detach"):
        return np.ascontiguousarray(value).tobytes()
    dense = value.detach().cpu().to_dense() if value.is_sparse else value.detach().cpu()
    flat = dense.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(sys.modules["torch"].uint8).numpy().tobytes())


def _bytes_of(value: Any, *, content: bool = True) -> Iterator[bytes]:
    """Of `value`, for a digest; with `content` false only types, shapes and lengths."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from _bytes_of(value[key], content=content)
    elif isinstance(value, list | tuple):
        yield f"{len(value)}:".encode()
        for item in value:
            yield from _bytes_of(item, content=content)
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        if content:
            yield _raw_bytes(value)
    else:
        yield type(value).__name__.encode()
        if content and isinstance(value, int | float | str | bytes | bool):
            yield repr(value).encode()
