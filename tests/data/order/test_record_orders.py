"""Every order is computed: any position alone, the same for everybody, and what it promises holds for whole epochs."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.data.order.permutation import key_of
from trueline.data.order.record_orders import (
    BucketedOrder,
    InFileOrder,
    MixedOrder,
    PermutedOrder,
    RecordOrder,
    WeightedOrder,
    WindowOrder,
    blocks_of,
)
from trueline.data.source import Unit
from trueline.errors import DataError


def units_of(counts: list[int]) -> list[Unit]:
    return [Unit(uri=str(n), offset=sum(counts[:n]), count=count) for n, count in enumerate(counts)]


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.integers(1, 100),
    st.integers(1, 40),
    st.integers(0, 2**40),
    st.integers(0, 5),
)
def test_an_epoch_in_windows_is_every_record_once(
    counts: list[int], window: int, block: int, seed: int, epoch: int
) -> None:
    order = WindowOrder(units_of(counts), seed=seed, window_records=window, block_records=block)
    whole = order.at(np.arange(order.num_records), epoch=epoch)
    assert sorted(whole.tolist()) == list(range(sum(counts)))
    some = np.arange(order.num_records)[:: max(1, order.num_records // 7)]
    assert order.at(some, epoch=epoch).tolist() == whole[some].tolist()


def test_a_unit_is_read_in_one_window_of_the_epoch_only() -> None:
    units = units_of([100] * 40)
    order = WindowOrder(units, seed=1, window_records=500, block_records=100)
    whole = order.at(np.arange(4000), epoch=3)
    for unit in units:
        places = np.flatnonzero((whole >= unit.offset) & (whole < unit.offset + unit.count))
        assert places.max() - places.min() < 500


def test_batches_mix_the_blocks_of_their_window_and_epochs_differ() -> None:
    order = WindowOrder(units_of([100] * 40), seed=1, window_records=1000, block_records=100)
    first = order.at(np.arange(64), epoch=0)
    assert len({record // 100 for record in first.tolist()}) > 6
    assert order.at(np.arange(64), epoch=1).tolist() != first.tolist()
    assert WindowOrder(units_of([100] * 40), seed=2).at(np.arange(64), epoch=0).tolist() != first.tolist()


def test_the_windows_order_is_the_one_of_all_earlier_versions() -> None:
    order = WindowOrder(units_of([5, 3, 9, 4]), seed=7, window_records=8, block_records=5)
    assert order.at(np.arange(6), epoch=2).tolist() == [8, 9, 10, 3, 1, 2]


def test_a_billion_records_are_planned_without_a_list_of_them() -> None:
    counts = np.full(1_000_000_000 // 131_072, 131_072)
    units = [Unit(uri="u", offset=int(n) * 131_072, count=131_072) for n in range(len(counts))]
    tracemalloc.start()
    order = WindowOrder(units, seed=0)
    found = order.at(np.arange(5 * 10**8, 5 * 10**8 + 256), epoch=9)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 << 20
    assert len(set(found.tolist())) == 256


def test_blocks_are_cut_inside_units_and_cover_them() -> None:
    first, count = blocks_of(np.array([3, 10, 1]), 4)
    assert list(zip(first.tolist(), count.tolist(), strict=True)) == [(0, 3), (3, 4), (7, 3), (10, 3), (13, 1)]


def test_weights_decide_how_often_each_record_comes() -> None:
    order = WeightedOrder([1, 0, 2, 5, 2], seed=3, num_draws=1000)
    for epoch in range(3):
        times = Counter(order.at(np.arange(1000), epoch=epoch).tolist())
        assert times == {0: 100, 2: 200, 3: 500, 4: 200}
    assert order.at([5], epoch=0).tolist() == order.at(np.arange(1000), epoch=0)[5:6].tolist()


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50).filter(any), st.integers(1, 300), st.integers(0, 99))
def test_no_record_of_weight_nought_is_drawn_and_shares_are_rounded_up_or_down(
    weights: list[float], draws: int, seed: int
) -> None:
    times = Counter(WeightedOrder(weights, seed=seed, num_draws=draws).at(np.arange(draws), epoch=0).tolist())
    assert sum(times.values()) == draws
    for record, weight in enumerate(weights):
        share = draws * weight / sum(weights)
        assert abs(times[record] - share) < 1 + 1e-6
        assert weight or not times[record]


def test_batches_of_like_length_hold_every_record_once() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 1003)
    order = BucketedOrder(PermutedOrder(1003, seed=1), lengths.__getitem__, batch=10, seed=2, pool_batches=20)
    whole = order.at(np.arange(1003), epoch=1)
    assert sorted(whole.tolist()) == list(range(1003))
    padding = sum(np.ptp(lengths[whole[at : at + 10]]) for at in range(0, 1000, 10))
    plain = PermutedOrder(1003, seed=1).at(np.arange(1003), epoch=1)
    assert padding * 8 < sum(np.ptp(lengths[plain[at : at + 10]]) for at in range(0, 1000, 10))
    means = [lengths[whole[at : at + 10]].mean() for at in range(0, 200, 10)]
    assert any(later < earlier for earlier, later in pairwise(means))  # batches come in no order of length
    assert order.at([1002, 17], epoch=1).tolist() == [whole[1002], whole[17]]


def test_sources_are_mixed_in_their_ratio_and_none_skips_a_record() -> None:
    order = MixedOrder([PermutedOrder(100, seed=1), InFileOrder(5000)], [3, 1], seed=4, num_records=4000)
    whole = order.at(np.arange(4000), epoch=0)
    for at in range(0, 4000, 1000):
        assert (whole[at : at + 1000] < 100).sum() == 750
    assert sorted(Counter(whole[whole < 100].tolist()).values()) == [30] * 100
    assert whole[whole >= 100].tolist() == list(range(100, 1100))
    later = order.at(np.arange(4000), epoch=1)
    assert later[later >= 100].tolist() == list(range(1100, 2100))
    assert order.at([3999, 5], epoch=0).tolist() == [whole[3999], whole[5]]


def test_positions_outside_and_orders_of_nothing_are_refused() -> None:
    for order in (InFileOrder(10), WindowOrder(units_of([10]), seed=0), PermutedOrder(10, seed=0)):
        for wrong in ([-1], [10]):
            with pytest.raises(DataError, match="outside"):
                order.at(wrong, epoch=0)
    for make in (
        lambda: WindowOrder([], seed=0),
        lambda: WindowOrder(units_of([5]), seed=0, window_records=0),
        lambda: WeightedOrder([0.0, 0.0], seed=0),
        lambda: WeightedOrder([1.0, float("nan")], seed=0),
        lambda: BucketedOrder(InFileOrder(5), lambda r: r, batch=0, seed=0),
        lambda: MixedOrder([InFileOrder(5)], [1, 2], seed=0),
    ):
        with pytest.raises(DataError):
            make()


LENGTHS = np.array([5, 1, 9, 3, 7, 2, 8, 4, 6, 0, 11, 10, 13, 12])


def drawn_order(kind: str, seed: int = 7) -> RecordOrder:
    """Of each kind one that is small enough to be written down."""
    if kind == "weighted":
        return WeightedOrder([1, 0, 2, 5, 2], seed=seed, num_draws=12)
    if kind == "bucketed":
        return BucketedOrder(PermutedOrder(14, seed=seed), LENGTHS.__getitem__, batch=2, seed=seed, pool_batches=4)
    return MixedOrder([PermutedOrder(9, seed=seed), InFileOrder(5)], [2, 1], seed=seed, num_records=12)


@pytest.mark.parametrize(
    ("kind", "first", "third"),
    [
        ("weighted", [4, 2, 2, 0, 3, 4, 3, 3, 0, 3, 3, 3], [4, 3, 3, 2, 3, 3, 3, 3, 2, 4, 0, 2]),
        ("bucketed", [8, 4, 3, 7, 6, 2, 11, 10, 9, 1, 13, 12, 5, 0], [2, 11, 4, 6, 10, 13, 9, 7, 3, 0, 1, 5, 8, 12]),
        ("mixed", [2, 9, 0, 3, 5, 7, 1, 4, 6, 10, 8, 2], [8, 0, 6, 13, 4, 7, 9, 5, 10, 3, 4, 11]),
    ],
)
def test_these_orders_are_those_of_all_earlier_versions(kind: str, first: list[int], third: list[int]) -> None:
    order = drawn_order(kind)
    for epoch, expected in ((0, first), (2, third)):
        assert order.at(np.arange(order.num_records), epoch=epoch).tolist() == expected
        assert order.at([3], epoch=epoch).tolist() == expected[3:4]


@pytest.mark.parametrize("kind", ["weighted", "bucketed", "mixed"])
def test_other_epochs_and_other_seeds_are_other_orders_of_these_too(kind: str) -> None:
    orders = [drawn_order(kind, seed) for seed in (7, 8, 9)]
    found = {
        tuple(order.at(np.arange(order.num_records), epoch=epoch).tolist()) for order in orders for epoch in range(4)
    }
    assert len(found) >= 11


def test_each_pool_of_batches_has_an_order_of_its_own_and_the_short_batch_stays_at_its_end() -> None:
    order = BucketedOrder(InFileOrder(47), lambda records: records % 10, batch=2, seed=1, pool_batches=5)
    for epoch in range(3):
        whole = order.at(np.arange(47), epoch=epoch)
        pools = [whole[at : at + 10] - at for at in range(0, 40, 10)]
        assert all(sorted(pool.tolist()) == list(range(10)) for pool in pools)
        assert len({tuple(pool.tolist()) for pool in pools}) > 1
        assert whole[46] == 46, "the longest of the last pool, in a batch of one"


def test_a_part_that_begins_again_comes_in_another_order_and_so_do_parts_of_one_size() -> None:
    order = MixedOrder([PermutedOrder(500, seed=1)], [1], seed=3, num_records=500)
    first, second = (order.at(np.arange(500), epoch=epoch).tolist() for epoch in range(2))
    assert sorted(first) == sorted(second) == list(range(500))
    assert first != second


def test_blocks_of_a_mixture_have_orders_of_their_own() -> None:
    order = MixedOrder([InFileOrder(4000), InFileOrder(4000)], [1, 1], seed=3, num_records=4000)
    whose = order.at(np.arange(4000), epoch=0) < 4000
    blocks = [tuple(whose[at : at + 1000].tolist()) for at in range(0, 4000, 1000)]
    assert len(set(blocks)) == 4
    assert {sum(block) for block in blocks} == {500}


@pytest.mark.parametrize("weights", [[1.0, -0.5], [-1.0, -1.0], [[1.0]], [], [1.0, float("inf")]])
def test_weights_that_choose_nothing_in_particular_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match="expected finite, none negative"):
        WeightedOrder(weights, seed=0)


def test_a_draw_that_rounds_to_the_very_end_is_of_the_last_record_that_has_a_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trueline.data.order.record_orders.key_of", lambda *parts: (1 << 64) - 1)
    found = WeightedOrder([1.0, 1.0, 0.0], seed=0, num_draws=3).at(np.arange(3), epoch=0)
    assert set(found.tolist()) == {0, 1}


def test_a_draw_on_the_bound_of_two_records_is_of_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trueline.data.order.record_orders.key_of", lambda *parts: 0)
    found = WeightedOrder([0.0, 1.0, 1.0], seed=0, num_draws=4).at(np.arange(4), epoch=0)
    assert sorted(found.tolist()) == [1, 1, 2, 2]


def test_windows_refuse_positions_outside_and_units_without_records() -> None:
    order = WindowOrder(units_of([10] * 30), seed=0, window_records=8)
    for wrong in ([-1], [300], [5, 301]):
        with pytest.raises(DataError, match="outside"):
            order.at(wrong, epoch=0)
    for counts in ([5, 0], [0], [5, -1]):
        with pytest.raises(DataError, match="empty unit"):
            WindowOrder(units_of(counts), seed=0)


def test_a_pool_of_one_full_batch_lies_by_length_and_equal_lengths_stay_in_their_order() -> None:
    order = BucketedOrder(InFileOrder(100), lambda records: records % 2, batch=100, seed=1, pool_batches=1)
    assert order.at(np.arange(100), epoch=0).tolist() == [*range(0, 100, 2), *range(1, 100, 2)]


def test_a_pool_of_two_full_batches_is_shuffled_too() -> None:
    order = BucketedOrder(InFileOrder(43), lambda records: records, batch=2, seed=1, pool_batches=2)
    whole = order.at(np.arange(43), epoch=0).tolist()
    pools = {tuple(record - at for record in whole[at : at + 4]) for at in range(0, 40, 4)}
    assert pools == {(0, 1, 2, 3), (2, 3, 0, 1)}
    assert whole[40:] == [40, 41, 42]


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"pool_batches": 0}, {"batch": -1}])
def test_a_pool_holds_one_batch_and_a_batch_one_record_at_least(wrong: dict[str, int]) -> None:
    assert BucketedOrder(InFileOrder(3), lambda r: r, batch=1, seed=0, pool_batches=1).at([2], epoch=0).tolist() == [2]
    with pytest.raises(DataError, match="expected 1 or more"):
        BucketedOrder(InFileOrder(3), lambda r: r, seed=0, **{"batch": 1, "pool_batches": 1, **wrong})


def test_as_many_records_are_drawn_as_there_are_weights_unless_another_number_is_asked_for() -> None:
    assert WeightedOrder([1, 2, 3], seed=0).num_records == 3
    assert WeightedOrder([1, 2, 3], seed=0, num_draws=1).num_records == 1
    assert MixedOrder([InFileOrder(3), InFileOrder(4)], [1, 1], seed=0).num_records == 7
    assert MixedOrder([InFileOrder(3), InFileOrder(4)], [1, 1], seed=0, num_records=1).num_records == 1


def test_the_only_draw_falls_anywhere_as_the_seed_and_the_epoch_say() -> None:
    for seed in range(4):
        order = WeightedOrder(np.ones(1000), seed=seed, num_draws=1)
        found = [int(order.at([0], epoch=epoch)[0]) for epoch in range(4)]
        assert found == [key_of(seed, epoch) * 1000 >> 64 for epoch in range(4)]


@pytest.mark.parametrize("kind", ["weighted", "bucketed", "mixed", "in file order"])
@pytest.mark.parametrize("positions", [[], [1, 3], np.array([1, 3], np.uint8), np.array([3], np.int32)])
def test_records_are_whole_numbers_of_one_dtype_however_they_are_asked_for(kind: str, positions: Any) -> None:
    order = InFileOrder(5) if kind == "in file order" else drawn_order(kind)
    found = order.at(positions, epoch=0)
    assert (found.dtype, found.shape) == (np.int64, (len(positions),))


def test_records_beyond_the_whole_numbers_of_a_float_are_mixed_exactly() -> None:
    order = MixedOrder([InFileOrder(2**62)], [1], seed=3)
    start = 2**60 // 1000 * 1000
    assert sorted(order.at(np.arange(start, start + 1000), epoch=0).tolist()) == list(range(start, start + 1000))
