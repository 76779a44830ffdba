"""Promises of the plan: the records of a step depend on nothing but the seed and the batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.train.step import ledger
from trueline.train.step.plan import DRAWN, JobPlan


def part(plan: JobPlan, step: int, rank: int, workers: int) -> list[np.ndarray]:
    return [piece.records for piece in plan.pieces(step, rank=rank, weights=(1.0,) * workers)]


@pytest.mark.jobs
@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 6))
def test_every_record_is_in_exactly_one_share_of_one_step_of_each_epoch(num_records, global_batch, workers):
    plan = JobPlan(num_records=num_records, global_batch=global_batch, epochs=2, seed=3)
    for epoch in range(2):
        steps = range(epoch * plan.epoch_steps, (epoch + 1) * plan.epoch_steps)
        shares = [records for step in steps for rank in range(workers) for records in part(plan, step, rank, workers)]
        assert sorted(np.concatenate(shares).tolist()) == list(range(num_records))


@given(st.integers(0, 400), st.integers(1, 5))
def test_a_step_has_the_same_records_however_many_share_it_and_whenever_it_is_asked_for(step, workers):
    plan = JobPlan(num_records=1437, global_batch=64, epochs=20, seed=1)
    shares = [records for rank in range(workers) for records in part(plan, step, rank, workers)]
    fresh = JobPlan(num_records=1437, global_batch=64, epochs=20, seed=1)
    fresh.records((step * 7) % fresh.total_steps)
    assert np.concatenate(shares).tolist() == fresh.records(step).tolist()
    assert plan.digest(step) == fresh.digest(step)


@given(
    st.integers(1, 300), st.integers(1, 70), st.integers(1, 70), st.lists(st.floats(0.01, 100), min_size=1, max_size=5)
)
def test_shards_are_the_same_whoever_trains_them_and_however_fast(num_records, global_batch, micro_batch, weights):
    plan = JobPlan(
        num_records=num_records, global_batch=global_batch, epochs=1, seed=3, micro_batch=min(micro_batch, global_batch)
    )
    step = plan.epoch_steps - 1
    alone = plan.pieces(step, rank=0, weights=(1.0,))
    together = [piece for rank in range(len(weights)) for piece in plan.pieces(step, rank=rank, weights=tuple(weights))]
    assert [piece.shard for piece in together] == [piece.shard for piece in alone] == list(range(plan.num_shards(step)))
    for one, other in zip(alone, together, strict=True):
        assert one.records.tolist() == other.records.tolist()
    assert sum(plan.shard_counts(step, tuple(weights))) == len(alone)


@given(st.integers(1, 300), st.integers(0, 70), st.lists(st.floats(0.01, 100), min_size=1, max_size=5))
def test_the_shares_that_are_told_are_those_that_are_trained(num_records, micro_batch, weights):
    asked = tuple(weights)
    plan = JobPlan(num_records=num_records, global_batch=64, epochs=1, seed=3, micro_batch=micro_batch)
    for step in range(plan.epoch_steps):
        parts = [plan.pieces(step, rank=rank, weights=asked) for rank in range(len(asked))]
        assert plan.share_counts(step, asked) == [sum(len(piece.records) for piece in pieces) for pieces in parts]


def test_records_that_were_set_aside_are_in_no_step_and_all_others_stay_where_they_were():
    plan = JobPlan(num_records=100, global_batch=8, epochs=1, seed=0)
    before = [plan.records(step).tolist() for step in range(plan.epoch_steps)]
    plan.leave_out([17, 3])
    after = [plan.records(step).tolist() for step in range(plan.epoch_steps)]
    assert after == [[record for record in records if record not in (3, 17)] for records in before]
    assert plan.digest(0) == JobPlan(num_records=100, global_batch=8, epochs=1, seed=0, set_aside=(3, 17)).digest(0)


def test_a_drawn_record_that_was_set_aside_is_left_out_wherever_it_would_stand_and_named_with_its_position():
    def drawn(ids, epoch):
        return (ids * 7 + epoch) % 10  # each of ten records stands at ten of a hundred positions

    plan = JobPlan(num_records=100, global_batch=8, epochs=2, seed=0, blocks=DRAWN, drawn=drawn)
    plan.leave_out([4, 9])
    for epoch in range(2):
        steps = range(epoch * plan.epoch_steps, (epoch + 1) * plan.epoch_steps)
        kept = [record for step in steps for record in plan.records(step).tolist()]
        out = [plan.left_out(step) for step in steps]
        ids = np.array([one for step in out for one in step.ids])
        assert sorted([*kept, *ids.tolist()]) == list(range(100))
        assert not np.isin(drawn(np.array(kept), epoch), [4, 9]).any()
        assert [record for step in out for record in step.of] == drawn(ids, epoch).tolist()
        assert set(drawn(ids, epoch).tolist()) == {4, 9}


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.integers(1, 70),
    st.integers(1, 6),
    st.sampled_from([0, 5]),
)
def test_in_windows_of_blocks_every_record_is_trained_once_an_epoch_too(blocks, global_batch, workers, micro_batch):
    plan = JobPlan(
        num_records=sum(blocks),
        global_batch=global_batch,
        epochs=2,
        seed=3,
        blocks=tuple(blocks),
        micro_batch=min(micro_batch, global_batch),
    )
    for epoch in range(2):
        steps = range(epoch * plan.epoch_steps, (epoch + 1) * plan.epoch_steps)
        shares = [records for step in steps for rank in range(workers) for records in part(plan, step, rank, workers)]
        assert sorted(np.concatenate(shares).tolist()) == list(range(sum(blocks)))


def test_a_member_of_four_reads_less_than_half_of_the_blocks_of_a_window():
    blocks = (1000,) * 160
    plan = JobPlan(num_records=160_000, global_batch=256, epochs=1, seed=0, blocks=blocks)
    steps = range(200)  # well within the first window of 65,536 records
    touched = [{record // 1000 for step in steps for record in part(plan, step, rank, 4)[0]} for rank in range(4)]
    assert max(len(one) for one in touched) < 33, "a quarter, and what the cuts of a step of 256 wander"
    assert len(set().union(*touched)) == 66
    full = JobPlan(num_records=160_000, global_batch=256, epochs=1, seed=0)
    assert len({record // 1000 for step in steps for record in part(full, step, 0, 4)[0]}) == 160


def test_a_window_has_eight_blocks_or_more_however_large_they_are():
    plan = JobPlan(num_records=3_200_000, global_batch=1000, epochs=1, seed=0, blocks=(100_000,) * 32)
    first = {record // 100_000 for step in range(700) for record in plan.records(step)}
    assert len(first) == 8
    assert len({record // 100_000 for record in plan.records(0)}) == 8, "a step mixes all blocks of its window"


def test_steps_and_epochs_are_counted_from_zero_and_the_last_step_of_an_epoch_is_known():
    plan = JobPlan(num_records=10, global_batch=4, epochs=2, seed=0)
    assert (plan.epoch_steps, plan.total_steps) == (3, 6)
    assert [plan.epoch_of(step) for step in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [plan.ends_epoch(step) for step in range(6)] == [False, False, True] * 2


def test_parts_are_those_of_the_weights_and_the_place_that_are_asked_for_now():
    plan = JobPlan(num_records=40, global_batch=8, epochs=1, seed=0)

    def count(rank, *weights):
        return sum(len(piece.records) for piece in plan.pieces(1, rank=rank, weights=weights))

    assert [count(0, 1.0, 1.0), count(0, 3.0, 1.0), count(1, 3.0, 1.0), count(1, 1.0, 1.0)] == [4, 6, 2, 4]
    plan.leave_out([int(plan.records(1)[0])])
    assert count(1, 1.0, 1.0) + count(0, 1.0, 1.0) == 7
    plan.leave_out([])
    assert count(1, 1.0, 1.0) + count(0, 1.0, 1.0) == 8


@pytest.mark.parametrize("micro_batch", [0, 3])
def test_the_digests_of_the_parts_are_those_of_their_records_also_when_some_were_set_aside(micro_batch):
    plan = JobPlan(num_records=100, global_batch=8, epochs=1, seed=0, micro_batch=micro_batch)
    plan.leave_out(range(0, 100, 3))
    for step in range(plan.total_steps):
        pieces = [piece for rank in range(3) for piece in plan.pieces(step, rank=rank, weights=(1.0, 2.0, 1.0))]
        assert [piece.digest for piece in pieces] == [ledger.digest(piece.records) for piece in pieces]
        assert plan.digest(step) == ledger.digest(plan.records(step))
        assert np.concatenate([piece.records for piece in pieces]).tolist() == plan.records(step).tolist()


def test_a_step_of_which_nothing_is_left_has_no_parts():
    for micro_batch in (0, 2):
        plan = JobPlan(num_records=10, global_batch=4, epochs=1, seed=0, micro_batch=micro_batch)
        plan.leave_out(plan.records(1).tolist())
        assert [plan.pieces(1, rank=rank, weights=(1.0, 1.0)) for rank in range(2)] == [[], []]
        assert (plan.digest(1), plan.share_counts(1, (1.0, 1.0))) == (0, [0, 0])
        assert sum(plan.share_counts(0, (1.0, 1.0))) == 4


def test_shards_are_numbered_through_the_step_whoever_has_them():
    plan = JobPlan(num_records=20, global_batch=10, epochs=1, seed=0, micro_batch=3)
    shards = [[piece.shard for piece in plan.pieces(0, rank=rank, weights=(1.0, 1.0))] for rank in range(2)]
    assert shards == [[0, 1], [2, 3]]
    assert plan.shard_counts(0, (3.0, 1.0)) == [3, 1]


def test_in_windows_the_slices_of_a_step_are_sorted_and_its_shards_stay_as_they_were_drawn():
    blocks = (50,) * 4
    sliced = JobPlan(num_records=200, global_batch=50, epochs=1, seed=0, blocks=blocks)
    drawn = JobPlan(num_records=200, global_batch=50, epochs=1, seed=0, blocks=blocks, micro_batch=10)
    assert sliced.records(1).tolist() == sorted(drawn.records(1).tolist()) != drawn.records(1).tolist()


def test_another_seed_is_another_order_of_the_job():
    first, second = (
        JobPlan(num_records=50, global_batch=8, epochs=1, seed=seed).records(0).tolist() for seed in (0, 1)
    )
    assert first != second


def test_what_is_set_aside_of_a_source_with_an_order_of_its_own_is_looked_up_in_its_epoch():
    plan = JobPlan(
        num_records=9, global_batch=3, epochs=2, seed=0, blocks=DRAWN, drawn=lambda ids, epoch: ids + 100 * epoch
    )
    plan.leave_out([104])
    assert [plan.left_out(step).ids for step in range(6)] == [(), (), (), (), (4,), ()]


@pytest.mark.parametrize(
    ("micro_batch", "weights", "counts"),
    [
        (0, (1.0, 1.0), [5, 5]), (0, (3.0, 1.0), [8, 2]), (0, (1.0, 0.0, 1.0), [5, 0, 5]),
        (3, (1.0, 1.0), [6, 4]), (3, (3.0, 1.0), [8, 2]), (3, (1.0, 0.0), [10, 0]), (4, (1.0, 1.0, 1.0), [4, 3, 3]),
        (4, (2.0, 1.0), [7, 3]),
    ],
)  # fmt: skip
def test_shares_are_of_records_or_of_whole_shards_that_are_as_even_as_can_be(micro_batch, weights, counts):
    plan = JobPlan(num_records=20, global_batch=10, epochs=1, seed=0, micro_batch=micro_batch)
    assert plan.share_counts(0, weights) == counts
