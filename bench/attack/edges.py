"""Finite inputs at the edges of what numbers are: large, tiny, equal, halves, whole numbers, ends of integers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from bench.attack.subject import Array

SCALES = (1e-42, 1e-38, 1e-30, 1e-20, 1e-6, 1e4, 1e9, 1e19, 1e30, 1e37)
PICKED = (
    *(0.0, -0.0, 1e-42, -1e-42, 1e-38, 1e-30, -1e-20, 1e-7, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 1.0, -1.0, 2.0, 3.0, 7.0),
    *(100.0, 255.0, 256.0, 3.1415927, -3.1415927, 1e4, -1e4, 2.0**24 + 2, 2.0**31, -(2.0**31), 1e9, 1e19, -1e19),
    *(3e38, -3e38),
)
"""Numbers that operators treat otherwise than their neighbours."""


def edges(base: Mapping[str, Array], random: np.random.Generator) -> Iterator[tuple[str, dict[str, Array]]]:
    """Inputs of the sizes of `base`, each with the name of its family."""
    for name, array in base.items():
        if array.dtype.kind == "f" and array.size:
            for what, made in _floats(array, random):
                yield f"{name} {what}", {**base, name: made}
        elif array.dtype.kind in "iu" and array.size:
            ends = np.iinfo(array.dtype)
            for value in (0, 1, -1, 7, ends.max, ends.min, 2**31, 2**53 + 1):
                if ends.min <= value <= ends.max:
                    yield f"{name} all {value}", {**base, name: np.full_like(array, value)}


def _floats(array: Array, random: np.random.Generator) -> Iterator[tuple[str, Array]]:
    kind, top = array.dtype, float(np.finfo(array.dtype).max)
    picked = np.asarray([one for one in PICKED if abs(one) < top], dtype=kind)
    for value in (0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 1e4, -1e4, 1e19, 1e-30, top, -top):
        if abs(value) <= top:
            yield f"all {value:g}", np.full_like(array, value)
    usual = random.standard_normal(array.shape)
    for scale in SCALES:
        if scale * 8 < top:
            yield f"times {scale:g}", (usual * scale).astype(kind)
            yield f"given, times {scale:g}", _times(array, scale)
    yield "halves", (np.round(usual * 3) + 0.5).astype(kind)
    yield "quarters", (np.round(usual * 8) / 4).astype(kind)
    yield "whole", np.round(usual * 4).astype(kind)
    yield "large whole", np.round(usual * 1000).astype(kind)
    yield "few values", random.choice(np.asarray([0.0, 1.0, -1.0], dtype=kind), array.shape)
    for share in (0.1, 0.1, 0.5, 1.0):
        some = random.random(array.shape) < share
        yield f"picked {share:g}", np.where(some, random.choice(picked, array.shape), array).astype(kind)


def _times(array: Array, scale: float) -> Array:
    """Those too large for the dtype are the largest."""
    top = np.finfo(array.dtype).max
    wide = np.clip(array.astype(np.float64) * scale, -float(top), float(top))
    return wide.astype(array.dtype)
