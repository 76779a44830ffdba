"""Large answers of the eager model, in a file without a name while a proof runs: each is read when it is compared.

A proof compares hundreds of answers with each program. Those of a language model, a number for each word of its
vocabulary, take several times the memory of its weights together.
"""

from __future__ import annotations

import math
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trueline.bundle.signature import Array

LEAST_BYTES = 4 << 20
"""Of an answer that is stored."""


@dataclass(frozen=True, slots=True)
class StoredParts:
    """An array in a file, for `compare`."""

    file: Any
    at: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __getitem__(self, part: Any) -> Array:
        if not math.prod(self.shape):
            return np.array(np.empty(self.shape, self.dtype)[part])
        return np.array(np.memmap(self.file, self.dtype, "r", self.at, self.shape)[part])  # the map ends here


class StoredArrays(Mapping[str, Array]):
    """Arrays by name, each read from the disk whenever it is used. Raises OSError while it is made, on a full disk."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - the next line closes it
        weakref.finalize(self, self._file.close)
        self._layout: dict[str, tuple[int, np.dtype[np.generic], tuple[int, ...]]] = {}
        at = 0
        for name, array in arrays.items():
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            self._layout[name] = at, array.dtype, array.shape
            at += len(data)
            while data:
                data = data[self._file.write(data) :]

    def __getitem__(self, name: str) -> Array:
        at, dtype, shape = self._layout[name]
        self._file.seek(at)
        return np.fromfile(self._file, dtype, math.prod(shape)).reshape(shape)

    def by_parts(self) -> dict[str, StoredParts]:
        """The same arrays, of which parts are read when they are used."""
        return {name: StoredParts(self._file, *place) for name, place in self._layout.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)


def read_by_parts(arrays: Mapping[str, Array] | None) -> Mapping[str, Array] | Mapping[str, StoredParts]:
    """What `compare` and `bounds` read by parts of stored arrays; others as they are."""
    return arrays.by_parts() if isinstance(arrays, StoredArrays) else arrays or {}


def store(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    """A copy of the arrays, in a file if they are large and the disk has room for them."""
    if sum(array.nbytes for array in arrays.values()) < LEAST_BYTES:
        return _copy(arrays)
    watched = sys.gettrace()
    sys.settrace(None)  # `code_paths.TooSlow` would leave the file open
    try:
        return StoredArrays(arrays)
    except OSError:
        return _copy(arrays)
    finally:
        sys.settrace(watched)


def _copy(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array.copy() for name, array in arrays.items()}
