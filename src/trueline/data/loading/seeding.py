"""Random numbers of a record's own: augmentation does not depend on who reads the record, nor with which others.

A source that draws nothing is read as it is. When a read moves one of the process's generators (Python's, numpy's
global one, torch's), the records are read again one by one, each with the generators seeded by (seed, epoch, record),
and so from then on. Generators that a data set keeps for itself are out of sight.
"""

from __future__ import annotations

import _random
import ctypes
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from trueline.data.source import Batch, Ordered, Prefetching, Source
from trueline.errors import DataError

if TYPE_CHECKING:
    import torch

    from trueline.data.source import Indices


def seed_all(*parts: int) -> None:
    """Seeds Python's, numpy's and torch's global generators from `parts` (whole numbers).

    The mixing is numpy's SeedSequence, which promises the same numbers in every version.
    """
    import torch

    words = np.random.SeedSequence([part % 2**64 if part < 0 else part for part in parts]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))


def generator_state() -> tuple[Any, ...]:
    """Where the generators stand; equal marks mean that nothing was drawn in between."""
    import torch

    state = torch.default_generator.get_state()
    host = ctypes.string_at(state.data_ptr(), state.nbytes)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return _pythons_place(), _numpys_place(), host, *(state.numpy().tobytes() for state in _on_cuda())
    return _pythons_place(), _numpys_place(), host


def _on_cuda() -> list[torch.Tensor]:
    """The state of the generator of the current CUDA device, where this process uses one."""
    import torch

    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.cuda.get_rng_state()] if used else []


def _pythons_place() -> tuple[Any, ...]:
    """Position and first word of Python's Mersenne twister, read in place: getstate would make 625 numbers of it.

    The words are made anew whenever the position starts again from 0, so the pair moves with every draw.
    """
    if not _IN_PLACE:
        return tuple(random.getstate()[1])
    return _INDEX.value, _FIRST.value


def _lies_in_place() -> bool:
    """Whether this interpreter keeps the generator as CPython does: an object's head, an int and 624 words."""
    if sys.implementation.name != "cpython" or _random.Random.__basicsize__ < _HEAD + 4 + 624 * 4:
        return False
    words = (ctypes.c_uint32 * 624).from_address(id(_inst) + _HEAD + 4)
    return [*words, _INDEX.value] == list(random.getstate()[1])


_inst: Any = random._inst  # of which random.random() and all others are methods
_HEAD = object.__basicsize__
_INDEX, _FIRST = ctypes.c_int.from_address(id(_inst) + _HEAD), ctypes.c_uint32.from_address(id(_inst) + _HEAD + 4)
_IN_PLACE = _lies_in_place()


def _numpys_place() -> tuple[int, int]:
    """As `_pythons_place`, of numpy's: get_state would copy 2.5 KB in 20 us."""
    generator = np.random.mtrand._rand._bit_generator
    if generator is not _known[0]:
        if type(generator) is not np.random.MT19937:  # set_bit_generator was called
            return hash(str(generator.state)), 0
        address = generator.ctypes.state_address
        _known[:] = generator, ctypes.c_uint32.from_address(address), ctypes.c_int32.from_address(address + 624 * 4)
    return _known[1].value, _known[2].value


_known: list[Any] = [None, None, None]
"""numpy's generator, which stays alive here, with its first word and its position."""


@contextmanager
def preserve_generators() -> Iterator[None]:
    """The generators after the block are as they were before it."""
    import torch

    ours, theirs, torchs, cudas = random.getstate(), np.random.get_state(), torch.get_rng_state(), _on_cuda()
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(theirs)
        torch.set_rng_state(torchs)
        for state in cudas:
            torch.cuda.set_rng_state(state)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The generators are at `seed` within the block, and after it as they were before."""
    with preserve_generators():
        seed_all(seed)
        yield


class SeededReader:
    """Reads `source` for training; `drawing` is True once a read has drawn."""

    def __init__(self, source: Source, seed: int, place: Callable[[Batch], Batch] = lambda batch: batch) -> None:
        """`place` brings each batch to where it is computed."""
        self._order = source.order if isinstance(source, Ordered) else None
        self._source: Source = source.records if isinstance(source, Ordered) else source
        self._seed, self._place = seed, place
        self._ahead = self._source if isinstance(self._source, Prefetching) else None
        self._here: tuple[int, Indices, Batch] | None = None
        self.drawing = False

    def read(self, indices: Indices, *, epoch: int) -> Batch:
        """The records `indices` of `epoch`. Raises DataError."""
        here, self._here = self._here, None
        if here is not None and here[0] == epoch and (here[1] is indices or np.array_equal(here[1], indices)):
            return here[2]
        return self._read(indices, epoch=epoch)

    def read_ahead(self, indices: Indices, *, epoch: int) -> None:
        """Reads `indices` now, for the next `read` if that asks for just these. Raises what reading raises."""
        if self._ahead is None:
            self._here = None
            self._here = epoch, indices, self._read(indices, epoch=epoch)

    def _read(self, indices: Indices, *, epoch: int) -> Batch:
        if not self.drawing:
            before = generator_state()
            batch = self._source.read(self._records(indices, epoch))
            self.drawing = generator_state() != before
            if not self.drawing:
                return self._place(batch)
        with preserve_generators():
            ones = [self._one(int(index), epoch) for index in indices]
        try:
            joined = Batch(_concat([one.inputs for one in ones]), _concat([one.labels for one in ones]))
        except RuntimeError as error:
            raise DataError(
                f"records {indices[:8].tolist()} were read one by one and do not make a batch: {error}",
                hint="reading draws random numbers, so each record is read alone; give all records equal shapes",
            ) from error
        return self._place(joined)

    def prefetch(self, indices: Indices, *, epoch: int) -> None:
        """Gets the records ready for the next `read` of just these, if the source can."""
        if self._ahead is not None and not self.drawing:
            self._ahead.prefetch(self._records(indices, epoch))

    def _records(self, indices: Indices, epoch: int) -> Indices:
        """What stands at the positions `indices` of a source with an order of its own; else they are the records."""
        return indices if self._order is None else self._order.at(indices, epoch=epoch)

    @property
    def ahead(self) -> int:
        """So many batches may be asked for before they are read."""
        return int(self._ahead is not None and not self.drawing)

    def close(self) -> None:
        """Nothing is held that would have to be given back."""

    def _one(self, index: int, epoch: int) -> Batch:
        seed_all(self._seed, epoch, index)
        return self._source.read(self._records(np.array([index], dtype=np.int64), epoch))


def _concat(parts: list[Any]) -> Any:
    """Batches of one, made into one batch: tensors along their first dimension, whatever they are nested in."""
    import torch

    first = parts[0]
    if first is None:
        return None
    if isinstance(first, dict):
        return {key: _concat([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple | list) and first and isinstance(first[0], str | bytes):  # the texts of the records
        return type(first)(text for part in parts for text in part)
    if isinstance(first, tuple | list):
        return type(first)(_concat([part[i] for part in parts]) for i in range(len(first)))
    return torch.cat(parts)
