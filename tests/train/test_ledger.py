"""Promises of the account that travels with the gradients."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.errors import RecordsMiscounted
from trueline.train import ledger

PLAN = np.array([3, 1, 4, 15, 9, 2, 6, 5], dtype=np.int64)


def summed(parts, *, generation=2, step=7):
    """What the allreduce makes of the words of workers that contributed `parts`."""
    rows = [[*ledger.words(len(p), ledger.digest(p), generation, step, wish=False), 0.5 * len(p)] for p in parts]
    return [sum(column) for column in zip(*rows, strict=True)]


def check(parts, **changes):
    return ledger.check(
        summed(parts, **changes), records=len(PLAN), plan_digest=ledger.digest(PLAN), generation=2, step=7
    )


@given(st.integers(0, 8), st.integers(0, 8))
def test_any_split_of_the_planned_records_is_accepted(first, second):
    low, high = sorted((first, second))
    sums = check([PLAN[:low], PLAN[low:high], PLAN[high:]])
    assert (sums.count, sums.loss) == (8, 0.5)


@pytest.mark.parametrize(
    "parts",
    [
        [PLAN[:4], PLAN[5:]],
        [PLAN[:5], PLAN[4:]],
        [PLAN[:4], np.array([9, 2, 6, 7])],
        [PLAN[:4], np.array([9, 2, 6, 6])],
    ],
    ids=["one is missing", "one is there twice", "one is another", "one took another's place"],
)
def test_a_step_with_other_records_than_planned_is_refused(parts):
    with pytest.raises(RecordsMiscounted, match="was not applied"):
        check(parts)


def test_gradients_of_another_step_or_generation_are_refused():
    for changes in ({"step": 8}, {"generation": 3}):
        with pytest.raises(RecordsMiscounted):
            check([PLAN[:4], PLAN[4:]], **changes)


def test_a_member_that_only_observes_changes_nothing_but_can_wish():
    rows = [summed([PLAN[:4], PLAN[4:]]), ledger.observing(wish=True)]
    sums = ledger.check(
        [sum(column) for column in zip(*rows, strict=True)],
        records=len(PLAN), plan_digest=ledger.digest(PLAN), generation=2, step=7,
    )  # fmt: skip
    assert (sums.count, sums.wishes) == (8, 1)


def test_a_step_that_nobody_vouches_for_is_refused():
    with pytest.raises(RecordsMiscounted):
        ledger.check(ledger.observing(wish=False), records=0, plan_digest=0, generation=0, step=0)


def test_large_batches_are_counted_exactly_in_float32():
    plan = np.arange(100_000, dtype=np.int64)
    parts = np.array_split(plan, 64)
    rows = np.array([[*ledger.words(len(p), ledger.digest(p), 1, 1, wish=True), 0.0] for p in parts], np.float32)
    sums = ledger.check(
        rows.sum(axis=0, dtype=np.float32).tolist(),
        records=len(plan), plan_digest=ledger.digest(plan), generation=1, step=1,
    )  # fmt: skip
    assert (sums.count, sums.wishes) == (100_000, 64)


@given(st.permutations(range(50)), st.integers(0, 50))
def test_the_digest_of_an_epoch_does_not_depend_on_its_order_or_its_cuts(ids, cut):
    ids = np.array(ids, dtype=np.int64)
    assert (ledger.digest(ids[:cut]) + ledger.digest(ids[cut:])) % 2**24 == ledger.digest_of_all(50)


def test_a_ledger_survives_its_journey_as_a_tree():
    book = ledger.Ledger(num_records=4, tally=np.zeros(4, np.int32))
    book.apply(ledger.Sums(count=4, digest=9, wishes=0, loss=1.0), np.array([1, 1, 1, 1], np.int32))
    book.close_epoch(0)
    book.apply(ledger.Sums(count=2, digest=5, wishes=0, loss=1.0), np.array([0, 1, 1, 0], np.int32))
    again = ledger.Ledger.from_tree(book.as_tree())
    assert again.as_tree()["tally"].tolist() == [0, 1, 1, 0]
    assert {**again.as_tree(), "tally": None} == {**book.as_tree(), "tally": None}


def test_a_certificate_shows_what_is_wrong_with_an_epoch():
    good = {"epoch": 0, "steps": 3, "records": 10, "digest": 7, "tally_min": 1, "tally_max": 1}
    expected = {"num_records": 10, "steps": 3, "expected_digest": 7}
    assert ledger.certificate_faults(good, **expected) == []
    assert ledger.certificate_faults({**good, "records": 9}, **expected) == [
        "9 records were applied, the data set has 10"
    ]
    assert ledger.certificate_faults({**good, "tally_min": 0, "tally_max": 2}, **expected) == [
        "records were applied 0 to 2 times"
    ]
    assert len(ledger.certificate_faults({**good, "digest": 8, "steps": 2}, **expected)) == 2
