"""Probes at other lengths: the dimensions that the user names are cut and repeated, all those of one size together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

STEPS = (0, -1, 1, 4, -2)
"""Added to the example's length, in turn, from probe to probe."""


def stretched(
    probes: Sequence[Mapping[str, Array]], dynamic: Mapping[str, Sequence[int]]
) -> Iterator[Mapping[str, Array]]:
    """`probes` with the sizes of `dynamic` (input -> dimensions) changed in turn; equal sizes stay equal.

    >>> x = np.zeros((2, 3))
    >>> [one["x"].shape for one in stretched([{"x": x}, {"x": x}, {"x": x}], {"x": [1]})]
    [(2, 3), (2, 2), (2, 4)]
    """
    for number, probe in enumerate(probes):
        step = STEPS[number % len(STEPS)]
        yield {name: _stretched(array, dynamic.get(name, ()), step, name) for name, array in probe.items()}


def _stretched(array: Array, axes: Sequence[int], step: int, name: str) -> Array:
    for axis in axes:
        if not 0 < axis < array.ndim:
            raise UsageError(
                f"input '{name}' has no dimension {axis} beside the batch (it has {array.ndim} dimensions)"
            )
        size = array.shape[axis]
        array = np.take(array, np.arange(max(1, size + step)) % size, axis=axis)
    return array
