"""Programs are timed in turns, as a server of one of them would run it, whatever the others do to the caches."""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np
import pytest

from trueline.compress.measure.latency import LEAST, MOST_CALLS, WARM, measure_alternately


class Machine:
    """A clock, and programs that take their time, and `cold` more where another ran before them."""

    def __init__(self, cold: float = 0.0) -> None:
        self.now, self.cold, self.last = 0.0, cold, ""
        self.ran: list[str] = []

    def clock(self) -> float:
        return self.now

    def program(self, name: str, takes: float) -> object:
        def run() -> None:
            self.now += takes + (self.cold if self.last != name else 0.0)
            self.last = name
            self.ran.append(name)

        return run


def test_a_call_after_another_program_does_not_count() -> None:
    machine = Machine(cold=0.5)
    runs = {"slow": machine.program("slow", 0.08), "fast": machine.program("fast", 0.01)}
    found = measure_alternately(runs, seconds=20.0, clock=machine.clock)  # type: ignore[arg-type]
    assert found.timing("slow").median_ms == pytest.approx(80)
    assert (found.timing("fast").median_ms, found.timing("fast").p99_ms) == pytest.approx((10, 10))
    assert found.speedup("fast", "slow") == pytest.approx((8, 8))


def test_every_other_round_goes_backwards_and_a_fast_program_is_called_several_times() -> None:
    machine = Machine()
    runs = {"a": machine.program("a", 0.1), "b": machine.program("b", 1e-5)}
    found = measure_alternately(runs, seconds=3.0, clock=machine.clock)  # type: ignore[arg-type]
    rounds = len(found.visits["a"])
    assert rounds >= LEAST
    assert (found.timing("a").calls, found.timing("b").calls) == (rounds, MOST_CALLS * rounds)
    turns = [(name, len(list(calls))) for name, calls in groupby(machine.ran[2 * WARM :])]
    assert turns[:3] == [("a", 2), ("b", 2 * (MOST_CALLS + 1)), ("a", 4)]


def test_a_slow_program_takes_about_half_of_the_time() -> None:
    machine = Machine()
    runs = {"eager": machine.program("eager", 0.1), "fast": machine.program("fast", 0.004)}
    found = measure_alternately(runs, seconds=10.0, slow="eager", clock=machine.clock)  # type: ignore[arg-type]
    assert 0.4 < 0.1 * machine.ran.count("eager") / machine.now < 0.6
    assert LEAST <= np.isfinite(found.visits["eager"]).sum() < len(found.visits["fast"]) / 20
    assert found.speedup("fast", "eager")[0] == pytest.approx(25)


def test_the_lower_bound_of_a_ratio_is_one_of_its_rounds() -> None:
    machine = Machine()
    takes = iter(0.01 * (1 + 0.1 * math.sin(place)) for place in range(10_000))

    def unsteady() -> None:
        machine.now += next(takes)

    runs = {"base": machine.program("base", 0.05), "unsteady": unsteady}
    found = measure_alternately(runs, seconds=5.0, clock=machine.clock)  # type: ignore[arg-type]
    middle, low = found.speedup("unsteady", "base")
    ratios = np.sort(found.visits["base"] / found.visits["unsteady"])
    assert low in ratios
    assert ratios[0] <= low < middle < 0.05 / 0.009 + 0.01
