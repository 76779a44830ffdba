"""Promises of evaluation while training: when one is due, what is best, when to stop; each record counts once."""

import contextlib
import json
import math
from types import SimpleNamespace

import pytest
import torch

from trueline.errors import UsageError
from trueline.train.step.ledger import Ledger
from trueline.train.step.plan import JobPlan
from trueline.train.step.validation import Evaluations, Rule, Validation, as_message


def rule(every=3, monitor="loss", patience=0):
    return Rule(every=every, monitor=monitor, patience=patience)


@pytest.mark.parametrize(
    ("every", "due"), [(3, [3, 6, 8]), (0, [4, 8]), (8, [8]), (5, [5, 8]), (1, [1, 2, 3, 4, 5, 6, 7, 8])]
)
def test_an_evaluation_is_due_every_so_many_steps_and_after_the_last_one(every, due):
    assert [steps for steps in range(9) if rule(every).due(steps, epoch_steps=4, last=8)] == due


def judged(values, *, patience=0, monitor="loss"):
    """Best and stop of evaluations of these values, one after the other."""
    found = []
    for value in values:
        metrics = {"accuracy": value}
        found.append(rule(monitor=monitor, patience=patience).judge(found, {"loss": value, "metrics": metrics}))
    return [one["best"] for one in found], [one["stop"] for one in found]


T, F = True, False


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ([3.0, 2.0, 2.0, 1.0], [T, T, F, T]),
        ([3.0, 4.0, 3.5, 2.0], [T, F, F, T]),
        ([math.nan, 4.0, math.nan, 3.0], [F, T, F, T]),
        ([math.inf, 4.0], [T, T]),
    ],
    ids=str,
)
def test_the_best_is_better_than_all_before_it(values, best):
    assert judged(values) == (best, [F] * len(values))


@pytest.mark.parametrize(
    ("patience", "stop"), [(0, [F, F, F, F, F]), (1, [F, T, F, T, T]), (2, [F, F, F, F, T]), (3, [F, F, F, F, F])]
)
def test_training_stops_after_so_many_evaluations_in_a_row_without_a_new_best(patience, stop):
    assert judged([3.0, 4.0, 2.0, 5.0, 2.0], patience=patience) == ([T, F, T, F, F], stop)


def test_a_job_that_never_had_a_best_stops_as_well():
    assert judged([math.nan] * 3, patience=2) == ([F, F, F], [F, T, T])


def test_a_metric_may_be_watched_and_a_minus_makes_larger_better():
    assert judged([0.5, 0.7, 0.6], monitor="-accuracy")[0] == [T, T, F]
    assert judged([0.5, 0.7, 0.6], monitor="accuracy")[0] == [T, F, F]
    assert rule(monitor="-loss").value({"loss": 2.0, "metrics": {}}) == -2.0
    assert rule(monitor="accuracy").value({"loss": 2.0, "metrics": {"accuracy": 0.5}}) == 0.5


def validation(num_records=100, *, names=("accuracy",), **kind):
    """Each record's loss is its number, its metric one."""
    return Validation(
        rule=rule(**kind), num_records=num_records, names=names,
        measure=lambda start, stop: [float(sum(range(start, stop))), float(stop - start)],
    )  # fmt: skip


def test_a_metric_that_the_recipe_does_not_have_is_refused():
    for monitor in ("f1", "-f1"):
        with pytest.raises(UsageError, match="there is no metric 'f1'; there are"):
            validation(monitor=monitor)
    validation(monitor="-accuracy")


@pytest.mark.parametrize("num_records", [1, 31, 32, 33, 100, 8191, 8192, 8193, 9000])
def test_chunks_hold_every_record_once_and_are_not_too_large(num_records):
    chunks = validation(num_records).chunks()
    assert [record for start, stop in chunks for record in range(start, stop)] == list(range(num_records))
    assert max(stop - start for start, stop in chunks) <= 256


class Group:
    """What an allreduce would be handed; the others' sums are added."""

    def __init__(self, monkeypatch, others=0.0):
        self.rows = []

        def reduce(row, *, async_op):
            self.rows.append(row.tolist())
            row += others

        monkeypatch.setattr("trueline.train.step.validation.dist.all_reduce", reduce)

    def wait(self, work):
        assert work is None


def member(monkeypatch, *, position=0, ordered_weights=(1.0,), rank=0, overtaken=lambda: False, others=0.0):
    group = Group(monkeypatch, others)
    return SimpleNamespace(
        position=position,
        ordered_weights=ordered_weights,
        rank=rank,
        is_overtaken=overtaken,
        process_group=group,
        size=len(ordered_weights),
    )


class Replica:
    def __init__(self, num_records=100):
        self.ledger, self.averaging, self.optimizer_step = Ledger(num_records=num_records), [], self

    @contextlib.contextmanager
    def use_averages(self):
        self.averaging.append("in")
        yield
        self.averaging.append("out")


