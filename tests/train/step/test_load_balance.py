"""Promises of the split of a step: it follows measured speed, for all members alike, and holds still otherwise."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.data.order import permutation
from trueline.train.step import load_balance
from trueline.train.step.group import WorkerGroup
from trueline.train.step.load_balance import StepSplit, StepTimer
from trueline.wire import train_pb2 as pb

RATES = st.lists(st.floats(1.0, 1e6), min_size=1, max_size=8)


@given(RATES)
def test_nobody_starves_and_nobody_who_observes_has_a_share(rates):
    weights = load_balance.initial_weights([*rates, 50.0], behind=[False] * len(rates) + [True])
    assert weights[-1] == 0.0
    assert min(weights[:-1]) >= load_balance.FLOOR * max(weights)


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=8))
def test_the_split_settles_where_all_are_done_at_the_same_time(speeds):
    """Workers with a fixed cost beside the cost of each record: n / time is not their speed, yet it converges."""
    batch, split, rates = 10_000, StepSplit((1.0,) * len(speeds)), [0.0] * len(speeds)
    for _ in range(60):
        counts = [stop - start for start, stop in permutation.split(batch, split.weights)]
        times = [20.0 + count / speed for count, speed in zip(counts, speeds, strict=True)]
        rates = [load_balance.smooth_rate(before, count, took, max(times))
                 for before, count, took in zip(rates, counts, times, strict=True)]  # fmt: skip
        split = split.after_step(rates, batch)
    ideal = 20.0 + batch / sum(speeds)
    assert max(times) <= 1.05 * ideal


def test_noise_below_a_tenth_moves_no_record_unless_it_lasts():
    split = before = StepSplit((100.0, 100.0, 100.0))
    for step in range(3 * load_balance.STEADY):
        split = split.after_step([107.0, 97.0, 100.0] if step % load_balance.STEADY else [100.0, 100.0, 100.0], 300)
        assert split.weights == before.weights
    assert before.after_step([150.0, 97.0, 100.0], 300).weights != before.weights
    for _ in range(load_balance.STEADY):
        split = split.after_step([93.0, 100.0, 100.0], 300)
    assert split == StepSplit((93.0, 100.0, 100.0))


def test_short_steps_do_not_follow_every_moment_in_which_somebody_else_had_the_processor():
    """In one step of three a worker waits for the processor as long as it computes: a split that followed each of them
    changed in every third step, and what was read ahead was read in vain."""
    dice, batch = random.Random(0), 200
    split, rates, changes = StepSplit((100.0, 100.0)), [0.0, 0.0], 0
    for step in range(400):
        counts = [stop - start for start, stop in permutation.split(batch, split.weights)]
        times = [0.01 * count / batch * dice.choice((1, 1, 2)) for count in counts]
        rates = [load_balance.smooth_rate(before, count, took, max(times), step)
                 for before, count, took in zip(rates, counts, times, strict=True)]  # fmt: skip
        before, split = split, split.after_step(rates, batch)
        changes += split.weights != before.weights
    assert changes <= 10
    assert 0.8 <= split.weights[0] / split.weights[1] <= 1.25


def test_short_steps_follow_a_worker_that_has_become_slow_within_some_seconds():
    batch, split, rates, trained_s, times = 200, StepSplit((1e4, 1e4)), [2e4, 2e4], 0.0, [1.0, 0.0]
    while max(times) > 1.1 * batch / (2e4 + 2e3):
        counts = [stop - start for start, stop in permutation.split(batch, split.weights)]
        times = [count / speed for count, speed in zip(counts, (2e4, 2e3), strict=True)]
        trained_s += max(times)  # what such steps would take
        rates = [load_balance.smooth_rate(before, count, took, max(times), 500)
                 for before, count, took in zip(rates, counts, times, strict=True)]  # fmt: skip
        split = split.after_step(rates, batch)
    assert trained_s < 5.0


@pytest.mark.parametrize(("known", "steps"), [([-100.0, -100.0], 1), ([100.0, 100.0], load_balance.STEADY)])
def test_a_split_that_was_only_tried_gives_way_to_the_first_steps_that_were_measured(known, steps):
    group = WorkerGroup(None, None, None, view=pb.View(members=["a", "b"]), plan=pb.Plan(rates=known))  # type: ignore[arg-type]
    group.start_shares([False, False])
    needed = 0
    while group.weights == (100.0, 100.0):
        needed += 1
        group.update_rates([104.0, 76.0] if known[0] < 0 else [100.0, 94.0], 200)
    assert needed == steps
    assert group.weights == ((104.0, 76.0) if known[0] < 0 else (100.0, 94.0))
    again = load_balance.STEADY if known[0] > 0 else 1  # the first measurement was not the last word either
    for _ in range(again):
        group.update_rates([106.0, 70.0] if known[0] < 0 else [106.0, 94.0], 200)
    assert group.weights == ((106.0, 70.0) if known[0] < 0 else (106.0, 94.0))


@pytest.mark.parametrize("step_s", [0.004, 0.5])
def test_members_that_first_measurements_do_not_tell_apart_have_equal_shares_for_a_second(step_s):
    """Two processes on equal cores, while others start: a share of 111 and 81 of 192 records once lasted 319 steps."""
    records = 200
    rates = [0.54 * records / step_s, 0.46 * records / step_s]
    tried = load_balance.initial_weights([-rates[0], -rates[1]], behind=[False, False])
    split, equal = StepSplit(tried, settling=load_balance.SETTLING), 0
    while split.weights[0] == split.weights[1]:
        equal += 1
        split = split.after_step(rates, records)
    assert equal * step_s >= 1.0
    assert equal >= load_balance.SETTLING
    assert split.weights == tuple(rates), "what lasts is taken as it is"
    assert equal * step_s < 2.5 or equal < 2 * load_balance.SETTLING + 2


def test_what_a_process_does_in_its_first_step_is_no_measure_of_its_speed(monkeypatch):
    timer, clock = StepTimer(), iter([0.0, 0.0, 2.0, 2.0, 10.0, 10.0, 11.0, 11.0, 20.0, 20.0, 21.5, 21.5])
    monkeypatch.setattr("trueline.train.step.load_balance.time.perf_counter", lambda: next(clock))
    rates = []
    for _ in range(3):  # 100 records in 2 s, in 1 s, in 1.5 s
        timer.begin()
        timer.end_reading()
        timer.end_computing()
        timer.end_waiting(100)
        rates.append(timer.rate)
    assert rates == [50.0, 100.0, pytest.approx((100.0 + 100 / 1.5) / 2)]


def test_a_short_step_in_which_a_worker_or_its_peers_stood_still_counts_as_much_as_the_others(monkeypatch):
    timer, clock = StepTimer(), [0.0]
    monkeypatch.setattr("trueline.train.step.load_balance.time.perf_counter", lambda: clock[0])

    def step(compute_s, wait_s):
        timer.begin()
        timer.end_reading()
        clock[0] += compute_s
        timer.end_computing()
        clock[0] += wait_s
        timer.end_waiting(100)
        return timer.rate

    for _ in range(300):
        step(0.005, 0.005)
    step(0.01, 0.5)
    assert step(0.005, 0.005) > 0.99 * 100 / 0.005
    assert step(0.5, 0.0) > 0.98 * 100 / 0.005


@pytest.mark.parametrize("rates", [[0.0, 0.0], [-5.0, 0.0]])
def test_rates_that_nobody_measured_change_nothing(rates):
    assert StepSplit((3.0, 1.0)).after_step(rates, 4) == StepSplit((3.0, 1.0))


def test_records_change_hands_with_the_rotation_however_uneven_the_members_were():
    owners = []
    for rotation in range(1, 5):
        holders = []
        for rank in range(3):
            group = WorkerGroup(None, None, None, rank=rank)  # type: ignore[arg-type]
            group.view = pb.View(members=["a", "b", "c"], rotation=rotation)
            group.plan = pb.Plan(rates=[1.0, 98.0, 1.0])
            group.start_shares([False] * 3)
            start, stop = permutation.split(30, group.ordered_weights)[group.position]
            holders += [rank] * (start <= 15 < stop)
        owners += holders
    assert len(owners) == 4
    assert all(one != other for one, other in itertools.pairwise(owners))


def test_one_slow_member_of_many_is_noticed_though_none_is_fast():
    split = StepSplit((100.0,) * 8)
    assert split.after_step([100.0] * 7 + [85.0], 800).weights == (100.0,) * 7 + (85.0,)
    assert split.after_step([100.0] * 7 + [115.0], 800).weights == (100.0,) * 7 + (115.0,)
    assert split.after_step([100.0] * 7 + [95.0], 800).weights == split.weights


def test_who_has_taken_the_state_gets_a_part_at_once_and_who_takes_it_has_none():
    split = StepSplit((100.0, 100.0, 0.0))
    assert split.after_step([100.0, 101.0, 0.0], 200) == split
    for rate in (60.0, 5.0):
        assert split.after_step([100.0, 100.0, rate], 200).weights == (100.0, 100.0, rate)
        assert StepSplit((100.0, 100.0, rate)).after_step([100.0, 100.0, 0.0], 200).weights == (100.0, 100.0, 0.0)
    assert StepSplit((100.0, 100.0)).after_step([100.0, 0.0], 200).weights == (100.0, 0.0)


def test_a_speed_that_was_only_tried_counts_while_none_was_measured():
    assert load_balance.initial_weights([-900.0, 300.0], behind=[False, False]) == (300.0, 300.0)
    assert load_balance.initial_weights([-900.0, -300.0], behind=[False, False]) == (900.0, 300.0)
    assert load_balance.initial_weights([0.0, 0.0], behind=[False, False]) == (1.0, 1.0)


def test_the_time_of_settling_ends():
    split, left = StepSplit((100.0, 100.0), settling=3), []
    for _ in range(4):
        split = split.after_step([100.0, 101.0], 200)
        left.append(split.settling)
    assert left == [2, 1, 0, 0]
    assert split.after_step([100.0, 94.0], 200).weights == (100.0, 100.0), "one uneven step is not enough any more"


@pytest.mark.parametrize(
    ("before", "records", "took_s", "step_s", "measured", "expected"),
    [
        (0.0, 100, 2.0, 1.0, 9, 50.0),
        (-3.0, 100, 2.0, 1.0, 9, 50.0),
        (0.5, 2, 2.0, 1.0, 9, 0.65),  # a slow worker is smoothed as well
        (100.0, 110, 1.0, 1.0, 9, 103.0),
        (100.0, 110, 1.0, 0.3, 9, 103.0),
        (100.0, 110, 1.0, 0.2, 9, 102.0),
        (100.0, 110, 1.0, 0.1, 9, 101.0),
        (100.0, 110, 1.0, 0.01, 9, 101.0),
        (100.0, 110, 1.0, 0.02, 99, 100.2),
        (100.0, 110, 1.0, 0.001, 99, 100.1),
        (100.0, 110, 1.0, 1.0, 1, 105.0),
        (100.0, 110, 1.0, 1.0, 0, 110.0),
        (100.0, 50, 1.0, 1.0, 9, 85.0),  # half as fast is not yet much slower
        (100.0, 49, 1.0, 1.0, 9, 49.0),
        (100.0, 30, 1.0, 1.0, 9, 30.0),  # what usually takes 0.3 s
        (100.0, 29, 1.0, 1.0, 9, 78.7),  # what usually takes less
        (100.0, 29, 1.0, 0.1, 9, 92.9),
    ],
)
def test_a_rate_is_smoothed_by_the_length_of_its_step_and_by_how_often_it_was_measured(
    before, records, took_s, step_s, measured, expected
):
    assert load_balance.smooth_rate(before, records, took_s, step_s, measured) == pytest.approx(expected, rel=1e-12)


def test_a_rate_counts_as_the_tenth_measurement_where_nothing_is_said_of_those_before():
    assert load_balance.smooth_rate(100.0, 200, 1.0, 0.01) == pytest.approx(110.0, rel=1e-12)


@pytest.mark.parametrize(
    ("rates", "behind", "weights"),
    [
        ([0.0, 0.0, 0.0], "---", (1.0, 1.0, 1.0)),
        ([0.0, 0.0, 0.0], "--b", (1.0, 1.0, 0.0)),
        ([100.0, -900.0, 300.0], "--b", (100.0, 200.0, 0.0)),
        ([100.0, 0.0, 300.0], "---", (100.0, 200.0, 300.0)),
        ([-100.0, -10.0, 0.0], "---", (100.0, 10.0, 55.0)),
        ([-100.0, -10.0, 0.0], "b--", (0.0, 10.0, 55.0)),
        ([0.5, -9.0, 0.0], "---", (0.5, 0.5, 0.5)),
        ([-0.5, 0.0], "--", (0.5, 0.5)),
        ([1000.0, 10.0, 9.0], "---", (1000.0, 10.0, 10.0)),
        ([1000.0, 1.0, 0.0], "b-b", (0.0, 1.0, 0.0)),
    ],
    ids=str,
)
def test_the_first_weights_are_what_was_measured_or_else_tried_or_else_the_average(rates, behind, weights):
    assert load_balance.initial_weights(rates, behind=[one == "b" for one in behind]) == weights


EVEN, THREE = (1.0, 1.0), (1.0, 1.0, 1.0)
UPPER, LOWER = (1 + load_balance.DEAD_BAND) * 100, (1 - load_balance.DEAD_BAND) * 100


@pytest.mark.parametrize(
    ("split", "rates", "records", "expected"),
    [
        # Who takes no part.
        (StepSplit((3.0, 1.0)), [0.0, 0.0], 200, StepSplit((3.0, 1.0))),
        (StepSplit((3.0, 1.0), 2, 5), [-5.0, 0.0], 200, StepSplit((3.0, 1.0), 2, 5)),
        (StepSplit((*EVEN, 0.0)), [100.0, 101.0, 0.0], 200, StepSplit((*EVEN, 0.0))),
        (StepSplit((7.0, 7.0, 0.0)), [100.0, 101.0, 0.0], 200, StepSplit((7.0, 7.0, 0.0))),
        (StepSplit((*EVEN, 0.0)), [0.5, 0.5, 0.0], 200, StepSplit((*EVEN, 0.0))),
        (StepSplit((0.5, 0.5, 0.0)), [100.0, 101.0, 0.0], 200, StepSplit((0.5, 0.5, 0.0))),
        (StepSplit((*EVEN, 0.0), 3, 4), [100.0, 101.0, 0.0], 200, StepSplit((*EVEN, 0.0), 0, 3)),
        (StepSplit((*EVEN, 0.0)), [100.0, 106.0, 0.0], 200, StepSplit((*EVEN, 0.0), 1)),
        (StepSplit((*EVEN, 0.0), 7), [100.0, 106.0, 0.0], 200, StepSplit((100.0, 106.0, 0.0))),
        (StepSplit((*EVEN, 0.0)), [100.0, 101.0, 99.0], 200, StepSplit((100.0, 101.0, 99.0))),
        (StepSplit((7.0, 7.0, 0.0), 3, 4), [90.0, 91.0, 0.5], 200, StepSplit((90.0, 91.0, 0.91), 0, 3)),
        (StepSplit(THREE, 3, 4), [100.0, 101.0, 0.0], 200, StepSplit((100.5, 100.5, 0.0), 0, 3)),
        (StepSplit(THREE, 3, 4), [100.0, 126.0, 0.0], 200, StepSplit((100.0, 126.0, 0.0), 0, 3)),
        (StepSplit((*EVEN, 0.0), 3, 4), [100.0, 0.0, 100.0], 200, StepSplit((100.0, 0.0, 100.0), 0, 3)),
        # Rates that have moved by more than a tenth.
        (StepSplit(EVEN), [0.5, 0.1], 200, StepSplit((0.5, 0.1))),
        (StepSplit(EVEN), [1000.0, 1.0], 200, StepSplit((1000.0, 10.0))),
        (StepSplit((1.0, 100.0), 3, 4), [100.0, 1.0], 200, StepSplit((100.0, 1.0), 0, 3)),
        (StepSplit((2.0, 1.0), 3), [200.0, 100.0], 200, StepSplit((2.0, 1.0))),
        (StepSplit(THREE), [UPPER, 95.0, 95.0], 200, StepSplit(THREE, 1)),
        (StepSplit(THREE, 3), [111.0, 94.5, 94.5], 200, StepSplit((111.0, 94.5, 94.5))),
        (StepSplit(THREE), [LOWER, 105.0, 105.0], 200, StepSplit(THREE, 1)),
        (StepSplit(THREE, 3), [89.0, 105.5, 105.5], 200, StepSplit((89.0, 105.5, 105.5))),
        # Rates that differ by more than a fiftieth, again and again.
        (StepSplit(EVEN, 3), [100.0, 104.0], 200, StepSplit(EVEN)),
        (StepSplit(EVEN, 3), [100.0, 104.2], 200, StepSplit(EVEN, 4)),
        (StepSplit(EVEN, 6), [100.0, 106.0], 200, StepSplit(EVEN, 7)),
        (StepSplit(EVEN, 7), [100.0, 106.0], 200, StepSplit((100.0, 106.0))),
        (StepSplit(EVEN, 8), [100.0, 110.0], 21, StepSplit(EVEN, 9)),  # a second has ten steps
        (StepSplit(EVEN, 9), [100.0, 110.0], 21, StepSplit((100.0, 110.0))),
        (StepSplit(EVEN, 9), [100.0, 111.0], 21, StepSplit(EVEN, 10)),
        (StepSplit(EVEN, 208), [100.0, 110.0], 1, StepSplit(EVEN, 209)),
        (StepSplit(EVEN, 208), [100.0, 110.0], 0, StepSplit(EVEN, 209)),
        (StepSplit(EVEN, 209), [100.0, 110.0], 0, StepSplit((100.0, 110.0))),
        # A split that was only tried.
        (StepSplit(EVEN, 0, 4), [100.0, 126.0], 200, StepSplit((100.0, 126.0), 0, 3)),
        (StepSplit(EVEN, 0, 1), [100.0, 126.0], 200, StepSplit((100.0, 126.0))),
        (StepSplit((1.0, 2.0), 0, 4), [100.0, 106.0], 200, StepSplit((103.0, 103.0), 0, 3)),
        (StepSplit(EVEN, 0, 4), [100.0, 125.0], 200, StepSplit(EVEN, 0, 3)),
        (StepSplit(EVEN, 0, 4), [4000.0, 4000.0], 500, StepSplit(EVEN, 0, 3.5)),  # a sixteenth of a second
        (StepSplit(EVEN, 0, 4), [100.0, 101.0], 200, StepSplit(EVEN, 0, 3)),
        (StepSplit(EVEN, 0, 1), [100.0, 101.0], 200, StepSplit(EVEN)),
    ],
    ids=str,
)
def test_the_next_split_follows_from_the_one_at_hand_and_the_rates(split, rates, records, expected):
    assert split.after_step(rates, records) == expected


@pytest.mark.parametrize(("weights", "rates"), [(EVEN, [100.0, 101.0]), ((*EVEN, 0.0), [100.0, 101.0, 0.0])])
def test_a_split_that_holds_still_is_the_same_object_in_every_step(weights, rates):
    split = StepSplit(weights)
    assert split.after_step(rates, 200) is split
