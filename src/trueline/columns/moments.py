"""Exact mean, deviation and median of streams of float64: the same to the last bit for any order and any chunks.

Sums: each number is a whole mantissa times a power of two; mantissas of one exponent are added as integers, and so are
their squares. The result is rounded once. Median: radix selection on the order of the bits, 16 bits in each pass.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_BITS, _SPLIT = 53, 27
_LOW = (1 << _SPLIT) - 1
_LEAST = 1080
"""Added to exponents, the least of which is -1073."""
_BINS = 2 * _LEAST + 64
_PIECE = 1 << 16
"""Numbers in a piece: the sum of that many parts of 27 bits is exact in float64."""


class ExactMoments:
    """Sum, sum of squares, least and greatest of finite numbers."""

    def __init__(self) -> None:
        self.count, self.low, self.high = 0, math.inf, -math.inf
        self._sums = np.zeros((2, _BINS), np.int64)
        """Parts of mantissas (27 bits each, high and low), by exponent."""
        self._squares = np.zeros((3, 2, _BINS), np.int64)

    def add(self, values: Floats) -> None:
        for start in range(0, len(values), _PIECE):
            self._add(values[start : start + _PIECE])

    def _add(self, values: Floats) -> None:
        self.count += len(values)
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
        fraction, exponent = np.frexp(values)
        at = exponent.astype(np.intp) + _LEAST
        mantissa = np.ldexp(fraction, _BITS).astype(np.int64)
        first = int(at.min())
        at -= first
        bins = slice(first, first + int(at.max()) + 1)
        for row, part in enumerate((mantissa >> _SPLIT, mantissa & _LOW)):
            self._sums[row, bins] += np.bincount(at, part).astype(np.int64)
        size = np.abs(mantissa)
        high, low = size >> _SPLIT, size & _LOW
        for row, product in enumerate((high * high, high * low, low * low)):
            for half, part in enumerate((product >> _SPLIT, product & _LOW)):
                self._squares[row, half, bins] += np.bincount(at, part).astype(np.int64)

    def _total(self) -> Fraction:
        total = Fraction(0)
        for at in np.flatnonzero(self._sums.any(axis=0)).tolist():
            whole = (int(self._sums[0, at]) << _SPLIT) + int(self._sums[1, at])
            total += whole * Fraction(2) ** (at - _LEAST - _BITS)
        return total

    def _total_of_squares(self) -> Fraction:
        total = Fraction(0)
        for at in np.flatnonzero(self._squares.any(axis=(0, 1))).tolist():
            parts = [(int(high) << _SPLIT) + int(low) for high, low in self._squares[:, :, at].tolist()]
            whole = (parts[0] << (2 * _SPLIT)) + (parts[1] << (_SPLIT + 1)) + parts[2]
            total += whole * Fraction(2) ** (2 * (at - _LEAST - _BITS))
        return total

    @property
    def mean(self) -> float:
        """The mean, rounded once."""
        return float(self._total() / self.count)

    @property
    def deviation(self) -> float:
        """The standard deviation over all numbers (numpy's `std`); 0 for a constant."""
        variance = self._total_of_squares() / self.count - (self._total() / self.count) ** 2
        scale = Fraction(max(abs(self.low), abs(self.high)) or 1.0)  # a square may be beyond float64
        return math.sqrt(variance / scale**2) * float(scale)


class MedianSearch:
    """The median of a stream that is passed four times: `add` its numbers, then `end_pass`; `median` is then set."""

    PASSES = 4

    def __init__(self) -> None:
        self.median: float | None = None
        self._depth = 0
        self._wanted: list[tuple[int, int]] = [(0, -1)]
        """Bits that are known of a number, and its rank among those with the same."""
        self._counts: dict[int, npt.NDArray[np.int64]] = {0: np.zeros(1 << 16, np.int64)}

    def add(self, values: Floats) -> None:
        keys = _ordered_bits(values)
        shift = np.uint64(48 - 16 * self._depth)
        digits = ((keys >> shift) & np.uint64(0xFFFF)).astype(np.int64)
        for known, counts in self._counts.items():
            same = digits if self._depth == 0 else digits[(keys >> (shift + np.uint64(16))) == np.uint64(known)]
            counts += np.bincount(same, minlength=1 << 16)

    def end_pass(self) -> None:
        if self._depth == 0:
            total = int(self._counts[0].sum())
            self._wanted = [(0, (total - 1) // 2), (0, total // 2)]
        found = []
        for known, rank in self._wanted:
            reached = np.cumsum(self._counts[known])
            digit = int(np.searchsorted(reached, rank, side="right"))
            found.append(((known << 16) | digit, rank - (int(reached[digit - 1]) if digit else 0)))
        self._wanted, self._depth = found, self._depth + 1
        self._counts = {known: np.zeros(1 << 16, np.int64) for known, _ in found}
        if self._depth == self.PASSES:
            low, high = (_from_bits(known) for known, _ in found)
            self.median = low + (high - low) / 2


def _ordered_bits(values: Floats) -> npt.NDArray[np.uint64]:
    """Whole numbers in the order of `values`; -0.0 is 0.0."""
    bits = (values + 0.0).view(np.uint64)
    top = np.uint64(1 << 63)
    return np.where(bits & top, ~bits, bits | top)


def _from_bits(key: int) -> float:
    bits = key ^ (1 << 63) if key >> 63 else ~key & ((1 << 64) - 1)
    return float(np.array([bits], np.uint64).view(np.float64)[0])
