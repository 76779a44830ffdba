"""Random programs are compared as what they are: draws of a distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trueline.runtime.distribution import DRAWS, GOLDEN_BYTES, LEVEL, _p_values, compare_draws, golden_draws, sample


def stack(draw: Any, seed: int) -> dict[str, Any]:
    """As many answers as a proof compares, of twelve records with three numbers each."""
    random = np.random.default_rng(seed)
    return {"y": np.stack([draw(random) for _ in range(DRAWS)])}


X = np.linspace(-2, 3, 36, dtype=np.float32).reshape(12, 3)


def noisy(random: Any, spread: float = 1.0, offset: float = 0.0) -> Any:
    return (X + offset + spread * random.standard_normal(X.shape)).astype(np.float32)


def dropped(random: Any, p: float = 0.5) -> Any:
    return (X * (random.random(X.shape) > p) / (1 - p)).astype(np.float32)


def sampled(random: Any, weights: Any = (0.6, 0.3, 0.1)) -> Any:
    return random.choice(3, size=12, p=weights).astype(np.int64)


def one_for_all(random: Any) -> Any:
    """The same number for all: each element alone is drawn as it should be."""
    return (X + random.standard_normal()).astype(np.float32)


@pytest.mark.jobs
@pytest.mark.parametrize("draw", [noisy, dropped, sampled, one_for_all, lambda random: X])
def test_two_that_are_alike_are_told_apart_no_more_often_than_the_level_allows(draw: Any) -> None:
    alarms = sum(not compare_draws(stack(draw, 2 * i), stack(draw, 2 * i + 1)).agrees for i in range(60))
    assert alarms == 0, f"{alarms} of 60 at a level of {LEVEL}"


@pytest.mark.parametrize(
    ("draw", "other", "what"),
    [
        (noisy, lambda random: noisy(random, offset=1.0), "its mean differs"),
        (noisy, lambda random: noisy(random, spread=2.0), "its spread differs"),
        (noisy, lambda random: X, "its spread differs"),
        (dropped, lambda random: dropped(random, 0.1), "its spread differs"),
        (dropped, lambda random: X, "its spread differs"),
        (sampled, lambda random: sampled(random, (0.2, 0.3, 0.5)), "its mean differs"),
        (noisy, one_for_all, "its spread differs"),
        (lambda random: X, lambda random: X + np.float32(0.01), "its mean differs"),
    ],
)
def test_another_mean_another_spread_and_draws_that_hang_together_are_told_apart(
    draw: Any, other: Any, what: str
) -> None:
    for seed in range(5):
        found = compare_draws(stack(draw, seed), stack(other, 1000 + seed))
        assert not found.agrees
        assert what in found.reason, found.reason


def test_rounding_is_no_difference_of_distribution() -> None:
    given = stack(noisy, 0)
    assert compare_draws(given, {"y": given["y"] * np.float32(1 + 1e-6)}).agrees
    fixed = {"y": np.repeat(X[None], DRAWS, 0)}
    assert compare_draws(fixed, {"y": fixed["y"] * np.float32(1 + 1e-6)}).agrees


def test_names_dtypes_and_shapes_are_compared_before_any_number() -> None:
    given = stack(noisy, 0)
    assert "outputs are ['z']" in compare_draws(given, {"z": given["y"]}).reason
    assert "has dtype float64" in compare_draws(given, {"y": given["y"].astype(np.float64)}).reason
    assert "shape [12, 2]" in compare_draws(given, {"y": given["y"][:, :, :2]}).reason


def test_numbers_that_are_none_are_told() -> None:
    given = stack(noisy, 0)
    broken = given["y"].copy()
    broken[7, 0, 0] = np.nan
    assert "NaN in 1 elements" in compare_draws(given, {"y": broken}).reason


def test_as_many_draws_as_fit_go_into_a_golden_example() -> None:
    assert golden_draws({"y": X}) == DRAWS
    assert golden_draws({"y": np.zeros(GOLDEN_BYTES // 160, np.float32)}) == 40
    assert golden_draws({"y": np.zeros(GOLDEN_BYTES, np.float32)}) == 10


def test_a_sample_is_as_many_answers_of_a_session_stacked() -> None:
    asked: list[int] = []

    class Counting:
        format = "counting"
        signature: Any = None

        def run(self, inputs: Any) -> Any:
            asked.append(1)
            return {"y": inputs["x"] + len(asked)}

    assert sample(Counting(), {"x": np.zeros(2)}, 3)["y"].tolist() == [[1, 1], [2, 2], [3, 3]]


def test_the_chances_of_welchs_test_are_those_of_scipy_into_the_far_tails() -> None:
    stats = pytest.importorskip("scipy.stats", reason="SciPy comes with scikit-learn")
    random = np.random.default_rng(3)
    for draws, shift in ((DRAWS, 0.0), (10, 1.0), (DRAWS, 8.0)):
        one = random.normal(size=(DRAWS, 50))
        other = random.normal(shift, random.uniform(0.01, 9, size=50), size=(draws, 50))
        expected = stats.ttest_ind(one, other, equal_var=False).pvalue
        assert np.allclose(_p_values(one, other, 0.0), expected, rtol=1e-9, atol=0)
    tiny = _p_values(one * 1e-100, other * 1e-100, 0.0)
    assert np.allclose(tiny, expected, rtol=1e-9, atol=0)
