"""What is learned of runs and arrivals, and how near it comes to the best settings of a search. No clock runs here."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from trueline.serve.batching.latency_model import Curve, LatencyModel, Returns
from trueline.serve.batching.policy import Item, Policy, decide
from worlds.batching_simulator import Load, grid, ratio, rehearse

Takes = Callable[[int], float]


def affine(rows: int) -> float:
    return (4 + 0.25 * rows) * 1e-3


def knee(rows: int) -> float:
    return (2 + 0.2 * rows + 0.02 * max(0, rows - 16) ** 2) * 1e-3


def steps(rows: int) -> float:
    return (1 + 2 * -(-rows // 8)) * 1e-3


@pytest.mark.parametrize(
    ("takes", "load"),
    [
        (affine, Load(clients=16, think_s=2e-4)),
        (affine, Load(per_second=1600)),
        (knee, Load(clients=32, think_s=1e-4)),
        (knee, Load(per_second=4000)),
        (steps, Load(clients=8, think_s=5e-3)),
        (steps, Load(per_second=300)),
    ],
)
def test_without_settings_throughput_is_nine_tenths_of_the_best_of_a_grid_at_the_same_p99(
    takes: Takes, load: Load
) -> None:
    learned = rehearse(takes, load, Policy(), requests=600)
    settings = grid(takes, load, requests=600, batches=(1, 8, 16, 32), delays=(0.0, 0.3))
    assert ratio(learned, settings) >= 0.9, (learned, settings[:2])


def test_clients_that_come_back_together_are_waited_for_and_strangers_are_not() -> None:
    together = Load(clients=8, think_s=2e-4)
    assert rehearse(affine, together, Policy(), requests=400).mean_rows > 7
    assert rehearse(affine, together, Policy(max_delay_s=0.0), requests=400).mean_rows < 5
    lonely = Load(per_second=20)
    assert rehearse(affine, lonely, Policy(), requests=400) == rehearse(
        affine, lonely, Policy(max_delay_s=0.0), requests=400
    )


def test_a_batch_is_full_where_more_rows_make_no_more_rows_per_second() -> None:
    curve = Curve({})
    for rows in (1, 2, 4, 8, 16, 32):
        curve.add(rows, knee(rows))
    assert curve.full(64) == 16
    assert curve.full(8) == 8


def test_a_size_that_was_never_tried_is_tried_while_larger_is_better() -> None:
    curve, tried = Curve({}), []
    for _ in range(20):
        rows = curve.full(64)
        tried.append(rows)
        curve.add(rows, affine(rows))
    assert tried[-1] == 64
    slow = Curve({1: 0.001})
    for _ in range(20):
        slow.add(slow.full(64), 0.001 * slow.full(64))
    assert slow.full(64) == 1


def test_the_curve_follows_a_machine_that_becomes_slower_and_shrugs_off_one_hiccup() -> None:
    curve = Curve({1: 0.001, 8: 0.002})
    for _ in range(20):
        curve.add(8, 0.002)
    curve.add(8, 1.0)
    assert curve.at(8) < 0.003
    for _ in range(40):
        curve.add(8, 0.004)
    assert curve.at(8) == pytest.approx(0.004, rel=0.1)


def test_the_curve_never_falls_as_rows_grow() -> None:
    rng, curve = random.Random(1), Curve({})
    for _ in range(300):
        rows = rng.randint(1, 64)
        curve.add(rows, affine(rows) * rng.uniform(0.5, 2))
    seconds = [curve.at(rows) for rows in range(1, 80)]
    assert seconds == sorted(seconds)


def test_a_run_that_ends_early_hides_nothing_of_what_would_have_come_later() -> None:
    """Arrivals every 2 ms; every second window is cut off after 1 ms."""
    returns = Returns()
    now = 0.0
    for window in range(200):
        returns.count_answer(now, 0.01)
        length = 0.001 if window % 2 else 0.008
        for at in range(1, int(length / 0.002) + 1):
            returns.count_arrival(1, now + 0.002 * at - 0.0005)
        now += length
    returns.count_answer(now, 0.01)
    when, more = returns.after(now, now + 0.0075)[-1]
    assert more == pytest.approx((when - now) / 0.002, rel=0.25)


def waited_for(pace: LatencyModel) -> Item:
    """Eight clients come back 0.2 ms after each answer; the first of them is here."""
    for turn in range(30):
        now = turn * 0.01
        pace.count_run(8, affine(8), now)
        for client in range(8):
            pace.count_arrival(1, now + 2e-4 + client * 1e-6)
    pace.count_run(8, affine(8), 1.0)
    pace.count_arrival(1, 1.0002)
    return Item({}, 1, "k", 0, 1.0002, None)


def test_a_deadline_ends_the_waiting_in_time_for_the_run() -> None:
    pace = LatencyModel()
    first = waited_for(pace)
    waiting = decide([first], busy=0, now=1.0002, policy=Policy(), model=pace)
    assert waiting.reason == "filling"
    assert waiting.wake_at is not None
    assert 1.0002 < waiting.wake_at <= 1.0 + affine(8)
    first.deadline = 1.0002 + affine(8)
    assert decide([first], busy=0, now=1.0002, policy=Policy(), model=pace).run == (first,)


def test_what_waits_starts_when_all_who_were_expected_are_there() -> None:
    pace = LatencyModel()
    queue = [waited_for(pace)]
    for client in range(1, 8):
        now = 1.0002 + client * 1e-6
        pace.count_arrival(1, now)
        queue.append(Item({}, 1, "k", 0, now, None))
        found = decide(queue, busy=0, now=now, policy=Policy(), model=pace)
    assert found.run == tuple(queue)


def test_a_delay_that_was_set_is_kept_whatever_was_learned() -> None:
    pace = LatencyModel()
    first = waited_for(pace)
    assert decide([first], busy=0, now=1.0002, policy=Policy(max_delay_s=0.0), model=pace).run == (first,)
    assert decide([first], busy=0, now=1.0002, policy=Policy(max_delay_s=0.5), model=pace).wake_at == 1.5002
