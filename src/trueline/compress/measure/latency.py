"""How fast programs are, measured alternately: each round visits every program, so that what else the machine does
meets all of them. The first call of a visit does not count: it finds the caches full of another program's weights,
which a server of one program never does. Ratios are of the fastest calls of the same round, which other processes
disturb least; every other round goes backwards. A program that takes far longer than all others together (the eager
model, beside compiled ones) is visited in some of the rounds only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Run = Callable[[], object]
Clock = Callable[[], float]
WARM = 3
LEAST, MOST = 11, 1000
"""Rounds. Below LEAST a median and its bounds say little."""
VISIT_S = 0.002
MOST_CALLS = 32
"""Calls of a visit that count: until they take VISIT_S, at most this many."""
SURE = 1.1632
"""Half the normal quantile for 99 %: the order statistic that bounds a median is this times the root of their number
away from it."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one program at one batch size, in milliseconds."""

    median_ms: float
    p99_ms: float
    calls: int


@dataclass(frozen=True, slots=True)
class Rounds:
    """Seconds of each program: of every call that counts, and the least of each visit, NaN in rounds without one."""

    calls: Mapping[str, Floats]
    visits: Mapping[str, Floats]

    def timing(self, name: str) -> Timing:
        found = self.calls[name] * 1e3
        p99 = float(np.quantile(found, 0.99, method="higher"))
        return Timing(median_ms=float(np.median(found)), p99_ms=p99, calls=len(found))

    def speedup(self, name: str, over: str) -> tuple[float, float]:
        """How many times as fast as `over`: the median of the rounds' ratios, and its lower bound (99 %, one-sided)."""
        ratios = self.visits[over] / self.visits[name]
        ratios = np.sort(ratios[np.isfinite(ratios)])
        low = max(0, math.floor(len(ratios) / 2 - SURE * math.sqrt(len(ratios))))
        return float(np.median(ratios)), float(ratios[low])


def measure_alternately(
    runs: Mapping[str, Run], *, seconds: float, slow: str = "", clock: Clock = time.perf_counter
) -> Rounds:
    """Visits each of `runs` once a round, for about `seconds`: LEAST rounds at least and MOST at most. `slow` is
    visited in as few rounds as keep its share of the time at a half, LEAST at least."""
    once = {name: _warm(run, clock) for name, run in runs.items()}
    repeats = {name: max(1, min(MOST_CALLS, math.ceil(VISIT_S / max(took, 1e-9)))) for name, took in once.items()}
    visit = {name: took * (1 + repeats[name]) for name, took in once.items()}
    others = sum(took for name, took in visit.items() if name != slow)
    every = max(1, math.ceil(visit[slow] / max(others, 1e-9))) if slow else 1
    calls: dict[str, list[float]] = {name: [] for name in runs}
    visits: dict[str, list[float]] = {name: [] for name in runs}
    names, began, rounds = list(runs), clock(), 0
    while rounds < LEAST * every or (rounds < MOST and clock() - began < seconds):
        for name in names if rounds % 2 == 0 else reversed(names):
            if name == slow and rounds % every:
                visits[name].append(math.nan)
                continue
            _time(runs[name], clock)
            times = [_time(runs[name], clock) for _ in range(repeats[name])]
            calls[name] += times
            visits[name].append(min(times))
        rounds += 1
        if rounds >= LEAST and clock() - began > 4 * seconds:
            break
    return Rounds(*({name: np.array(found) for name, found in one.items()} for one in (calls, visits)))


def _warm(run: Run, clock: Clock) -> float:
    return min(_time(run, clock) for _ in range(WARM))


def _time(run: Run, clock: Clock) -> float:
    started = clock()
    run()
    return clock() - started
