"""Means, deviations and medians are those of the whole column, to the last bit, for any order and any pieces."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from trueline.columns.moments import ExactMoments, Floats, MedianSearch

WIDE = np.array([1e300, -1e-300, 3.5, -0.0, 0.0, 5e-324, 1e16, 1.0, -1e16, 2.0**-40])


def moments(pieces: list[Floats]) -> ExactMoments:
    made = ExactMoments()
    for piece in pieces:
        made.add(piece)
    return made


def median(pieces: list[Floats]) -> float | None:
    search = MedianSearch()
    for _ in range(MedianSearch.PASSES):
        for piece in pieces:
            search.add(piece)
        search.end_pass()
    return search.median


@pytest.mark.parametrize("seed", range(4))
def test_no_order_and_no_pieces_change_a_bit(seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(1e6, 3.0, 5000) * 10.0 ** random.integers(-9, 9, 5000)
    cuts = np.sort(random.integers(1, 4999, 20))
    shuffled = [piece for piece in np.split(random.permutation(values), cuts) if len(piece)]
    whole, parts = moments([values]), moments(shuffled)
    assert (whole.mean, whole.deviation, whole.low, whole.high) == (
        parts.mean, parts.deviation, parts.low, parts.high
    )  # fmt: skip
    assert median([values]) == median(shuffled) == np.median(values)


def test_they_are_numpys_and_correctly_rounded() -> None:
    values = np.random.default_rng(5).normal(3.0, 2.0, 10_001)
    made = moments([values])
    exact = sum(map(Fraction, values.tolist()), Fraction(0)) / len(values)
    assert made.mean == float(exact)
    assert math.isclose(made.mean, values.mean(), rel_tol=1e-14)
    assert math.isclose(made.deviation, values.std(), rel_tol=1e-13)


def test_a_large_offset_cancels_nothing() -> None:
    values = 1e15 + np.arange(8, dtype=np.float64)
    assert moments([values]).deviation == np.arange(8.0).std()


def test_numbers_of_every_size_are_added_exactly() -> None:
    made = moments([WIDE])
    total = sum(map(Fraction, WIDE.tolist()), Fraction(0)) / len(WIDE)
    squares = sum((Fraction(value) ** 2 for value in WIDE.tolist()), Fraction(0)) / len(WIDE)
    assert made.mean == float(total)
    assert math.isclose(made.deviation, math.sqrt((squares - total**2) / Fraction(1e300) ** 2) * 1e300)
    assert median([WIDE]) == np.median(WIDE)


@pytest.mark.parametrize("values", [[3.0], [2.0, 1.0], [-5.0, -7.0, -5.0], [0.0, -0.0, 1.0, 1.0], [7.0] * 9])
def test_medians_of_few_numbers(values: list[float]) -> None:
    assert median([np.array(values)]) == np.median(values)


def test_a_constant_has_no_deviation() -> None:
    assert moments([np.full(3, 0.1), np.full(4, 0.1)]).deviation == 0.0
