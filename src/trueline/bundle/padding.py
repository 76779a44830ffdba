"""Pads sequences to one length, where the capture has shown that this changes no answer (`capture/claims.py`). Pure.

The dimensions of a symbol in `Signature.padded` are padded at their end, masks with their `fill` (which hides), all
other inputs with 0; only the beginning of the answer is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trueline.bundle.signature import Signature

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

SMALLEST = 16
"""Shorter sequences share a bucket."""


def fill_up(signature: Signature, inputs: Mapping[str, Array], sizes: Mapping[str, int]) -> dict[str, Array]:
    """`inputs` padded to the `sizes` of the symbols; arrays of that size are not copied."""
    padded = {}
    for spec in signature.inputs:
        array = inputs[spec.name]
        missing = [
            (0, sizes[symbol] - size if isinstance(symbol, str) and symbol in sizes else 0)
            for symbol, size in zip(spec.shape, array.shape, strict=True)
        ]
        grows = any(more for _, more in missing)
        padded[spec.name] = np.pad(array, missing, constant_values=spec.fill) if grows else array
    return padded


def cut(signature: Signature, outputs: Mapping[str, Array], sizes: Mapping[str, int]) -> dict[str, Array]:
    """The beginning of each output, of the `sizes` before padding."""
    beginnings = {}
    for spec in signature.outputs:
        keep = tuple(slice(sizes[one]) if isinstance(one, str) and one in sizes else slice(None) for one in spec.shape)
        beginnings[spec.name] = outputs[spec.name][keep]
    return beginnings


class Padding:
    """Batches requests of several lengths."""

    def __init__(self, signature: Signature) -> None:
        """`signature` has `padded` symbols."""
        self._signature = signature
        self._axes = {
            spec.name: [(axis, one) for axis, one in enumerate(spec.shape) if one in signature.padded]
            for spec in signature.inputs
        }

    def key(self, inputs: Mapping[str, Array]) -> object:
        """Equal for requests that may share a batch: shapes without rows, lengths as buckets."""
        parts = []
        for name, axes in self._axes.items():
            shape = list(inputs[name].shape)
            for axis, symbol in axes:
                shape[axis] = self.bucket(symbol, shape[axis])
            parts.append((name, *shape[1:]))
        return tuple(parts)

    def bucket(self, symbol: str, size: int) -> int:
        """The largest length of its bucket: a power of two, so that padding at most doubles larger ones."""
        return max(SMALLEST, 1 << (size - 1).bit_length())

    def even(self, items: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        """All padded to the largest of their lengths."""
        sizes = [self.sizes(item) for item in items]
        longest = {symbol: max(one[symbol] for one in sizes) for symbol in self._signature.padded}
        return [fill_up(self._signature, item, longest) for item in items]

    def sizes(self, inputs: Mapping[str, Array]) -> dict[str, int]:
        """The lengths that may be padded."""
        known = self._signature.sizes(inputs)
        return {symbol: known[symbol] for symbol in self._signature.padded}

    def cut(self, outputs: Mapping[str, Array], inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The part of the answer that belongs to `inputs`, which are not padded."""
        return cut(self._signature, outputs, self.sizes(inputs))
