"""How far a program may be from the eager model: as far as rounding takes the eager model itself, in each column.

    noise of an element   its distance from the arbiter, or of two runs of the arbiter, whichever is larger
    bound of a column     FACTOR * noise + ULPS units in the last place of the column's own scale

The column of an element is the smallest in scale of the slices through it, one for each axis: features beside
timestamps, channels, positions, records. A slice with few elements, or equal ones, has the scale that the user's own
records show. A model that is chaotic on the user's records does not widen a bound beyond CAP of the scale: there a
program has to answer as eager does. Pure numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trueline.bundle.signature import Array
from trueline.runtime.compare import (
    SOFT,
    TOLERANCES,
    Bound,
    ReadByParts,
    column_scale,
    cut_bound,
    largest,
    split_parts,
    spread,
)

FACTOR = 16.0
"""Times the noise. Measured: docs/concepts/proof.md."""
ULPS = 16.0
CAP = 2.0**-6
FLAT = 2.0**-10
ALIKE = 4.0
"""Answers are of one scale if the largest number of the one is at most that many times the other's."""
MOSTLY = 0.75
"""A column with more zeros than that, behind a threshold, has the scale of one with few elements."""
PARTED, FEW_PARTED = 2.0**-4, 0.25
"""Elements that are off by this much of their scale went another way (a branch, an order) in float64; where they are a
small part, they say nothing about the others."""

