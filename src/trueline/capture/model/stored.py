"""Large answers of the eager model, in a file without a name while a proof runs: each is read when it is compared.

A proof compares hundreds of answers with each program. Those of a language model, a number for each word of its
vocabulary, take several times the memory of its weights together.
"""

import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping

import numpy as np

from trueline.bundle.signature import Array

LEAST_BYTES = 4 << 20
"""Of an answer that is stored."""


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
        count = int(np.prod(shape))
        self._file.seek(at)
        return np.fromfile(self._file, dtype, count).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)


def store(arrays: dict[str, Array]) -> Mapping[str, Array]:
    """The same arrays, in a file if they are large and the disk has room for them."""
    if sum(array.nbytes for array in arrays.values()) < LEAST_BYTES:
        return arrays
    watched = sys.gettrace()
    sys.settrace(None)  # `code_paths.TooSlow` would leave the file open
    try:
        return StoredArrays(arrays)
    except OSError:
        return arrays
    finally:
        sys.settrace(watched)