def test_members_measure_their_parts_in_the_order_in_which_they_are_dealt_and_together_all(monkeypatch):
    totals = torch.zeros(2, dtype=torch.float64)
    for position, rank in ((0, 2), (1, 0), (2, 1)):
        group = member(monkeypatch, position=position, ordered_weights=(1.0, 2.0, 0.0), rank=rank)
        replica = Replica()
        totals += torch.tensor(validation().measure_all(group, replica))
        assert replica.averaging == ["in", "out"], "by the averaged parameters"
        if position == 2:
            assert group.process_group.rows == [[0.0, 0.0]], "it has no part"
    assert totals.tolist() == [float(sum(range(100))), 100.0]


def test_a_member_without_the_state_adds_zeros_and_gets_the_sums(monkeypatch):
    group = member(monkeypatch, others=7.0)
    assert validation().measure_all(group, None) == [7.0, 7.0]
    assert group.process_group.rows == [[0.0, 0.0]]


def test_a_member_that_is_overtaken_while_it_measures_adds_no_part_of_its_sums(monkeypatch):
    looks = iter([False, True, True])
    group = member(monkeypatch, overtaken=lambda: next(looks))
    with pytest.raises(RuntimeError, match="ProcessGroup: a newer view"):
        validation().measure_all(group, Replica())
    assert group.process_group.rows == []


def test_sums_become_means_and_their_evaluation_is_entered_after_those_before_it():
    checked, told, replica = validation(), Told(), Replica()
    replica.ledger.steps = 5
    replica.ledger.evaluations.append({"step": 2, "loss": 40.0, "metrics": {}, "best": True, "stop": False})
    Evaluations(checked, None, replica, None, told, None).enter([4950.0 / 3, 75.0])  # type: ignore[arg-type]
    found = replica.ledger.evaluations[-1]
    assert found == {
        "step": 5,
        "records": 100,
        "loss": 16.5,
        "metrics": {"accuracy": 0.75},
        "best": True,
        "stop": False,
    }
    assert len(replica.ledger.evaluations) == 2
    assert checked.evaluation([100.0 / 3, 75.0], 5, [])["loss"] == 0.333333333333, "twelve digits"
    (message,) = told.evaluations
    assert message == as_message(found)
    assert (message.step, message.loss, json.loads(message.metrics), message.best) == (
        5,
        16.5,
        {"accuracy": 0.75},
        True,
    )


class Told:
    """A link and a checkpointer: what they are told."""

    def __init__(self):
        self.evaluations, self.kept = [], []

    def report_evaluation(self, evaluation):
        self.evaluations.append(evaluation)

    def after_step(self, replica, link, **how):
        self.kept.append((replica.ledger.steps, how))


def evaluations(monkeypatch, *, rank=0, checked=None):
    told, replica = Told(), Replica()
    plan = JobPlan(num_records=8, global_batch=4, epochs=3, seed=0)
    group = member(monkeypatch, rank=rank)
    return Evaluations(checked or validation(every=2), plan, replica, group, told, told), replica, told


def test_an_evaluation_is_made_once_a_step_and_again_when_the_members_have_changed(monkeypatch):
    found, _, _ = evaluations(monkeypatch)
    assert [found.due(at) for at in range(7)] == [False, False, True, False, True, False, True]
    assert found.measure(2, holds=True) == [4950.0, 100.0]
    assert [found.due(at) for at in (2, 4)] == [False, True]
    found.forget()
    assert found.due(2)
    assert found.measure(2, holds=False) == [0.0, 0.0]
    assert not Evaluations(None, found._plan, found._replica, found._group, None, None).due(2)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_member_reports_an_evaluation_and_rank_0_has_the_best_state_written(monkeypatch, rank):
    found, replica, told = evaluations(monkeypatch, rank=rank)
    for steps, total in ((2, 300.0), (4, 400.0), (6, 200.0)):
        replica.ledger.steps = steps
        found.enter([total, 50.0])
    assert [(one.step, one.best) for one in told.evaluations] == [(2, True), (4, False), (6, True)]
    best = {"ends_epoch": False, "best": True}
    assert told.kept == ([(2, best), (6, best)] if rank == 0 else [])


def test_a_schedule_hears_of_the_state_at_hand_and_of_no_earlier_one(monkeypatch):
    found, replica, _ = evaluations(monkeypatch, checked=validation(every=2, monitor="-accuracy"))
    assert found.value() is None
    for steps, hits in ((2, 50.0), (4, 75.0)):
        replica.ledger.steps = steps
        found.enter([0.0, hits])
    assert found.value() == -0.75
    replica.ledger.steps = 5
    assert found.value() is None
