"""Promises of the plan: the records of a step depend on nothing but the seed and the batch."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trueline.train.plan import JobPlan


@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 6))
def test_every_record_is_in_exactly_one_share_of_one_step_of_each_epoch(num_records, global_batch, workers):
    plan = JobPlan(num_records=num_records, global_batch=global_batch, epochs=2, seed=3)
    for epoch in range(2):
        steps = range(epoch * plan.epoch_steps, (epoch + 1) * plan.epoch_steps)
        shares = [plan.share(step, rank=rank, workers=workers) for step in steps for rank in range(workers)]
        assert sorted(np.concatenate(shares).tolist()) == list(range(num_records))


@given(st.integers(0, 400), st.integers(1, 5))
def test_a_step_has_the_same_records_however_many_share_it_and_whenever_it_is_asked_for(step, workers):
    plan = JobPlan(num_records=1437, global_batch=64, epochs=20, seed=1)
    shares = [plan.share(step, rank=rank, workers=workers) for rank in range(workers)]
    fresh = JobPlan(num_records=1437, global_batch=64, epochs=20, seed=1)
    fresh.records((step * 7) % fresh.total_steps)
    assert np.concatenate(shares).tolist() == fresh.records(step).tolist()
    assert plan.digest(step) == fresh.digest(step)
