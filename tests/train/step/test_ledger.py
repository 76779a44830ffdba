"""Promises of the account that travels with the gradients."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.checkpoint import tree as trees
from trueline.errors import RecordsMiscounted
from trueline.train.step import ledger

PLAN = np.array([3, 1, 4, 15, 9, 2, 6, 5], dtype=np.int64)


def of(records, *, generation=2, step=7, wish=False, loss=0.5):
    """The account of one member that contributed `records`."""
    return ledger.StepAccount.of_holder(
        count=len(records), digest=ledger.digest(records), generation=generation, step=step, wish=wish,
        loss_sum=loss * len(records),
    )  # fmt: skip


def summed(accounts):
    """What the allreduce makes of them: words."""
    return [sum(column) for column in zip(*(account.pack() for account in accounts), strict=True)]


def check(words, *, plan=PLAN, generation=2, step=7):
    account = ledger.StepAccount.unpack(words)
    account.check(records=len(plan), plan_digest=ledger.digest(plan), generation=generation, step=step)
    return account


@given(st.integers(0, 8), st.integers(0, 8))
def test_any_split_of_the_planned_records_is_accepted(first, second):
    low, high = sorted((first, second))
    sums = check(summed([of(PLAN[:low]), of(PLAN[low:high]), of(PLAN[high:])]))
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
        check(summed(map(of, parts)))


def test_gradients_of_another_step_or_generation_are_refused():
    for changes in ({"step": 8}, {"generation": 3}):
        with pytest.raises(RecordsMiscounted):
            check(summed([of(PLAN[:4], **changes), of(PLAN[4:], **changes)]))


def test_a_member_that_only_observes_changes_nothing_but_can_wish():
    observer = ledger.StepAccount(wishes=1)
    sums = check(summed([of(PLAN[:4]), of(PLAN[4:]), observer]))
    assert (sums.count, sums.wishes) == (8, 1)


def test_a_step_that_nobody_vouches_for_is_refused():
    with pytest.raises(RecordsMiscounted):
        ledger.StepAccount().check(records=0, plan_digest=0, generation=0, step=0)


def test_large_batches_are_counted_exactly_in_float32():
    plan = np.arange(100_000, dtype=np.int64)
    parts = np.array_split(plan, 64)
    rows = np.array([of(part, wish=True).pack() for part in parts], np.float32)
    sums = check(rows.sum(axis=0, dtype=np.float32).tolist(), plan=plan)
    assert (sums.count, sums.wishes) == (100_000, 64)


@given(st.permutations(range(50)), st.integers(0, 50))
def test_the_digest_of_an_epoch_does_not_depend_on_its_order_or_its_cuts(ids, cut):
    ids = np.array(ids, dtype=np.int64)
    assert (ledger.digest(ids[:cut]) + ledger.digest(ids[cut:])) % 2**24 == ledger.digest_of_all(50)


def test_a_ledger_survives_its_journey_as_a_tree():
    book = ledger.Ledger(num_records=4, tally=np.zeros(4, np.int32))
    book.apply(ledger.StepAccount(count=4, digest=9), np.array([1, 1, 1, 1], np.int32))
    book.close_epoch(0)
    book.apply(ledger.StepAccount(count=2, digest=5), np.array([0, 1, 1, 0], np.int32))
    again = ledger.Ledger.from_tree(book.as_tree())
    assert again.as_tree()["tally"].tolist() == [0, 1, 1, 0]
    assert {**again.as_tree(), "tally": None} == {**book.as_tree(), "tally": None}


def book_of(num_records=6):
    return ledger.Ledger(num_records=num_records, tally=np.zeros(num_records, np.int32))


def apply(book, *records, left_out=None):
    """Applies a step of `records`."""
    ids = np.array(records, dtype=np.int64)
    sums = ledger.StepAccount(count=len(ids), digest=ledger.digest(ids))
    book.apply(sums, np.bincount(ids, minlength=book.num_records).astype(np.int32), left_out)


def test_an_epochs_certificate_adds_up_its_steps_and_the_next_one_begins_with_nothing():
    book = book_of()
    for records in ((4, 1), (0, 5), (2, 3)):
        apply(book, *records)
    whole = {"epoch": 0, "steps": 3, "records": 6, "digest": ledger.digest_of_all(6), "tally_min": 1, "tally_max": 1,
             "set_aside": [], "set_aside_of": []}  # fmt: skip
    assert book.close_epoch(0) == whole
    apply(book, 4, 1)
    apply(book, 1, 2, 3)
    wrong = {**whole, "epoch": 1, "steps": 2, "records": 5, "digest": ledger.digest(np.array([4, 1, 1, 2, 3])),
             "tally_min": 0, "tally_max": 2}  # fmt: skip
    assert book.close_epoch(1) == wrong
    assert (book.certificates, book.steps) == ([whole, wrong], 5)


def test_the_digest_of_an_epoch_stays_within_24_bits():
    book = book_of()
    for digest in (ledger.MASK, 3, ledger.MASK):
        book.apply(ledger.StepAccount(count=1, digest=digest), None)
    assert book.close_epoch(0)["digest"] == 1


def test_a_certificate_names_what_was_left_out_with_the_records_that_would_have_stood_there():
    book = book_of()
    apply(book, 0, 1, left_out=ledger.LeftOut((4,), (2,)))
    apply(book, 3, 5, left_out=ledger.LeftOut((2,), (9,)))
    certificate = book.close_epoch(0)
    assert (certificate["set_aside"], certificate["set_aside_of"]) == ([2, 4], [9, 2])
    assert (certificate["tally_min"], certificate["tally_max"]) == (1, 1), "what was left out is not missing"
    apply(book, *range(6), left_out=ledger.LeftOut((), ()))
    assert book.close_epoch(1)["set_aside"] == []
    apply(book, 0, 1, left_out=ledger.LeftOut((4,), (4,)))
    assert book.close_epoch(2)["set_aside_of"] == [], "they are the ids themselves"


def test_a_record_that_was_left_out_and_applied_all_the_same_shows_in_the_tally():
    book = book_of(3)
    apply(book, 0, 1, 2)
    apply(book, 2, left_out=ledger.LeftOut((2,), (2,)))
    assert book.close_epoch(0)["tally_max"] == 2


def test_where_no_record_need_be_applied_the_least_tally_says_nothing():
    book = book_of(2)
    apply(book, left_out=ledger.LeftOut((0, 1), (0, 1)))
    certificate = book.close_epoch(0)
    assert (certificate["tally_min"], certificate["tally_max"]) == (-1, 0)
    apply(book, 1)
    certificate = book.close_epoch(1, partial=True)
    assert (certificate["tally_min"], certificate["tally_max"]) == (-1, 1)
    uncounted = ledger.Ledger(num_records=2)
    uncounted.apply(ledger.StepAccount(count=2, digest=9), None)
    certificate = uncounted.close_epoch(0)
    assert (certificate["tally_min"], certificate["tally_max"]) == (-1, -1)


def test_a_ledger_that_travels_within_an_epoch_certifies_it_as_if_it_had_stayed():
    stays = book_of()
    stays.evaluations.append({"step": 0, "stop": False})
    apply(stays, 0, 1)
    stays.close_epoch(0)
    apply(stays, 0, 1, left_out=ledger.LeftOut((4,), (2,)))
    tree = stays.as_tree()
    travels = ledger.Ledger.from_tree(tree)
    for book in (stays, travels):
        apply(book, 1, 3, left_out=ledger.LeftOut((5,), (9,)))
        book.close_epoch(1)
    assert travels.certificates == stays.certificates
    assert (travels.evaluations, travels.steps) == (stays.evaluations, 3)
    assert tree["tally"].tolist() == [1, 1, 0, 0, 0, 0], "a copy of its moment"


def test_words_beyond_their_bits_are_taken_modulo_so_that_their_sums_stay_exact():
    account = ledger.StepAccount.of_holder(
        count=5000, digest=ledger.MASK, generation=70_000, step=100_000, wish=True, loss_sum=1e4, rates=(7.0, 0.0)
    )
    words = account.pack()
    assert words[:8] == [904.0, 1.0, 4095.0, 4095.0, float(70_000 % 4096), float(100_000 % 4096), 1.0, 1.0]
    assert words[8:] == [1e4, 5000.0, 7.0, 0.0]
    assert len(words) == ledger.StepAccount.num_words(2)
    sums = ledger.StepAccount.unpack([3 * word for word in words])
    plan = (3 * ledger.MASK) & ledger.MASK
    sums.check(records=15_000, plan_digest=plan, generation=70_000, step=100_000)
    assert (sums.count, sums.digest, sums.wishes, sums.holders, sums.loss) == (15_000, plan, 3, 3, 2.0)
    assert sums.rates == [21.0, 0.0]


@given(
    st.builds(
        ledger.StepAccount,
        count=st.integers(0, (1 << 24) - 1),
        digest=st.integers(0, ledger.MASK),
        generations=st.integers(0, 4095),
        steps=st.integers(0, 4095),
        wishes=st.integers(0, 64),
        holders=st.integers(0, 64),
        loss_sum=st.floats(width=32),
        rates=st.lists(st.floats(0, 1e6), max_size=4),
    )
)
def test_what_is_packed_is_unpacked_again(account):
    assert repr(ledger.StepAccount.unpack(account.pack())) == repr(account)


@pytest.mark.parametrize("word", range(6))
def test_a_single_word_that_is_off_by_one_is_refused(word):
    words = summed([of(PLAN[:4]), of(PLAN[4:])])
    words[word] += 1
    with pytest.raises(RecordsMiscounted):
        check(words)


def test_the_last_evaluation_says_whether_the_job_was_stopped():
    book = book_of()
    assert not book.stopped
    for stop in (False, True):
        book.evaluations.append({"stop": stop})
        assert book.stopped is stop


def test_digests_are_the_same_in_every_version_since_checkpoints_hold_them():
    assert ledger.digest(np.array([0, 1, 2])) == 12026174
    assert ledger.digest(np.array([1 << 40])) == 1098633
    million = (1 << 20) + 3
    assert ledger.digest_of_all(million) == ledger.digest(np.arange(million))


def test_a_fresh_ledger_as_a_tree_and_back_is_whole():
    tree = {
        "num_records": 4, "steps": 0, "epoch_steps": 0, "epoch_records": 0, "epoch_digest": 0, "epoch_left_out": [],
        "epoch_left_out_of": [], "tally": None, "certificates": "[]", "evaluations": "[]",
        "loss": {},
    }  # fmt: skip
    assert ledger.Ledger(num_records=4).as_tree() == tree
    assert ledger.Ledger.from_tree(tree) == ledger.Ledger(num_records=4)
    before_drawn = {name: value for name, value in tree.items() if name != "epoch_left_out_of"}
    old = ledger.Ledger.from_tree({**before_drawn, "epoch_left_out": [3]})
    assert (old.epoch_left_out, old.epoch_left_out_of) == ([3], [3]), "a tree of a release that named ids only"
    kept = [{"step": 1, "loss": 0.5, "stop": False}]
    old = ledger.Ledger.from_tree({**tree, "certificates": [{"epoch": 0}], "evaluations": kept})
    assert (old.certificates, old.evaluations) == ([{"epoch": 0}], kept), "a tree of a release that kept lists"


def test_a_ledger_of_ten_thousand_epochs_is_a_small_tree_since_a_death_is_healed_by_sending_it():
    book = book_of(3)
    for epoch in range(10_000):
        apply(book, 0, 1, 2, left_out=ledger.LeftOut((np.int64(1),), (2,)))
        book.close_epoch(epoch)
    book.evaluations.append({"step": 9, "loss": math.nan, "metrics": {}, "best": False, "stop": False})
    skeleton, tensors = trees.encode(book.as_tree())
    assert len(str(skeleton["d"])) > 1_000_000
    assert count_nodes(skeleton) < 60
    again = ledger.Ledger.from_tree(trees.decode(json.loads(json.dumps(skeleton)), tensors))
    assert again.certificates == book.certificates
    assert math.isnan(again.evaluations[0].pop("loss"))


def count_nodes(skeleton):
    if isinstance(skeleton, dict):
        return 1 + sum(count_nodes(value) for value in skeleton.values())
    return 1 + sum(map(count_nodes, skeleton)) if isinstance(skeleton, list) else 1


def test_a_ledger_in_the_middle_of_an_epoch_is_a_tree_of_copies():
    book = book_of(3)
    book.evaluations.append({"step": 1, "stop": False})
    apply(book, 0, 1, 2)
    book.close_epoch(0)
    apply(book, 0, left_out=ledger.LeftOut((2,), (9,)))
    apply(book, 1)
    tree = book.as_tree()
    assert {**tree, "tally": tree["tally"].tolist(), "certificates": None} == {
        "num_records": 3, "steps": 3, "epoch_steps": 2, "epoch_records": 2,
        "epoch_digest": ledger.digest(np.array([0, 1])), "epoch_left_out": [2], "epoch_left_out_of": [9],
        "tally": [1, 1, 0], "certificates": None, "evaluations": '[{"step": 1, "stop": false}]',
        "loss": {},
    }  # fmt: skip
    assert (json.loads(tree["certificates"]), tree["tally"].dtype) == (book.certificates, np.int32)
    assert ledger.Ledger.from_tree({**tree, "tally": [1, 1, 0]}).tally.dtype == np.int32


def test_a_certificate_says_how_the_losses_made_that_of_a_step():
    book = book_of(3)
    book.loss = {"reduction": "mean", "shard_records": 8}
    apply(book, 0, 1, 2)
    signed = book.close_epoch(0)
    assert (signed["reduction"], signed["shard_records"]) == ("mean", 8)
    assert ledger.Ledger.from_tree(book.as_tree()).loss == book.loss


def test_the_certificate_of_an_epoch_without_a_tally_is_whole():
    book = ledger.Ledger(num_records=6)
    for ids in ([4, 1], [0]):
        book.apply(
            ledger.StepAccount(count=len(ids), digest=ledger.digest(np.array(ids))),
            None, ledger.LeftOut((ids[0] + 1,), (ids[0] + 1,)),
        )  # fmt: skip
    assert book.close_epoch(3) == {
        "epoch": 3, "steps": 2, "records": 3, "digest": ledger.digest(np.array([0, 1, 4])), "tally_min": -1,
        "tally_max": -1, "set_aside": [1, 5], "set_aside_of": [],
    }  # fmt: skip
    assert (book.epoch_steps, book.epoch_records, book.epoch_digest, book.steps) == (0, 0, 0, 2)
    assert (book.epoch_left_out, book.epoch_left_out_of) == ([], [])


DIGESTS = [1953199, 154817, 9918158]
"""Of the records 0, 1 and 2."""


def test_digests_of_single_records_keep_their_values_and_no_record_has_none():
    assert [ledger.digest(np.array([one])) for one in (0, 1, 2)] == DIGESTS
    assert ledger.digest(np.array([], dtype=np.int64)) == 0
    assert [ledger.digest_of_all(count) for count in range(4)] == [
        0, DIGESTS[0], sum(DIGESTS[:2]) & ledger.MASK, sum(DIGESTS) & ledger.MASK,
    ]  # fmt: skip
