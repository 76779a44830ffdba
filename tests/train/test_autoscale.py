"""Promises of autoscaling, on simulated jobs whose throughput is known."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from trueline.train.autoscale import FORGET_S, Bounds, Scaling, decide


class Sim:
    """A job whose n workers apply `curve(n)` records a second."""

    def __init__(self, curve, workers: int, bounds: Bounds) -> None:
        self.curve, self.workers, self.bounds = curve, workers, bounds
        self.scaling, self.now, self.records = Scaling(), 0.0, 0.0
        self.history = [workers]

    def run(self, seconds: float) -> "Sim":
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            self.records += 0.5 * self.curve(self.workers)
            wanted, why = decide(self.scaling, self.workers, int(self.records), self.now, self.bounds)
            assert (wanted != self.workers) == bool(why)
            if wanted != self.workers:
                self.workers = wanted
                self.history.append(wanted)
        return self


def knee(at: int):
    """Linear up to `at` workers, flat beyond."""
    return lambda workers: 100.0 * min(workers, at)


def test_a_job_grows_by_one_until_another_worker_does_not_pay():
    sim = Sim(knee(4), 1, Bounds(low=1, high=8)).run(120)
    assert sim.history == [1, 2, 3, 4, 5, 4]


def test_workers_that_do_not_pay_are_tried_again_when_the_measurement_is_old():
    sim = Sim(knee(2), 1, Bounds(low=1, high=8)).run(120)
    assert sim.history == [1, 2, 3, 2]
    sim.curve = knee(4)
    sim.run(FORGET_S + 120)
    assert sim.workers == 4


def test_a_job_that_scales_takes_all_that_there_is_room_for():
    assert Sim(knee(99), 1, Bounds(low=1, high=8)).run(120).workers == 8
    assert Sim(knee(99), 1, Bounds(low=1, high=8, capacity=3)).run(120).history == [1, 2, 3]


def test_half_of_what_a_worker_brings_on_average_is_enough():
    assert Sim(lambda n: 100.0 * n**0.8, 1, Bounds(low=1, high=6)).run(120).workers == 6
    assert Sim(lambda n: 100.0 * n**0.3, 1, Bounds(low=1, high=6)).run(120).workers == 1


def test_less_room_than_the_minimum_still_leaves_the_minimum():
    assert Sim(knee(9), 4, Bounds(low=2, high=8, capacity=1)).run(60).history == [4, 2]


@given(
    low=st.integers(1, 4),
    more=st.integers(0, 6),
    capacity=st.none() | st.integers(1, 10),
    workers=st.integers(1, 12),
    speeds=st.lists(st.floats(0.0, 1e4), min_size=13, max_size=13),
)
def test_the_bounds_hold_whatever_is_measured_and_moves_are_single_steps(low, more, capacity, workers, speeds):
    bounds = Bounds(low=low, high=low + more, capacity=capacity)
    sim = Sim(lambda n: speeds[n], workers, bounds).run(100)
    assert all(bounds.low <= found <= bounds.top for found in sim.history[1:])
    inside = [found for found in sim.history if bounds.low <= found <= bounds.top]
    assert all(abs(a - b) == 1 for a, b in itertools.pairwise(inside))
