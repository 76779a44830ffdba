"""Promises of the way from a step's sums to the next state; what a replica would do is written down instead."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from trueline.errors import RecipeError, RecordsMiscounted
from trueline.train.step import ledger as books
from trueline.train.step.commit import Commit
from trueline.train.step.plan import JobPlan
from trueline.train.step.replica import Reduced

GENERATION = 3


class Replica:
    """A replica as far as a commit knows it: a ledger, and what it was asked to do."""

    def __init__(self, num_records):
        self.ledger = books.Ledger(num_records=num_records)
        self.done, self.overflows, self.unused = [], False, False

    def check_all_used(self):
        if self.unused:
            raise RecipeError("some parameters of the model took no part")

    def apply(self, sums, measured=None, *, left_out=None):
        self.done.append((self.ledger.steps, measured, left_out))
        if not self.overflows:
            self.ledger.apply(sums, None, left_out)
        return not self.overflows

    def begin(self):
        self.done.append("begin")

    def is_finite(self):
        return True

    def recall(self, reduced):
        self.done.append(("recall", reduced.account.loss_sum))


def commit_of(*, set_aside=()):
    """Two epochs of three steps over ten records."""
    plan = JobPlan(num_records=10, global_batch=4, epochs=2, seed=0)
    plan.leave_out(set_aside)
    replica = Replica(10)
    evaluations = SimpleNamespace(
        value=lambda: 0.5, enter=lambda totals: replica.done.append(("evaluation", totals, replica.ledger.steps))
    )
    group = SimpleNamespace(generation=GENERATION)
    return Commit(plan=plan, replica=replica, group=group, evaluations=evaluations, reporter=None)  # type: ignore[arg-type]


def account(commit, step, *, loss=1.0, generation=GENERATION, but=0):
    """The sums of two members that have computed all records of `step` but so many."""
    records = commit.plan.records(step)[but:]
    half = len(records) // 2
    parts = (records[:half], records[half:])
    rows = [
        books.StepAccount.of_holder(
            count=len(part), digest=books.digest(part), generation=generation, step=step, wish=False, loss_sum=loss / 2
        ).pack()
        for part in parts
    ]
    return books.StepAccount.unpack([sum(column) for column in zip(*rows, strict=True)])


def run(commit, steps):
    """Applies `steps` steps as a member that holds the state does; returns the certificates."""
    found = []
    for _ in range(steps):
        step = commit.replica.ledger.steps
        whole = account(commit, step)
        commit.check(whole)
        assert commit.apply(whole)
        if (certificate := commit.certificate()) is not None:
            found.append((step, certificate))
    return found


@pytest.mark.parametrize(
    ("halting", "save_from", "rank", "writes"),
    [(True, 3, 0, [3]), (True, 4, 0, []), (True, 3, 1, []), (False, 3, 0, [])],
)
def test_a_member_that_enters_a_group_while_the_job_halts_writes_its_state_before_another_step(
    halting, save_from, rank, writes
):
    commit = commit_of()
    run(commit, 3)
    written = []
    commit.group.rank = rank
    link = SimpleNamespace(halting=halting, save_from=save_from)
    writer = SimpleNamespace(after_step=lambda replica, link, **_: written.append(replica.ledger.steps))
    dataclasses.replace(commit, checkpointer=writer, reporter=SimpleNamespace(link=link)).halt()
    assert written == writes


def test_sums_of_just_the_records_of_the_step_at_hand_are_let_through():
    commit = commit_of()
    sums = account(commit, 0, loss=8.0)
    commit.check(sums)
    assert (sums.count, sums.loss) == (4, 2.0)


@pytest.mark.parametrize(
    "how", [{"generation": GENERATION - 1}, {"generation": GENERATION + 1}, {"but": 1}, {"step": 1}], ids=str
)
def test_sums_of_another_step_or_group_or_of_fewer_records_are_refused_and_change_nothing(how):
    commit = commit_of()
    with pytest.raises(RecordsMiscounted):
        commit.check(account(commit, how.pop("step", 0), **how))
    assert (commit.replica.done, commit.replica.ledger.steps) == ([], 0)


def test_right_sums_are_refused_where_a_parameter_took_no_part_in_them():
    commit = commit_of()
    commit.check(account(commit, 0))
    commit.replica.unused = True
    with pytest.raises(RecipeError, match="took no part"):
        commit.check(account(commit, 0))
    with pytest.raises(RecordsMiscounted):
        commit.check(account(commit, 0, but=1))


def test_each_epoch_is_certified_after_its_last_step_and_only_then():
    found = run(commit_of(), 6)
    assert [(step, one["epoch"], one["steps"], one["records"]) for step, one in found] == [(2, 0, 3, 10), (5, 1, 3, 10)]


def test_what_was_set_aside_of_a_step_goes_into_its_epochs_certificate():
    commit = commit_of(set_aside=(7, 2))
    ((_, certificate),) = run(commit, 3)
    assert (certificate["set_aside"], certificate["records"]) == ([2, 7], 8)
    assert {one for _, _, out in commit.replica.done for one in out.ids} == {2, 7}


def test_the_evaluation_of_the_state_at_hand_goes_with_the_step():
    commit = commit_of()
    run(commit, 1)
    assert commit.replica.done == [(0, 0.5, books.LeftOut())]


def test_a_step_that_overflowed_is_not_counted():
    commit = commit_of()
    commit.replica.overflows = True
    assert not commit.apply(account(commit, 0))
    assert commit.replica.ledger.steps == 0


def stopped(commit):
    commit.replica.ledger.evaluations.append({"stop": True})
    return commit


def test_the_part_of_an_epoch_in_which_the_job_was_stopped_is_certified_as_a_part():
    commit = commit_of()
    run(commit, 4)
    assert not commit.certify_part(), "it was not stopped"
    assert stopped(commit).certify_part()
    assert [one["epoch"] for one in commit.replica.ledger.certificates] == [0, 1]
    assert commit.replica.ledger.certificates[1]["steps"] == 1
    assert not commit.certify_part(), "once"


def test_a_tally_of_a_part_says_nothing_of_records_that_were_not_to_come():
    commit = commit_of()
    commit.replica.ledger.tally = np.zeros(10, np.int32)
    commit.replica.ledger.epoch_steps = 1
    assert stopped(commit).certify_part()
    assert commit.replica.ledger.certificates[0]["tally_min"] == -1


def test_a_stop_at_the_end_of_an_epoch_leaves_no_part_to_certify():
    commit = commit_of()
    run(commit, 3)
    assert not stopped(commit).certify_part()
    assert len(commit.replica.ledger.certificates) == 1


def reduced(commit, step, **how):
    return Reduced(account(commit, step, **how), None, [])


def test_who_catches_up_applies_all_that_the_others_have_in_their_order_and_certifies_what_they_have():
    commit = commit_of()
    run(commit, 1)
    commit.replica.done.clear()
    commit.catch_up(
        [reduced(commit, 1, loss=10.0), [0.25], reduced(commit, 2, loss=20.0), reduced(commit, 3, loss=30.0)]
    )
    assert [one if isinstance(one, str) else one[:2] for one in commit.replica.done] == [
        "begin", ("recall", 10.0), (1, 0.5), ("evaluation", [0.25]),
        "begin", ("recall", 20.0), (2, 0.5), "begin", ("recall", 30.0), (3, 0.5),
    ]  # fmt: skip
    assert commit.replica.ledger.steps == 4
    assert [one["epoch"] for one in commit.replica.ledger.certificates] == [0]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_who_catches_up_leaves_out_what_the_others_did_not_apply(loss):
    commit = commit_of()
    commit.catch_up([reduced(commit, 0, loss=loss), reduced(commit, 0)])
    assert commit.replica.ledger.steps == 1


def test_who_catches_up_refuses_sums_that_are_not_those_of_the_next_step():
    commit = commit_of()
    with pytest.raises(RecordsMiscounted):
        commit.catch_up([reduced(commit, 1)])
    assert commit.replica.ledger.steps == 0
