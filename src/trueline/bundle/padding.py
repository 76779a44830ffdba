"""Sequences filled up to one length, where a bundle says that this changes no answer. Pure.

A symbol of `Signature.padded` may be larger than what was asked: the inputs are filled up at the end of its dimension,
masks with their `fill` (what hides), all others with 0, and of the answer only the beginning is kept. That the answers
are then those without it was tried on the model; see `capture.padding`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trueline.bundle.signature import Signature

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

SMALLEST = 16
"""Sequences up to here share a bucket."""


def fill_up(signature: Signature, inputs: Mapping[str, Array], sizes: Mapping[str, int]) -> dict[str, Array]:
    """`inputs` with the `sizes` of the symbols, none smaller than it is; what is as large already is not copied."""
    found = {}
    for spec in signature.inputs:
        array = inputs[spec.name]
        missing = [
            (0, sizes[symbol] - size if isinstance(symbol, str) and symbol in sizes else 0)
            for symbol, size in zip(spec.shape, array.shape, strict=True)
        ]
        wanted = any(more for _, more in missing)
        found[spec.name] = np.pad(array, missing, constant_values=spec.fill) if wanted else array
    return found


def cut(signature: Signature, outputs: Mapping[str, Array], sizes: Mapping[str, int]) -> dict[str, Array]:
    """The beginning of each output, of the `sizes` that were asked."""
    found = {}
    for spec in signature.outputs:
        keep = tuple(slice(sizes[one]) if isinstance(one, str) and one in sizes else slice(None) for one in spec.shape)
        found[spec.name] = outputs[spec.name][keep]
    return found


class Padding:
    """Puts requests of several lengths into one run."""

    def __init__(self, signature: Signature) -> None:
        """`signature` has `padded` symbols."""
        self._signature = signature
        self._axes = {
            spec.name: [(axis, one) for axis, one in enumerate(spec.shape) if one in signature.padded]
            for spec in signature.inputs
        }

    def key(self, inputs: Mapping[str, Array]) -> object:
        """Equal for requests that may share a run: shapes without rows, lengths by their buckets."""
        found = []
        for name, axes in self._axes.items():
            shape = list(inputs[name].shape)
            for axis, symbol in axes:
                shape[axis] = self.bucket(symbol, shape[axis])
            found.append((name, *shape[1:]))
        return tuple(found)

    def bucket(self, symbol: str, size: int) -> int:
        """The lengths up to it share runs: powers of two, so that beyond the first no request is more than doubled."""
        return max(SMALLEST, 1 << (size - 1).bit_length())

    def even(self, items: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        """All with the largest of their lengths."""
        sizes = [self.sizes(item) for item in items]
        longest = {symbol: max(one[symbol] for one in sizes) for symbol in self._signature.padded}
        return [fill_up(self._signature, item, longest) for item in items]

    def sizes(self, inputs: Mapping[str, Array]) -> dict[str, int]:
        """The lengths that may be filled up."""
        known = self._signature.sizes(inputs)
        return {symbol: known[symbol] for symbol in self._signature.padded}

    def cut(self, outputs: Mapping[str, Array], inputs: Mapping[str, Array]) -> dict[str, Array]:
        """What of the answer belongs to `inputs`, as they were before they were filled up."""
        return cut(self._signature, outputs, self.sizes(inputs))