Floats = npt.NDArray[np.float64]
Slices = tuple[Floats, ...]
"""As `compare.largest` gives them: of the whole, then along each axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One float output on one probe: its scale and its noise, in slices."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    scale: Slices
    flat: Slices
    """Along each axis, whether the elements at an index are equal but for rounding."""
    dead: Slices
    """Along each axis, the part of the elements at an index that is 0: a threshold hides what they are off by."""
    noise: Slices | None
    """None where the arbiter did not answer."""


Measures = Mapping[str, Measure]
"""By output, on one probe."""


def measure(answer: Mapping[str, Array] | Mapping[str, ReadByParts], exact: Sequence[Mapping[str, Array]]) -> Measures:
    """Measures the float outputs of the eager model's `answer` against the arbiter's: one that is not rounded, then
    those that are; none without an arbiter."""
    floats = {name: array for name, array in answer.items() if array.dtype in TOLERANCES}
    return {name: _measure(array, [one[name] for one in exact if name in one]) for name, array in floats.items()}


def _measure(answer: Array | ReadByParts, exact: Sequence[Array]) -> Measure:
    scale = largest(answer)
    plain = Measure(
        shape=answer.shape, dtype=answer.dtype, scale=scale, flat=_flat(answer), dead=_dead(answer), noise=None
    )
    if not exact or any(one.shape != answer.shape for one in exact):
        return plain
    noise = _Noise(answer, exact, column_scale(scale, answer.shape))
    parted = sum(np.count_nonzero(noise.find_parted(part)) for part in split_parts(answer.shape))
    noise.hides = bool(0 < parted < FEW_PARTED * math.prod(answer.shape))
    return replace(plain, noise=largest(noise))


class _Noise:
    """The noise of each element, computed for the part that is looked at: in float64, and several times, a large answer
    would take more memory than its model."""

    def __init__(self, answer: Array | ReadByParts, exact: Sequence[Array], scale: Bound) -> None:
        self.dtype, self.shape = np.dtype(np.float64), answer.shape
        self._answer, self._exact, self._scale = answer, exact, scale
        self.hides = False
        """Whether elements that went another way in float64 say nothing."""

    def __getitem__(self, part: Any) -> Floats:
        noise = self._measure(part)
        return np.where(self._is_parted(noise, part), 0.0, noise) if self.hides else noise

    def find_parted(self, part: Any) -> Array:
        """Which elements went another way."""
        return self._is_parted(self._measure(part), part)

    def _measure(self, part: Any) -> Floats:
        first, *rounded = (one[part].astype(np.float64) for one in self._exact)
        noise = _distance(self._answer[part].astype(np.float64), first)
        for one in rounded:
            noise = np.maximum(noise, _distance(one, first))
        return noise

    def _is_parted(self, noise: Floats, part: Any) -> Array:
        return np.asarray(noise > PARTED * spread(cut_bound(self._scale, part), noise.shape))


def _flat(values: Array | ReadByParts) -> Slices:
    """What is not finite counts as 0."""
    if not math.prod(values.shape):
        return tuple(np.ones(size, dtype=bool) for size in values.shape)
    low, high = ([np.full(size, end) for size in (1, *values.shape)] for end in (np.inf, -np.inf))
    for part in split_parts(values.shape):
        piece = np.asarray(values[part])
        piece = np.where(np.isfinite(piece), piece, np.zeros((), piece.dtype))
        for least, most, others in zip(
            cut_bound(low, part)[1:], cut_bound(high, part)[1:], _other_axes(piece), strict=True
        ):
            np.minimum(least, piece.min(axis=others), out=least)
            np.maximum(most, piece.max(axis=others), out=most)
    found: list[Any] = []
    for least, most in zip(low[1:], high[1:], strict=True):
        found.append(most - least <= FLAT * np.maximum(np.abs(least), np.abs(most)))
    return tuple(found)


def _other_axes(values: Array) -> list[tuple[int, ...]]:
    """For each axis, the others."""
    return [tuple(one for one in range(values.ndim) if one != axis) for axis in range(values.ndim)]


def _dead(values: Array | ReadByParts) -> Slices:
    counts = [np.zeros(size) for size in (1, *values.shape)]
    for part in split_parts(values.shape):
        piece = np.asarray(values[part])
        for into, others in zip(cut_bound(counts, part)[1:], _other_axes(piece), strict=True):
            into += np.count_nonzero(piece, axis=others)
    size = max(math.prod(values.shape), 1)
    found: list[Any] = [1.0 - (one * len(one) / size).astype(np.float32) for one in counts[1:]]
    return tuple(found)


def _distance(one: Floats, other: Array) -> Floats:
    wide = other.astype(np.float64)
    finite = np.isfinite(one) & np.isfinite(wide)
    found: Floats = np.abs(np.where(finite, one, 0.0) - np.where(finite, wide, 0.0))
    return found


def merge(one: Measures, other: Measures) -> Measures:
    """Two measures of one answer: the larger noise of each slice."""
    merged = {}
    for name, first in one.items():
        second = other[name].noise
        if first.noise is not None and second is not None:
            first = replace(first, noise=tuple(map(np.maximum, first.noise, second)))
        merged[name] = first
    return merged


def is_alike(one: Measures, other: Measures) -> bool:
    """Whether two answers are of one scale, so that the noise of the one tells that of the other."""
    for name in one.keys() & other.keys():
        small, large = sorted((float(one[name].scale[0][0]), float(other[name].scale[0][0])))
        if large > ALIKE * small:
            return False
    return True


def make_tables(measures: Sequence[Measures], given: Sequence[bool]) -> dict[str, OutputTable]:
    """What all probes show of each output, by its name. `given`: whether the values are the user's own; their columns
    tell the scale of columns with few elements."""
    names = list(dict.fromkeys(name for one in measures for name in one))
    pairs = list(zip(measures, given, strict=True))
    return {name: OutputTable([(one[name], own) for one, own in pairs if name in one]) for name in names}


class OutputTable:
    """What all probes show of one output."""

    def __init__(self, pairs: Sequence[tuple[Measure, bool]]) -> None:
        every = [one for one, _ in pairs]
        axes = range(len(every[0].shape)) if len({len(one.shape) for one in every}) == 1 else ()
        static = [axis for axis in axes if len({one.shape[axis] for one in every}) == 1]
        own = [one for one, theirs in pairs if theirs] or every
        self._every, self._static = every, static
        self.scales = {axis: _most([one.scale[axis + 1] for one in own]) for axis in static}
        heard = [one.noise for one in own if one.noise is not None]
        self.noises = {axis: _most([noise[axis + 1] for noise in heard]) for axis in static} if heard else {}
        self.relative = max((_relative(one) for one in every if one.noise is not None), default=None)
        """The largest noise relative to the scale, where the arbiter answered."""

    def derive_least(self, one: Measure) -> Bound:
        """What every program may be off by."""
        scale, least, tiny = self._units(one)
        return tuple(np.asarray(min(least, TOLERANCES[one.dtype].rtol) * at + tiny) for at in scale)

    def _units(self, one: Measure) -> tuple[Sequence[Floats], float, float]:
        limits = np.finfo(one.dtype.name)
        scale = column_scale(one.scale, one.shape, self.scales, one.flat)
        return scale, ULPS * float(limits.eps), float(limits.tiny)

    def derive(self, one: Measure, own: bool) -> Bound:
        """The bound of one answer; `own`: to the user's values."""
        scale, least, tiny = self._units(one)
        tolerance = TOLERANCES[one.dtype].rtol
        if one.noise is not None:
            noise: Sequence[Floats] = column_scale(one.noise, one.shape, self.noises, one.flat)
        elif self.relative is not None:
            noise = self._infer_noise(one, [min(self.relative, tolerance) * at for at in scale])
        else:
            return tuple(np.asarray(tolerance * at) for at in scale)
        sums = [FACTOR * n + least * s for n, s in zip(noise, scale, strict=True)]
        if own:
            cap = max(CAP, least)
            sums = [np.where(s > 0, np.minimum(one, cap * s), one) for one, s in zip(sums, scale, strict=True)]
        return tuple(one + tiny for one in sums)

    def _infer_noise(self, one: Measure, least: Sequence[Floats]) -> Sequence[Floats]:
        """What answers of about this scale or less tell of the noise of one that was not measured: in each column, the
        largest that was measured, and the usual part of the column's largest. A number that is small by cancelling has
        the noise of what cancels, which its own size does not show."""
        assert self.relative is not None
        alike = [other for other in self._every if other.scale[0][0] <= ALIKE * one.scale[0][0]]
        heard = [other.noise for other in alike if other.noise is not None]
        found = list(least)
        for axis in self._static:
            reach = self.relative * _most([other.scale[axis + 1] for other in alike])
            dead = np.mean(np.stack([other.dead[axis] for other in alike]), axis=0)
            reach = np.where(dead > MOSTLY, reach * SOFT, reach)
            known = _most([noise[axis + 1] for noise in heard]) if heard else reach
            found[axis + 1] = np.minimum(np.maximum(found[axis + 1], np.maximum(reach, known)), least[0])
        return found


