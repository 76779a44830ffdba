"""Does a candidate keep the budget, as far as these records can tell? Pure.

Parent and candidate answer the same records, so what counts is the difference of each pair. Where a metric is 0 or 1
for each record (an accuracy), the bound of the mean difference is Tango's score interval for paired proportions, which
holds also when no decision changed. So it is for shares (right tokens of a sentence), where what is lost and gained
counts by its size: of all distributions on [0, 1] with one mean, that of 0 and 1 varies most. Of other numbers it is a
bootstrap of the pairs, or the normal approximation for many; few records tell nothing of their tails.
Sources: Tango, Statistics in Medicine 17 (1998); Efron and Tibshirani, An Introduction to the Bootstrap (1993).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from trueline.compress.method import CONFIDENCE, Budget

Floats = npt.NDArray[np.float64]
Z = NormalDist().inv_cdf(CONFIDENCE)
_RESAMPLES = 2000
_MANY = 20_000
"""Records from which the normal approximation stands for the bootstrap."""
MOST_RECORDS = 10**9
LEAST_RECORDS = 30
"""Of a metric that is any number: fewer have no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """What is lost: the mean over the records (negative: gained), and its one-sided bounds."""

    loss: float
    low: float
    high: float
    keeps: bool
    """Whether `high` is inside the budget."""
    records_needed: int | None
    """With losses like these, this many records would show that the budget is kept; None: no number would."""


def judge(budget: Budget, parent: Floats, candidate: Floats) -> GateVerdict:
    """The verdict on [records] values of the metric of both."""
    lost = (parent - candidate) if budget.larger_is_better else (candidate - parent)
    if not np.isfinite(candidate).all() and np.isfinite(parent).all():
        return GateVerdict(loss=math.inf, low=math.inf, high=math.inf, keeps=False, records_needed=None)
    if counts_decisions(budget, parent) and counts_decisions(budget, candidate):
        worse, better, count = float(lost[lost > 0].sum()), float(-lost[lost < 0].sum()), len(lost)
        low, high = -paired_bound(better, worse, count), paired_bound(worse, better, count)
        needed = count_records(budget.amount, worse / count, better / count)
    else:
        low, high = _mean_bounds(lost)
        needed = _count_for_mean(budget.amount, lost)
    mean = float(lost.mean())
    keeps = high <= budget.amount
    return GateVerdict(loss=mean, low=low, high=high, keeps=keeps, records_needed=None if keeps else needed)


def paired_bound(worse: float, better: float, count: float) -> float:
    """The upper bound of (worse - better) / count, for `count` pairs of which `worse` and `better` differ.

    >>> round(paired_bound(0, 0, 360), 4), round(paired_bound(3, 1, 5000), 5)
    (0.0075, 0.00132)
    """
    low, high = (worse - better) / count, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _score(middle, worse, better, count) > -Z else (low, middle)
    return high


def _score(delta: float, worse: float, better: float, count: float) -> float:
    """Tango's statistic for the difference `delta`."""
    a, b = 2 * count, -worse - better + (2 * count - worse + better) * delta
    c = -better * delta * (1 - delta)
    shared = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = count * (2 * shared + delta * (1 - delta))
    gap = worse - better - count * delta
    return gap / math.sqrt(variance) if variance > 0 else (0.0 if gap == 0 else math.copysign(math.inf, gap))


def count_records(amount: float, worse: float = 0.0, better: float = 0.0) -> int | None:
    """The fewest records that show a loss below `amount`, if shares `worse` and `better` of them differ; None if no
    number does.

    >>> count_records(0.002), count_records(0.01), count_records(0.01, worse=0.02)
    (1351, 268, None)
    """
    if worse - better >= amount:
        return None
    high = 1
    while paired_bound(worse * high, better * high, high) > amount:
        high *= 2
        if high > MOST_RECORDS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        kept = paired_bound(worse * middle, better * middle, middle) <= amount
        low, high = (low, middle) if kept else (middle, high)
    return high


def counts_decisions(budget: Budget, values: Floats) -> bool:
    """Whether a metric with these values counts right decisions, whole ones or shares of a record's."""
    binary = np.isin(values, (0.0, 1.0)).all()
    return bool(binary or (budget.larger_is_better and (values >= 0).all() and (values <= 1).all()))


def _mean_bounds(lost: Floats) -> tuple[float, float]:
    count = len(lost)
    if count < LEAST_RECORDS:
        return -math.inf, math.inf
    if count >= _MANY:
        half = Z * float(lost.std(ddof=1)) / math.sqrt(count)
        return float(lost.mean()) - half, float(lost.mean()) + half
    random = np.random.default_rng(0)
    means = np.array([lost[random.integers(0, count, count)].mean() for _ in range(_RESAMPLES)])
    low, high = np.quantile(means, (1 - CONFIDENCE, CONFIDENCE))
    return float(low), float(high)


def _count_for_mean(amount: float, lost: Floats) -> int | None:
    room = amount - float(lost.mean())
    if room <= 0:
        return None
    return max(LEAST_RECORDS, math.ceil((Z * float(lost.std()) / room) ** 2))
