"""Promises of autoscaling, on simulated jobs whose throughput is known."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.train.membership.autoscale import FORGET_S, Bounds, Scaling, decide, pays


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


@pytest.mark.parametrize(
    ("speeds", "workers", "speed", "bounds", "expected"),
    [
        ({}, 3, 300.0, BOUNDS, (4, "300 records/s with 3 workers: one more may pay")),
        ({"w2": 200.0}, 3, 249.0, BOUNDS, (2, "249 records/s with 3 workers, 200 with 2")),
        ({"w2": 200.0}, 3, 250.0, BOUNDS, (4, "250 records/s with 3 workers: one more may pay")),
        ({"w2": 200.0, "w4": 291.0}, 3, 250.0, BOUNDS, (3, "")),
        ({"w4": 349.0}, 3, 300.0, BOUNDS, (3, "")),
        ({"w4": 350.0}, 3, 300.0, BOUNDS, (4, "300 records/s with 3 workers: one more may pay")),
        ({"w1": 300.0, "w3": 301.0}, 2, 300.0, BOUNDS, (2, "")),  # fewer than the least are not asked for
        ({"w5": 500.0}, 6, 600.0, BOUNDS, (6, "")),
        ({"w5": 500.0}, 6, 501.0, BOUNDS, (5, "501 records/s with 6 workers, 500 with 5")),
        ({"w3": 300.0}, 4, 400.0, Bounds(low=2, high=6, capacity=4), (4, "")),
    ],
    ids=str,
)
def test_a_change_of_workers_comes_with_the_speeds_that_speak_for_it(speeds, workers, speed, bounds, expected):
    scaling = known(**speeds)
    assert decide(scaling, workers, 0, 0.0, bounds) == (workers, ""), "a window has just begun"
    assert decide(scaling, workers, int(10 * speed), 10.0, bounds) == expected


@pytest.mark.parametrize(
    ("workers", "bounds", "expected"),
    [
        (0, BOUNDS, (2, "at least 2 workers")),
        (1, BOUNDS, (2, "at least 2 workers")),
        (2, BOUNDS, (2, "")),
        (6, BOUNDS, (6, "")),
        (7, BOUNDS, (6, "there is room for 6 workers")),
        (5, Bounds(low=2, high=6, capacity=4), (4, "there is room for 4 workers")),
        (4, Bounds(low=2, high=6, capacity=4), (4, "")),
        (3, Bounds(low=2, high=6, capacity=1), (2, "there is room for 2 workers")),
        (7, Bounds(low=2, high=6, capacity=9), (6, "there is room for 6 workers")),
        (1, Bounds(low=2, high=6, capacity=0), (2, "at least 2 workers")),
    ],
    ids=str,
)
def test_bounds_are_kept_before_anything_is_measured_and_named(workers, bounds, expected):
    assert decide(Scaling(), workers, 0, 0.0, bounds) == expected


def test_a_new_window_begins_with_another_number_of_workers_or_with_fewer_records():
    scaling = Scaling()
    seen = [
        scaling.measure(*call)
        for call in (
            (3, 1000, 100.0), (3, 1200, 110.0),  # 20 a second
            (3, 1200, 119.9), (3, 1500, 120.0),  # 30 a second
            (4, 1600, 130.0), (4, 1600, 140.0),  # none
            (4, 1500, 150.0), (4, 1500, 159.9), (4, 1900, 170.0),  # it went back: 20 a second
        )
    ]  # fmt: skip
    assert seen == [False, True, False, True, False, True, False, False, True]
    assert scaling == Scaling({3: (25.0, 120.0), 4: (10.0, 170.0)}, 4, 170.0, 1900)


def test_speeds_that_were_measured_up_to_ten_minutes_ago_are_known():
    scaling = Scaling({2: (20.0, 0.0), 3: (30.0, 0.1), 4: (0.0, 1.0)}, 9, 0.0, 0)
    scaling.measure(9, 0, FORGET_S)
    assert [scaling.speed(workers) for workers in (2, 3, 4, 5, 9)] == [20.0, 30.0, 0.0, None, 0.0]
    scaling.measure(9, 0, FORGET_S + 0.1)
    assert [scaling.speed(workers) for workers in (2, 3, 4, 5, 9)] == [None, 30.0, 0.0, None, 0.0]


@pytest.mark.parametrize(
    ("before", "after", "workers", "enough"),
    [(300.0, 350.0, 4, True), (300.0, 349.9, 4, False), (100.0, 150.0, 2, True), (100.0, 149.9, 2, False),
     (0.0, 0.0, 2, True), (100.0, 90.0, 3, False)],
)  # fmt: skip
def test_the_last_worker_pays_when_it_brings_half_of_what_those_before_it_bring_each(before, after, workers, enough):
    assert pays(before, after, workers) is enough
