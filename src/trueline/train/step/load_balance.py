"""How fast each member computes, and how large its share of a step is.

Each member sends its records a second in the account of every step, so all derive the same weights from the same rates.
A member with rate 0 has no share: it is still receiving the state. The weights change at once when a rate differs by
more than `DEAD_BAND`, and when another split would have saved more than `SLACK` for `STEADY` steps in a row and for a
second; where the first rates come from the trial forward, for one step in the first `SETTLING` and the first second. So
few measurements do not tell members apart whose rates are within `ALIKE` of each other: these have equal shares until
more is known. A short disturbance changes nothing: new batch sizes waste what was read ahead, and compiled models.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

DEAD_BAND = 0.10
SLACK, STEADY, SETTLING = 0.02, 8, 8
OVER_S = 1.0  # a rate averages about this many seconds, if they have more than a few steps
SMOOTHING = 0.3  # weight of the newest measurement if its step took `SMOOTHING * OVER_S` or longer
ALIKE = 1.25
"""Greatest / least rate up to which a forward, or a few steps, say nothing of who is faster: two processes on equal
cores differ as much while others start."""
FLOOR = 0.01
"""Least weight, as a fraction of the greatest: a slower member keeps a few records, so that it is measured again."""


def smooth_rate(before: float, records: int, took_s: float, step_s: float, measured: int = 9) -> float:
    """The rate to send after `records` took `took_s` seconds in a step of `step_s`.

    `measured`: earlier measurements; the first few count alike. A rate that fell by more than half is taken as it is if
    the records usually take long: in a short step the worker may only have waited for the processor.

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


@dataclass(slots=True)
class StepTimer:
    """Where the time of a step goes, in laps. Measured on the host: a GPU's time counts where the host waits for it."""

    rate: float = 0.0
    """Records a second from the start of reading to the end of the local backward, smoothed; 0: not measured."""
    last_ms: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Milliseconds of the last applied step: reading, computing, waiting, committing."""
    _measured: int = 0  # measurements in `rate`
    _data_s: float = 0.0
    _compute_s: float = 0.0
    _wait_s: float = 0.0  # these three: seconds of the current step
    _since: float = 0.0
    _ahead_s: float = 0.0  # spent in this step on reading the next step's batch
    _step_s: float = math.inf
    """Of the last step. A step longer than the one before is weighted like it: a member was stopped in it."""
    _before_s: float = 0.0  # spent in the step before on reading this step's batch

    def begin(self) -> None:
        self._data_s = self._compute_s = self._wait_s = 0.0
        self._before_s, self._ahead_s = self._ahead_s, 0.0
        self._since = time.perf_counter()

    def _lap(self) -> float:
        """Seconds since the last call."""
        now = time.perf_counter()
        took_s, self._since = now - self._since, now
        return took_s

    def end_reading(self) -> None:
        self._data_s += self._lap()

    def end_computing(self) -> None:
        self._compute_s += self._lap()

    def end_reading_ahead(self) -> None:
        self._ahead_s = self._lap()
        self._data_s += self._ahead_s

    def end_waiting(self, records: int) -> None:
        """Ends the wait for the sums. `records`: this worker's contribution."""
        self._wait_s += self._lap()
        local_s = self._before_s + self._data_s - self._ahead_s + self._compute_s
        if records and local_s > 0:
            # A process loads and allocates in its first step, so that step predicts nothing.
            before = self.rate if self._measured != 1 else 0.0
            before_s, self._step_s = self._step_s, self._data_s + self._compute_s + self._wait_s
            self.rate = smooth_rate(before, records, local_s, min(before_s, self._step_s), max(0, self._measured - 1))
            self._measured += 1

    def end_committing(self) -> None:
        commit_s = self._lap()
        self.last_ms = self._data_s * 1e3, self._compute_s * 1e3, self._wait_s * 1e3, commit_s * 1e3


def initial_weights(rates: Sequence[float], *, behind: Sequence[bool]) -> tuple[float, ...]:
    """The weights of a new group, from the rates that its members bring (0: none).

    A negative rate is that of a forward before the first step; it counts until a member has measured. A member without
    a rate is taken to be as fast as the average; a member that is `behind` has no share yet.

    >>> initial_weights([100.0, -900.0, 300.0], behind=[False, False, True])
    (100.0, 200.0, 0.0)
    >>> initial_weights([-100.0, -10.0, 0.0], behind=[False] * 3)
    (100.0, 10.0, 55.0)
    >>> initial_weights([-100.0, -85.0], behind=[False] * 2)
    (92.5, 92.5)
    """
    measured = any(rate > 0 for rate in rates)
    counted = [max(rate, 0.0) if measured else -rate for rate in rates]
    known = [rate for rate in counted if rate > 0]
    usual = sum(known) / len(known) if known else 1.0
    weights = [0.0 if late else (rate or usual) for rate, late in zip(counted, behind, strict=True)]
    return _raise_to_floor(weights) if measured else _level(weights)


@dataclass(frozen=True, slots=True)
class StepSplit:
    """By rank: in which proportion the members share a step. Each group starts with a new one, so all members agree."""

    weights: tuple[float, ...] = (1.0,)
    uneven: int = 0  # steps in a row in which members waited for others longer than `SLACK`
    settling: float = 0  # steps left in which one uneven step is enough: the split was not measured for a second

    def after_step(self, rates: Sequence[float], records: int) -> StepSplit:
        """The split of the next step, if the members of this one, of `records` records, measured `rates`.

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
        >>> StepSplit((1.0, 2.0), settling=4).after_step([100.0, 106.0], 200)
        StepSplit(weights=(103.0, 103.0), uneven=0, settling=3)
        >>> StepSplit((1.0, 1.0), settling=4).after_step([100.0, 150.0], 200)
        StepSplit(weights=(100.0, 150.0), uneven=0, settling=3)
        """
        if not max(rates) > 0:
            return self
        new = _level(rates) if self.settling else _raise_to_floor(rates)
        old, left = self.weights, max(0, self.settling - min(1, SETTLING * records / (OVER_S * sum(new))))
        pairs = list(zip(old, new, strict=True))
        if 0.0 in old or 0.0 in new:
            if any((weight > 0) != (rate > 0) for weight, rate in pairs):
                return StepSplit(new, settling=left)
            pairs = [(weight, rate) for weight, rate in pairs if weight > 0]
        speeds = [rate / weight for weight, rate in pairs]  # records a second for each unit of weight
        usual = sum(new) / sum(old)
        if max(speeds) > (1 + DEAD_BAND) * usual or min(speeds) < (1 - DEAD_BAND) * usual:
            return StepSplit(new, settling=left)
        uneven = self.uneven + 1 if usual > (1 + SLACK) * min(speeds) else 0
        if uneven >= (1 if self.settling else max(STEADY, OVER_S * sum(new) / max(records, 1))):
            return StepSplit(new, settling=left)
        return self if uneven == self.uneven and left == self.settling else StepSplit(old, uneven, left)


def _level(rates: Sequence[float]) -> tuple[float, ...]:
    """As `_raise_to_floor`, but equal weights for rates that are within ALIKE of each other."""
    known = [rate for rate in rates if rate > 0]
    if not known or max(known) > ALIKE * min(known):
        return _raise_to_floor(rates)
    mean = sum(known) / len(known)
    return tuple(mean if rate > 0 else 0.0 for rate in rates)


def _raise_to_floor(rates: Sequence[float]) -> tuple[float, ...]:
    floor = FLOOR * max(rates)
    if min(rates) >= floor > 0:
        return tuple(rates)
    return tuple(max(rate, floor) if rate > 0 else 0.0 for rate in rates)
