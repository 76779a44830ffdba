"""Records from a map-style torch Dataset.

Items are `(inputs, label)`, in prediction mode also the inputs alone; torch's `default_collate` makes batches of them,
or a `collate_fn` that the Dataset has or that came with it in a DataLoader, whose other arguments do not count.
A record that cannot be read is an error that names it. torch is imported when the first batch is read.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from trueline.data.loading.seeding import seed_generators
from trueline.data.order.permutation import Indices
from trueline.data.source import Batch, Mode, Unit, check_indices
from trueline.errors import DataError

_SAMPLES = 8


class DatasetSource:
    """A Source over `dataset`, whose length is read once."""

    forks = True

    def __init__(self, dataset: Any, *, mode: Mode) -> None:
        self._batch_of: Callable[[list[Any]], Any] | None = getattr(dataset, "collate_fn", None)
        if hasattr(dataset, "batch_sampler") and hasattr(dataset, "dataset"):  # a DataLoader: the job makes the batches
            dataset = dataset.dataset
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

    def fingerprint(self) -> str:
        """Over type, length and a few items, read twice with seeded generators. Of items that still differ, since they
        draw from a generator of their own, only the form counts."""
        digest = hashlib.sha256(f"{self._kind}:{self.num_records}".encode())
        for index in sorted({round(at) for at in np.linspace(0, self.num_records - 1, _SAMPLES)}):
            items = []
            for _ in range(2):
                with seed_generators(0):
                    items.append(self._item(index))
            first, second = (b"".join(_bytes_of(item)) for item in items)
            digest.update(first if first == second else b"".join(_bytes_of(items[0], content=False)))
        return digest.hexdigest()

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
            f"record {index} of dataset {self._kind} is a {type(item).__name__}{count}, expected (inputs, label)",
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
            f"collate_fn made a {type(made).__name__} of records {numbers[:8]} of dataset {self._kind}, expected "
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
            yield np.ascontiguousarray(value).tobytes()
    else:
        yield type(value).__name__.encode()
        if content and isinstance(value, int | float | str | bytes | bool):
            yield repr(value).encode()