def widen(whole: Bound, part: Bound, records: Sequence[int]) -> Bound:
    """`whole` with the bounds of some records, along each axis, where these are wider; of an output in which records
    count along another axis too, as it is."""
    if [one.shape for one in whole[2:]] != [one.shape for one in part[2:]]:
        return whole
    rows = whole[1].copy()
    rows[list(records)] = np.maximum(rows[list(records)], part[1])
    return np.maximum(whole[0], part[0]), rows, *map(np.maximum, whole[2:], part[2:])


def _most(slices: Sequence[Floats]) -> Floats:
    found: Floats = np.max(np.stack(slices), axis=0)
    return found


def _relative(one: Measure) -> float:
    assert one.noise is not None
    return float(one.noise[0][0] / one.scale[0][0]) if one.scale[0][0] > 0 else 0.0


def describe(
    outputs: Mapping[str, Array] | Mapping[str, ReadByParts], bounds: Mapping[str, Bound] | None, how: str
) -> str:
    """How the outputs are compared, for the evidence: the least and the largest bound of each, and by what."""
    texts = []
    for name, array in outputs.items():
        if bounds is None or name not in bounds:
            texts.append(f"{name}: {TOLERANCES.get(array.dtype, 'equal')}")
            continue
        whole, *slices = bounds[name]
        low = max([float(one.min(initial=whole[0])) for one in slices], default=float(whole[0]))
        texts.append(f"{name}: {low:.2g} to {whole[0]:.2g}, {how}")
    return "; ".join(texts)
