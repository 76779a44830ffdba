"""Do two random programs have the same distribution? Many answers of each to one request, compared as samples.

Unless equal seeds give equal answers, elements, and sums of them with random signs (which show other correlations), are
compared in mean and spread (mean distance from the median) by Welch's t-test; integers of few values by their
frequencies. The level is the chance that two equal programs fail, shared among all tests (Bonferroni). Differences
within the tolerance of `compare` do not count. torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import lgamma
from typing import TYPE_CHECKING

import numpy as np

from trueline.runtime import compare
from trueline.runtime.compare import Comparison, Tolerance

if TYPE_CHECKING:
    import numpy.typing as npt

    from trueline.bundle.signature import Array
    from trueline.runtime.session import Session

    Floats = npt.NDArray[np.float64]

DRAWS = 100
"""Answers of each program to one request."""
LEVEL = 1e-4
"""Chance that a correct program is refused, over all probes."""
REPLAY_LEVEL = 1e-6
"""The same for golden records: a server that starts every day must not refuse its model by chance."""
GOLDEN_BYTES = 32 * 2**20
ELEMENTS = 256
"""Elements of an output that are compared, chosen at random."""
SUMS = 8
PROBES = 16
"""For a model that draws random numbers: each probe needs many answers."""
SAME_SEEDS = "from the same seeds the same answers"
"""Begins the evidence of draws that were compared one by one."""
TERMS = 100
"""Of a continued fraction, whose error falls by a constant factor a term."""
CLASSES = 32
"""An output of integers with at most this many different values is compared by their frequencies."""


def sample(session: Session, inputs: Mapping[str, Array], count: int = DRAWS) -> dict[str, Array]:
    """`count` answers to the same request, stacked in front. Raises what the session raises."""
    answers = [session.run(inputs) for _ in range(count)]
    return {name: np.stack([answer[name] for answer in answers]) for name in answers[0]}


def compare_draws(expected: Mapping[str, Array], found: Mapping[str, Array], *, level: float = LEVEL) -> Comparison:
    """Whether two stacks of answers come from one distribution, by means and spreads. Outputs that cannot be compared
    disagree. `max_abs_error` is the largest difference of two means."""
    if list(expected) != list(found):
        return compare.refusal(f"the outputs are {list(found)}, expected {list(expected)}")
    worst, reason, tests = 0.0, "", []
    for name, want in expected.items():
        got = found[name]
        if got.dtype != want.dtype or got.shape[1:] != want.shape[1:]:
            was = f"dtype {got.dtype} and shape {list(got.shape[1:])}"
            return compare.refusal(f"output '{name}' has {was}, expected {want.dtype} and {list(want.shape[1:])}")
        reason = reason or _nonfinite_reason(name, want, got)
        one, other = _looked_at(want, got)
        bound = _tolerance_of(want, one)
        worst = max(worst, float(np.max(np.abs(one.mean(0) - other.mean(0)), initial=0.0)))
        tests += [(name, "mean", _p_values(one, other, bound))]
        tests += [(name, "spread", _p_values(_distances(one), _distances(other), bound))]
    num_tests = max(sum(p.size for _, _, p in tests), 1)
    for name, what, p in tests:
        least = float(np.min(p, initial=1.0))
        if not reason and least < level / num_tests:
            reason = (
                f"output '{name}' is drawn from another distribution: its {what} differs (p = {least:.2g}, where "
                f"{level / num_tests:.2g} is the least to be expected of {num_tests} tests)"
            )
    return Comparison(agrees=not reason, reason=reason, max_abs_error=worst, max_rel_error=0.0, decisions_changed=0)


def compare_seeded(expected: Mapping[str, Array], found: Mapping[str, Array], *, level: float = LEVEL) -> Comparison:
    """As `compare_draws`, for stacks from the same seed: agrees where each answer is the other's within tolerance."""
    count = len(next(iter(expected.values())))
    same = compare.compare(expected, found)
    if same.agrees:
        return replace(same, how=f"{SAME_SEEDS}: {count} draws of each, one by one")
    return replace(compare_draws(expected, found, level=level), how=tolerance_text(count, LEVEL))


