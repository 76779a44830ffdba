"""Promises of the plan: the records of a step depend on nothing but the seed and the batch."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trueline.train.plan import DRAWN, JobPlan


def part(plan: JobPlan, step: int, rank: int, workers: int) -> list[np.ndarray]:
    return [piece.records for piece in plan.pieces(step, rank=rank, weights=(1.0,) * workers)]


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
