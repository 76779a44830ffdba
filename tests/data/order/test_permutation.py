"""Promises of the order: everybody computes the same, nothing is lost, and it never changes between versions."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.data.order.permutation import locate, record_at, split, steps_per_epoch
from trueline.errors import DataError
from worlds.steps import step_records

SIZES = sorted({1, 2, 3, 5, 7, 1437, *(2**power + near for power in range(2, 13) for near in (-1, 0, 1))})


def whole(num_records: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    found: list[int] = record_at(np.arange(num_records), seed=seed, epoch=epoch, num_records=num_records).tolist()
    return found


@pytest.mark.parametrize("num_records", SIZES)
def test_an_epoch_holds_every_record_exactly_once(num_records: int) -> None:
    assert sorted(whole(num_records)) == list(range(num_records))


@given(st.integers(1, 3000), st.integers(-(2**63), 2**64), st.integers(0, 2**32))
def test_an_epoch_holds_every_record_exactly_once_whatever_the_seed(num_records: int, seed: int, epoch: int) -> None:
    assert sorted(whole(num_records, seed=seed, epoch=epoch)) == list(range(num_records))


def test_the_order_is_the_one_of_all_earlier_versions() -> None:
    assert whole(8) == [2, 0, 7, 6, 3, 1, 4, 5]
    assert whole(1437)[:10] == [1015, 668, 181, 0, 1153, 1385, 353, 311, 248, 251]
    assert whole(1437, seed=7, epoch=3)[:10] == [584, 1210, 1181, 758, 75, 301, 1423, 290, 543, 416]
    billion = record_at([0, 1, 999_999_999], seed=1, epoch=2, num_records=10**9)
    assert billion.tolist() == [406149831, 622649003, 232228111]
    largest = record_at([0, 1, 2**62 - 1], seed=2**63 - 1, epoch=10**6, num_records=2**62)
    assert largest.tolist() == [2622756534482348328, 2077739006606788492, 3907942695191004946]
    assert step_records(23, seed=0, num_records=1437, global_batch=64)[:4].tolist() == [607, 214, 154, 190]


def test_other_seeds_and_epochs_are_other_orders() -> None:
    orders = [tuple(whole(200, seed=seed, epoch=epoch)) for seed in range(10) for epoch in range(10)]
    assert len(set(orders)) == len(orders)


def test_any_positions_are_addressed_alone_and_in_any_shape() -> None:
    order = whole(1000, seed=3)
    found = record_at(np.array([[999, 0], [5, 5]]), seed=3, epoch=0, num_records=1000)
    assert found.tolist() == [[order[999], order[0]], [order[5], order[5]]]
    assert found.dtype == np.int64
    assert record_at([], seed=0, epoch=0, num_records=5).tolist() == []


def test_a_billion_records_are_addressed_without_a_list_of_them() -> None:
    positions = np.arange(10**9 - 256, 10**9)
    tracemalloc.start()
    found = record_at(positions, seed=0, epoch=0, num_records=10**9)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20  # bytes; a list of a billion takes gigabytes
    assert len(set(found.tolist())) == 256


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize("num_records", [5, pytest.param(16, marks=pytest.mark.long)])
def test_every_record_comes_to_every_position_equally_often(num_records: int) -> None:
    seeds, cells = 600, num_records * num_records
    counts = np.zeros((num_records, num_records))
    for seed in range(seeds):
        counts[np.arange(num_records), whole(num_records, seed=seed)] += 1
    expected = seeds / num_records
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    freedom = (num_records - 1) ** 2
    assert abs(chi_squared - freedom) < 5 * np.sqrt(2 * freedom), cells


def test_neighbours_in_one_epoch_are_strangers() -> None:
    gaps = np.abs(np.diff(whole(5000)))
    assert abs(float(gaps.mean()) - 5000 / 3) < 100


def test_outside_positions_and_empty_sources_are_refused() -> None:
    for wrong in ([-1], [10], [0.5]):
        with pytest.raises(DataError):
            record_at(wrong, seed=0, epoch=0, num_records=10)
    with pytest.raises(DataError, match="0 records"):
        record_at([0], seed=0, epoch=0, num_records=0)
    with pytest.raises(DataError, match="global_batch is 0"):
        steps_per_epoch(10, 0)
    with pytest.raises(DataError, match="step -1"):
        locate(-1, num_records=10, global_batch=2)


@pytest.mark.slow
@given(st.integers(1, 200), st.integers(1, 250), st.integers(0, 3))
def test_the_steps_of_an_epoch_are_its_records_and_only_the_last_is_short(
    num_records: int, global_batch: int, epoch: int
) -> None:
    count = steps_per_epoch(num_records, global_batch)
    steps = [
        step_records(epoch * count + index, seed=9, num_records=num_records, global_batch=global_batch)
        for index in range(count)
    ]
    assert np.concatenate(steps).tolist() == whole(num_records, seed=9, epoch=epoch)
    assert all(len(step) == min(global_batch, num_records) for step in steps[:-1])
    assert 1 <= len(steps[-1]) <= global_batch


def test_a_step_is_located_in_its_epoch() -> None:
    assert [locate(step, num_records=10, global_batch=4) for step in (0, 2, 3)] == [(0, 0, 4), (0, 8, 10), (1, 0, 4)]


weights = st.lists(st.floats(0, 1e9, allow_nan=False), min_size=1, max_size=12).filter(any)


@given(st.integers(0, 2000), weights)
def test_a_split_covers_all_without_gap_or_overlap_and_starves_nobody(count: int, weights: list[float]) -> None:
    slices = split(count, weights)
    assert len(slices) == len(weights)
    assert slices[0][0] == 0
    assert slices[-1][1] == count
    assert all(one[1] == other[0] for one, other in itertools.pairwise(slices))
    shares = [stop - start for start, stop in slices]
    assert all(share == 0 for share, weight in zip(shares, weights, strict=True) if weight == 0)
    if count >= sum(weight > 0 for weight in weights):
        assert all(share > 0 for share, weight in zip(shares, weights, strict=True) if weight > 0)


@given(st.integers(50, 2000), st.lists(st.floats(0.5, 4.0), min_size=1, max_size=8))
def test_no_split_is_done_sooner_and_nobody_gets_less_than_the_whole_part_of_its_proportion(
    count: int, weights: list[float]
) -> None:
    speeds = [Fraction(weight) for weight in weights]
    shares = [stop - start for start, stop in split(count, weights)]
    assert all(share >= count * speed // sum(speeds) for share, speed in zip(shares, speeds, strict=True))
    longest = max(share / speed for share, speed in zip(shares, speeds, strict=True))
    assert sum(math.ceil(longest * speed) - 1 for speed in speeds) < count  # what all can do in less than that


def test_splits_that_people_can_check() -> None:
    assert split(10, [1, 1, 2]) == [(0, 3), (3, 5), (5, 10)]
    assert split(3, [1e9, 1, 1]) == [(0, 1), (1, 2), (2, 3)]
    assert split(2, [1, 1, 1]) == [(0, 1), (1, 2), (2, 2)]
    for wrong in ([], [0.0], [-1.0, 2.0], [float("nan")], [float("inf")]):
        with pytest.raises(DataError, match="cannot share"):
            split(5, wrong)


def test_the_order_needs_no_torch() -> None:
    code = "import sys, trueline.data.order.permutation, trueline.data.source; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
