"""Who trains how much of a step: shares that follow measured speed, the same for every member.

Each member measures the records a second that it computes and sends the figure in the words of every step. All members
see the same figures after the same step and derive the same weights from them here, so the split needs no message of
its own. A member whose figure is 0 takes no part: it is still taking the state.

Weights change at once when a rate has moved by more than `DEAD_BAND` against them, and when for `STEADY` steps on end,
and for a second, another split would have saved more than `SLACK`. Where the split was only tried before the first
step, one such step is enough in the first `SETTLING`: what a process does in its first step is no measure of its speed.
A noisy neighbour of a moment does not make the batch sizes dance (what was read ahead was read in vain then; compiled
models and caches like them steady), a slow machine does, and so does a split that was guessed a little wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DEAD_BAND = 0.10
SLACK, STEADY, SETTLING = 0.02, 8, 8
OVER_S = 1.0
"""A rate is that of about so many seconds, where these are more than a few steps."""
SMOOTHING = 0.3
"""Weight of the newest measurement, when its step took `SMOOTHING * OVER_S` or longer."""
FLOOR = 0.01
"""Least rate, in parts of the greatest: who is slower still gets a little, so that it can be measured again."""


def smooth_rate(before: float, records: int, took_s: float, step_s: float, measured: int = 9) -> float:
    """The rate to send after `records` took `took_s` seconds in steps of `step_s`. The first few measurements
    (`measured` of them before) count alike. A worker that became much slower says so at once, if what it computes
    usually takes long: in a short step it may only have had to wait for the processor.

    >>> smooth_rate(0.0, 100, 1.0, 1.0), smooth_rate(100.0, 110, 1.0, 1.0), smooth_rate(100.0, 110, 1.0, 1.0, 1)
    (100.0, 103.0, 105.0)
    >>> smooth_rate(100.0, 50, 5.0, 0.5), smooth_rate(1e4, 80, 0.08, 0.1)
    (10.0, 9100.0)
    >>> round(smooth_rate(1e4, 88, 0.008, 0.01, 500), 6)
    10010.0
    """
    rate = records / took_s
    if before <= 0.0 or (rate < before / 2 and records / before >= SMOOTHING * OVER_S):
        return rate
    newest = max(min(SMOOTHING, step_s / OVER_S), 1 / (measured + 1))
    return (1 - newest) * before + newest * rate


def initial_weights(rates: Sequence[float], *, behind: Sequence[bool]) -> tuple[float, ...]:
    """Weights for a group that was just formed, from what its members had measured before (0: nothing yet).

    A negative rate was only tried, by a forward before the first step; it counts while nobody has measured. Who is new
    to a group that has is taken for as fast as the others are on average; who is `behind` takes no part yet.

    >>> initial_weights([100.0, -900.0, 300.0], behind=[False, False, True])
    (100.0, 200.0, 0.0)
    >>> initial_weights([-100.0, -10.0, 0.0], behind=[False] * 3)
    (100.0, 10.0, 55.0)
    """
    measured = any(rate > 0 for rate in rates)
    counted = [max(rate, 0.0) if measured else -rate for rate in rates]
    known = [rate for rate in counted if rate > 0]
    usual = sum(known) / len(known) if known else 1.0
    raw = [0.0 if late else (rate or usual) for rate, late in zip(counted, behind, strict=True)]
    return _raise_to_floor(raw)


@dataclass(frozen=True, slots=True)
class StepSplit:
    """By rank: in which proportion the members share a step. A group starts with a new one, so all members agree."""

    weights: tuple[float, ...] = (1.0,)
    uneven: int = 0
    """For so many steps on end members have waited for others longer than `SLACK`."""
    settling: int = 0
    """In so many steps more one uneven step is enough: there is no split that was measured."""

    def after_step(self, rates: Sequence[float], records: int) -> StepSplit:
        """The split of the next step, when the members of this one, of `records` records, measured `rates`.

        >>> StepSplit((1.0, 1.0)).after_step([100.0, 101.0], 200)
        StepSplit(weights=(1.0, 1.0), uneven=0, settling=0)
        >>> StepSplit((1.0, 1.0)).after_step([100.0, 10.0], 200)
        StepSplit(weights=(100.0, 10.0), uneven=0, settling=0)
        >>> StepSplit((1.0, 1.0), uneven=6).after_step([100.0, 106.0], 200)
        StepSplit(weights=(1.0, 1.0), uneven=7, settling=0)
        >>> StepSplit((1.0, 1.0), uneven=7).after_step([100.0, 106.0], 200)
        StepSplit(weights=(100.0, 106.0), uneven=0, settling=0)
        >>> StepSplit((1.0, 1.0), uneven=7).after_step([100.0, 106.0], 2)  # steps of a hundredth of a second
        StepSplit(weights=(1.0, 1.0), uneven=8, settling=0)
        >>> StepSplit((1.0, 1.0), settling=4).after_step([100.0, 106.0], 200)
        StepSplit(weights=(100.0, 106.0), uneven=0, settling=3)
        """
        if not max(rates) > 0:
            return self
        new, old, left = _raise_to_floor(rates), self.weights, max(0, self.settling - 1)
        if 0.0 in old or 0.0 in new:
            if any((weight > 0) != (rate > 0) for weight, rate in zip(old, new, strict=True)):
                return StepSplit(new, settling=left)
            kept = [(weight, rate) for weight, rate in zip(old, new, strict=True) if weight > 0]
        else:
            kept = list(zip(old, new, strict=True))
        speeds = [rate / weight for weight, rate in kept]  # in records a second for each of its part of the weights
        usual = sum(new) / sum(old)
        if max(speeds) > (1 + DEAD_BAND) * usual or min(speeds) < (1 - DEAD_BAND) * usual:
            return StepSplit(new, settling=left)
        uneven = self.uneven + 1 if usual > (1 + SLACK) * min(speeds) else 0
        if uneven >= (1 if self.settling else max(STEADY, OVER_S * sum(new) / max(records, 1))):
            return StepSplit(new, settling=left)
        return self if uneven == self.uneven and left == self.settling else StepSplit(old, uneven, left)


def _raise_to_floor(rates: Sequence[float]) -> tuple[float, ...]:
    floor = FLOOR * max(rates)
    return tuple(max(rate, floor) if rate > 0 else 0.0 for rate in rates)