def golden_draws(answer: Mapping[str, Array]) -> int:
    """The number of answers like this one in a golden record."""
    return max(10, min(DRAWS, GOLDEN_BYTES // max(sum(array.nbytes for array in answer.values()), 1)))


def tolerance_text(count: int, level: float) -> str:
    """The test of `compare_draws`, for the evidence."""
    return f"statistical: {count} draws of each, means and spreads by Welch's t-test, {level:g} false alarms in all"


def _nonfinite_reason(name: str, want: Array, got: Array) -> str:
    if want.dtype.kind != "f":
        return ""
    count = int(np.sum(np.isfinite(want).all(0) & ~np.isfinite(got).all(0)))
    return f"output '{name}' has infinities or NaN in {count} elements where the other has none" if count else ""


def _looked_at(want: Array, got: Array) -> tuple[Floats, Floats]:
    """Both as [draws, tests]: elements and sums of them, or an indicator for each integer."""
    random = np.random.default_rng(0)
    flat = [one.reshape(len(one), -1) for one in (want, got)]
    chosen = random.permutation(flat[0].shape[1])[:ELEMENTS]
    a, b = (one[:, np.sort(chosen)] for one in flat)
    if want.dtype.kind != "f":
        classes = np.unique(np.concatenate([a, b]))
        if len(classes) <= CLASSES:
            return _one_hot(a, classes), _one_hot(b, classes)
    x, y = (np.nan_to_num(one.astype(np.float64), posinf=0.0, neginf=0.0) for one in (a, b))
    signs = random.choice([-1.0, 1.0], (x.shape[1], SUMS))
    return np.hstack([x, x @ signs]), np.hstack([y, y @ signs])


def _one_hot(one: Array, classes: Array) -> Floats:
    indicators: Floats = (one[:, :, None] == classes).reshape(len(one), -1).astype(np.float64)
    return indicators


def _tolerance_of(want: Array, one: Floats) -> float:
    tolerance = compare.TOLERANCES.get(want.dtype, Tolerance(1e-9, 0.0))
    return tolerance.atol + tolerance.rtol * float(np.max(np.abs(one), initial=0.0))


def _distances(one: Floats) -> Floats:
    return np.abs(one - np.median(one, axis=0))


def _p_values(one: Floats, other: Floats, bound: float) -> Floats:
    """Welch's test of the means of each column; 1 where they are within `bound`, 0 where nothing varies."""
    means, deviations = [x.mean(0) for x in (one, other)], [x.std(0, ddof=1) for x in (one, other)]
    near, fixed = np.abs(means[0] - means[1]) <= bound, (deviations[0] == 0) & (deviations[1] == 0)
    # Scaled first: fourth powers of small deviations would be zero.
    scale = np.where(fixed, 1.0, np.maximum(*deviations))
    parts = [np.square(deviation / scale) / len(x) for deviation, x in zip(deviations, (one, other), strict=True)]
    total = np.where(fixed, 1.0, parts[0] + parts[1])
    freedom = np.square(total) / (np.square(parts[0]) / (len(one) - 1) + np.square(parts[1]) / (len(other) - 1) + fixed)
    t = (means[0] / scale - means[1] / scale) / np.sqrt(total)
    return np.where(near, 1.0, np.where(fixed, 0.0, _two_sided(t, np.where(fixed, 1.0, freedom))))


def _two_sided(t: Floats, freedom: Floats) -> Floats:
    """The chance that Student's t of `freedom` degrees is as far from 0 as `t`: I_x(freedom / 2, 1 / 2) with
    x = freedom / (freedom + t²). Accurate in the tails. In place of SciPy, which would be a third of a server's
    installation. Source: DLMF 8.17.
    """
    near_one: Floats = np.square(t) / (freedom + np.square(t))  # 1 - x
    x = freedom / (freedom + np.square(t))
    a, b = freedom / 2, np.full_like(freedom, 0.5)
    tail = x < (a + 1) / (a + b + 2)  # where the fraction converges; else that of the complement does
    a, b = np.where(tail, a, b), np.where(tail, b, a)
    x, rest = np.where(tail, x, near_one), np.where(tail, near_one, x)
    log_beta = np.vectorize(lambda p, q: lgamma(p) + lgamma(q) - lgamma(p + q), otypes=[np.float64])(a, b)
    with np.errstate(divide="ignore"):  # log 0 is -inf, and its exponential 0
        factor = np.exp(a * np.log(x) + b * np.log(rest) - log_beta) / a
    found: Floats = factor * _beta_fraction(a, b, x)
    return np.where(tail, found, 1 - found)


def _beta_fraction(a: Floats, b: Floats, x: Floats) -> Floats:
    """The continued fraction of the incomplete beta function (DLMF 8.17.22), by Lentz's method."""
    numerator = np.ones_like(x)
    denominator: Floats = 1 / (1 - (a + b) / (a + 1) * x)
    value: Floats = denominator
    for m in range(1, TERMS):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            denominator = 1 / (1 + step * denominator)
            numerator = 1 + step / numerator
            value = value * denominator * numerator
    return value
