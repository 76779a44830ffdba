"""Promises of autoscaling, on simulated jobs whose throughput is known."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.train.autoscale import FORGET_S, Bounds, Scaling, decide, pays


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


BOUNDS = Bounds(low=2, high=6)


def known(**speeds: float) -> Scaling:
    """What was measured at these numbers of workers: w3=300.0."""
    return Scaling(speeds={int(name[1:]): (speed, 0.0) for name, speed in speeds.items()})


def asked(scaling: Scaling, workers: int, speed: float, bounds: Bounds = BOUNDS) -> int:
    """The number of workers after a window in which `workers` of them applied `speed` records a second."""
    assert decide(scaling, workers, 0, 0.0, bounds)[0] == workers, "a window has just begun"
    return decide(scaling, workers, int(10 * speed), 10.0, bounds)[0]


@pytest.mark.parametrize(("workers", "wanted"), [(0, 2), (1, 2), (7, 6), (9, 6)])
def test_outside_its_bounds_a_job_is_brought_back_at_once(workers, wanted):
    assert decide(Scaling(), workers, 0, 0.0, BOUNDS)[0] == wanted


@pytest.mark.parametrize(
    ("speeds", "workers", "speed", "wanted"),
    [
        ({}, 3, 300.0, 4),
        ({}, 6, 600.0, 6),
        ({"w2": 200.0}, 3, 250.0, 4),
        ({"w2": 200.0}, 3, 249.0, 2),
        ({"w2": 200.0, "w4": 291.0}, 3, 250.0, 3),
        ({"w2": 200.0, "w4": 342.0}, 3, 300.0, 3),
        ({"w4": 400.0}, 3, 300.0, 4),
        ({"w1": 300.0}, 2, 300.0, 3),
        ({"w1": 300.0, "w3": 301.0}, 2, 300.0, 2),
    ],
    ids=str,
)
def test_the_next_number_of_workers_follows_from_what_the_last_one_brings(speeds, workers, speed, wanted):
    assert asked(known(**speeds), workers, speed) == wanted


def test_within_a_window_of_measurement_nothing_is_decided():
    scaling = known(w3=300.0)
    assert [decide(scaling, 3, int(30 * now), now, BOUNDS)[0] for now in (0.0, 5.0, 9.9, 10.0)] == [3, 3, 3, 4]


def test_a_worker_pays_from_half_of_the_average_on():
    assert [pays(300.0, after, 4) for after in (349.0, 350.0)] == [False, True]


def test_a_window_is_of_one_number_of_workers_and_ten_seconds_or_more():
    scaling = Scaling()
    assert [scaling.measure(3, records, now) for records, now in ((0, 0.0), (99, 9.9), (100, 10.0))] == [
        False,
        False,
        True,
    ]
    assert scaling.speed(3) == 10.0
    assert [scaling.measure(4, records, now) for records, now in ((150, 11.0), (350, 21.0))] == [False, True]
    assert (scaling.speed(3), scaling.speed(4)) == (10.0, 20.0)
    assert [scaling.measure(4, records, now) for records, now in ((10, 22.0), (410, 32.0))] == [False, True], (
        "it went back"
    )
    assert scaling.speed(4) == 30.0, "half of 20 and half of 40"
    scaling.measure(5, 500, 32.0 + FORGET_S)
    assert (scaling.speed(3), scaling.speed(4)) == (None, 30.0)
    scaling.measure(5, 500, 32.1 + FORGET_S)
    assert scaling.speed(4) is None
