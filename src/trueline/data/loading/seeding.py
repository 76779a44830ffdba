"""Seeds random numbers for each record, so that augmentation does not depend on the process or batch that reads it.

When a read moves one of the process's generators (Python's, numpy's global one, torch's), its records are read again
one by one, each with the generators seeded by (seed, epoch, record), and so are all later ones. A data set's own
generators are not detected.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from trueline.data.loading.random_state import cuda_states, generator_state
from trueline.data.order.permutation import Indices, key_of
from trueline.data.source import Batch, CollatesBatches, Ordered, Prefetching, Source
from trueline.errors import DataError, UsageError

_WORD = 0xFFFFFFFF
AGAIN_S = 0.05
"""After which records that cannot be read are read once more."""
OTHERS, TRIES_APART = 2, 6
"""Records beside the first one in a batch in which mixing shows, and how often random mixing is looked for."""


def seed_all(*parts: int) -> None:
    """Seeds Python's, numpy's and torch's global generators from integers.

    Each step, and each record that draws, does it: numpy's SeedSequence takes four times as long."""
    key = key_of(*parts)
    random.seed(key & _WORD)
    np.random.seed(key >> 32)
    _seed_torch(key_of(key) & _WORD)


def _seed_torch(seed: int) -> None:
    """As `torch.manual_seed`, which takes ten times as long on hosts without a device: it notes its callers."""
    import torch

    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restores the generators after the block."""
    import torch

    ours, theirs, torchs, cudas = random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda_states()
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(theirs)
        torch.set_rng_state(torchs)
        for state in cudas:
            torch.cuda.set_rng_state(state)


@contextmanager
def seed_generators(seed: int) -> Iterator[None]:
    """Seeds the generators for the block, and restores them after it."""
    with preserve_generators():
        seed_all(seed)
        yield


class SeededReader:
    """Reads `source` for training; `drawing` is True once a read has drawn random numbers. `place` copies each batch to
    the training device."""

    def __init__(self, source: Source, seed: int, place: Callable[[Batch], Batch] = lambda batch: batch) -> None:
        self._order = source.order if isinstance(source, Ordered) else None
        self._source: Source = source.records if isinstance(source, Ordered) else source
        self._seed, self._place = seed, place
        self._ahead = self._source if isinstance(self._source, Prefetching) else None
        self._here: tuple[int, Indices, Batch] | None = None
        self.drawing = self._checked = False
        self._refusal: UsageError | None = None
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext
        """Around each call of the source."""

    def read(self, indices: Indices, *, epoch: int) -> Batch:
        """The records `indices` of `epoch`. Raises DataError."""
        here, self._here = self._here, None
        if here is not None and here[0] == epoch and (here[1] is indices or np.array_equal(here[1], indices)):
            return here[2]
        try:
            return self._read(indices, epoch=epoch)
        except DataError:
            time.sleep(AGAIN_S)  # an error of a disk or a network may pass; it would end the job
        return self._read(indices, epoch=epoch)

    def read_ahead(self, indices: Indices, *, epoch: int) -> Batch | None:
        """Reads `indices` now, for a next `read` of exactly these; None: it is not done ahead. Raises DataError."""
        if self._ahead is not None:
            return None
        self._here = None
        self._here = epoch, indices, self._read(indices, epoch=epoch)
        return self._here[2]

    def _read(self, indices: Indices, *, epoch: int) -> Batch:
        with self.around():
            return self._read_seeded(indices, epoch)

    def _read_seeded(self, indices: Indices, epoch: int) -> Batch:
        if not self.drawing:
            before = generator_state()
            batch = self._source.read(self._records(indices, epoch))
            if generator_state() == before:
                return self._place(batch)
            if isinstance(self._source, CollatesBatches):
                self._source.expect_no_mixing(seed=self._seed)
            self.drawing = self._draws_again(indices, epoch)
            if not self.drawing:
                return self._place(batch)
        self._check_apart(indices, epoch)
        with preserve_generators():
            if isinstance(self._source, CollatesBatches):
                together = self._source.read_each(
                    self._records(indices, epoch), lambda place: seed_all(self._seed, epoch, int(indices[place]))
                )
                if together is not None:
                    return self._place(together)
            records = []
            for index in indices:
                seed_all(self._seed, epoch, int(index))
                records.append(self._source.read(self._records(np.array([index], dtype=np.int64), epoch)))
        try:
            batch = join_batches(records)
        except (RuntimeError, KeyError, TypeError, IndexError) as error:
            raise DataError(
                f"records {indices[:8].tolist()} were read one by one and do not make a batch: {error}",
                hint="reading draws random numbers, so each record is read alone; give all records equal shapes, or "
                "draw in the data set's __getitem__ and pad in a collate_fn that draws nothing",
            ) from error
        return self._place(batch)  # a lost device is no fault of the records

    def _draws_again(self, indices: Indices, epoch: int) -> bool:
        """Whether reading the same records once more draws, too. Raises UsageError, for every batch, if only that of
        other records does: what was drawn is kept for each of them in this process."""
        others = np.setdiff1d((indices + len(indices)) % self._source.num_records, indices)
        moved = []
        with preserve_generators():
            for part in (indices, others) if len(others) else (indices,):
                before = generator_state()
                self._source.read(self._records(part, epoch))
                moved.append(generator_state() != before)
        if not moved[0] and moved[-1]:
            self._checked = True
            self._refusal = UsageError(
                f"reading record {int(indices[0])} draws random numbers, and reading it again draws none: what was "
                "drawn is kept, and a worker that joins, or has the record in the next epoch, draws other numbers",
                hint="keep what was read before anything is drawn, and draw each time; or draw from a generator that "
                "is seeded by the record's number (np.random.default_rng(index))",
            )
        return moved[0] or self._refusal is not None

    def _check_apart(self, indices: Indices, epoch: int) -> None:
        """Raises UsageError, for every batch, if reading mixes records. The first batch of enough records shows it."""
        if not self._checked and len(indices) > 2 * OTHERS:
            self._checked = True
            try:
                _expect_records_apart(lambda ids: self._source.read(self._records(ids, epoch)), indices, self._seed)
            except UsageError as refused:
                self._refusal = refused
        if self._refusal is not None:
            raise self._refusal

    def prefetch(self, indices: Indices, *, epoch: int) -> None:
        """Starts reading for a later `read` of exactly these, if the source can."""
        if self._ahead is not None and not self.drawing:
            self._ahead.prefetch(self._records(indices, epoch))

    def _records(self, indices: Indices, epoch: int) -> Indices:
        """The records at positions `indices` of a source with an order of its own; otherwise `indices`."""
        return indices if self._order is None else self._order.at(indices, epoch=epoch)

    @property
    def ahead(self) -> int:
        """How many batches may be prefetched."""
        return int(self._ahead is not None and not self.drawing)

    def close(self) -> None:
        """Nothing: this reader holds no resources."""


def _expect_records_apart(read: Callable[[Indices], Batch], indices: Indices, seed: int) -> None:
    """Raises UsageError if reading mixes records, as far as two batches that share their first record show."""
    parts = indices[: OTHERS + 1], indices[[0, *range(OTHERS + 1, 2 * OTHERS + 1)]]
    for trial in range(TRIES_APART):
        with preserve_generators():
            firsts = []
            for part in (parts[0], *parts):
                seed_all(seed, trial)
                firsts.append(_first_record(read(part), OTHERS + 1))
        if firsts[0] != firsts[1]:
            return  # from a generator that no seed reaches
        if [len(values) for values in firsts[1]] == [len(values) for values in firsts[2]] and firsts[1] != firsts[2]:
            raise UsageError(
                f"reading draws random numbers and mixes records: what it makes of record {int(indices[0])} depends "
                "on the others in its batch",
                hint="where reading draws, each record is read alone, with a seed of its own, so nothing would be "
                'mixed; mix the batch in the loss, with reduction = "mean" and micro_batch = N (in a loop: '
                "Options(...)): shards of N records are then mixed, whichever worker has them",
            )


def _first_record(batch: Batch, count: int) -> list[list[str]]:
    """The values of the first of `count` records in each tensor of `batch`."""
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves((batch.inputs, batch.labels))
    tensors = [leaf for leaf in leaves if hasattr(leaf, "numpy") and leaf.dim() and len(leaf) == count]
    return [list(map(repr, leaf[0].detach().flatten().tolist())) for leaf in tensors]


def join_batches(batches: Sequence[Batch], places: Indices | None = None) -> Batch:
    """One batch of several, nested alike; with `places` its record i is the `places[i]`-th of all. Raises KeyError,
    IndexError, TypeError or RuntimeError for batches of other names, lengths, dtypes or shapes."""
    inputs, labels = [batch.inputs for batch in batches], [batch.labels for batch in batches]
    return Batch(_join(inputs, places), _join(labels, places))


def _join(values: list[Any], places: Indices | None) -> Any:
    import torch

    first = values[0]
    if first is None:
        return None
    if isinstance(first, dict):
        if any(value.keys() != first.keys() for value in values):
            raise KeyError(f"names {sorted({key for value in values for key in value})}")
        return {key: _join([value[key] for value in values], places) for key in first}
    if isinstance(first, tuple | list) and first and isinstance(first[0], str | bytes):
        texts = [text for value in values for text in value]
        return type(first)(texts if places is None else [texts[place] for place in places])
    if isinstance(first, tuple | list):
        if any(len(value) != len(first) for value in values):
            raise IndexError(f"{sorted({len(value) for value in values})} tensors")
        joined = [_join([value[i] for value in values], places) for i in range(len(first))]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    if places is None:
        return torch.cat(values)
    if any(value.dtype != first.dtype for value in values):
        raise TypeError(f"dtypes {sorted({str(value.dtype) for value in values})}")
    return torch.cat(values)[torch.from_numpy(places)]
