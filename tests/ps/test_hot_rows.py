"""Copies of rows in a worker: never older than their bound, and the rows that were pulled."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trueline.ps.hot_rows import HotRows

BOUND = 3


def rows_of(ids, step):
    """What servers would return at `step`."""
    return np.repeat((ids * 1000 + step)[:, None], 2, axis=1).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sets(st.integers(-6, 6), min_size=1), st.integers(0, 3)), max_size=25), st.integers(1, 9))
def test_each_row_is_one_that_was_pulled_at_most_so_many_steps_ago(minibatches, most):
    hot, step = HotRows(most, BOUND), 0
    for chosen, later in minibatches:
        step += later
        hot.note(step)
        ids = np.array(sorted(chosen), np.int64)
        lookup = hot.look_up({"t": ids})
        asked = lookup.missing.get("t", np.empty(0, np.int64))
        rows = hot.join(lookup, {"t": rows_of(asked, step)}, step)["t"]
        ages = step - (rows[:, 0] - ids * 1000)
        assert rows.shape == (len(ids), 2)
        assert ((ages >= 0) & (ages <= BOUND)).all()
        assert (ages[np.isin(ids, asked)] == 0).all()
        assert lookup.oldest == step - (int(ages[~np.isin(ids, asked)].max()) if len(asked) < len(ids) else 0)


def test_a_frequent_id_is_pulled_once_in_its_bound_and_a_rare_one_makes_room():
    hot, frequent = HotRows(2, BOUND), np.array([7], np.int64)
    asked = []
    for step in range(2 * (BOUND + 1)):
        hot.note(step)
        lookup = hot.look_up({"t": frequent})
        asked.append(len(lookup.missing.get("t", ())))
        hot.join(lookup, {"t": rows_of(frequent, step)} if asked[-1] else {}, step)
    assert asked == [1, 0, 0, 0] * 2
    for rare in (1, 2, 3):
        ids = np.array([rare], np.int64)
        hot.join(hot.look_up({"t": ids}), {"t": rows_of(ids, hot.step)}, hot.step)
    assert hot.look_up({"t": np.array([1, 3, 7], np.int64)}).missing["t"].tolist() == [1, 7]
    assert hot.look_up({}).missing == {}
