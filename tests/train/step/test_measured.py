"""What a loop measures while it trains is tried before the first step: each member measures other chunks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trueline.errors import UsageError
from trueline.train.elastic import Elastic
from trueline.train.step.validation import Rule, Validation

pytestmark = pytest.mark.slow

INPUTS = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
LABELS = INPUTS[:, 0] > 0
DATA = TensorDataset(INPUTS, LABELS)


class Run:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.average, self.calls = 0.0, 0

    def compute(self, start, stop, reduction="sum"):
        self.calls += 1
        with torch.no_grad():
            outputs = self.model.eval()(INPUTS[start:stop])
        self.model.train()
        loss = nn.functional.cross_entropy(outputs, LABELS[start:stop].long(), reduction=reduction).item()
        return [loss, float((outputs.argmax(1) == LABELS[start:stop]).sum())]

    def train(self, measure):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        validation = Validation(rule=Rule(every=5, monitor="loss"), num_records=96, names=("accuracy",),
                                measure=lambda start, stop: measure(self, start, stop))  # fmt: skip
        job = Elastic(self.model, optimizer, DATA, global_batch=12, epochs=1, validation=validation)
        for batch in job:
            job.step(nn.functional.cross_entropy(self.model(batch.inputs), batch.labels.long()))
        return job


def means(run, start, stop):
    return run.compute(start, stop, "mean")


def smooths(run, start, stop):
    loss, right = run.compute(start, stop)
    run.average = 0.9 * run.average + 0.1 * loss
    return [run.average, right]


def draws(run, start, stop):
    loss, right = run.compute(start, stop)
    return [loss * (1 + 0.1 * torch.randn(()).item()), right]


def leaves_evaluation(run, start, stop):
    sums = run.compute(start, stop)
    run.model.eval()
    return sums


def moves_statistics(run, start, stop):
    run.model(INPUTS[start:stop])
    return run.compute(start, stop)


def forgets_a_metric(run, start, stop):
    return run.compute(start, stop)[:1]


@pytest.mark.parametrize(
    ("measure", "why"),
    [
        (means, "loss of the validation is .* of records 0 to 5 measured together"),
        (smooths, "loss of the validation is .* of records 0 to 2 after others were measured"),
        (draws, "loss of the validation is .* of records 0 to 2 after others were measured"),
        (leaves_evaluation, "leaves the model in another mode"),
        (moves_statistics, "changes the model's numbers"),
        (forgets_a_metric, "returns 1 numbers; expected 2: loss, accuracy"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_a_measure_that_would_differ_between_members_is_refused_before_the_first_step(measure, why):
    run = Run()
    weight = run.model[0].weight.clone()
    with pytest.raises(UsageError, match=why):
        run.train(measure)
    assert torch.equal(run.model[0].weight, weight)


@pytest.mark.jobs
def test_a_measure_that_returns_sums_evaluates_and_has_seen_no_call_of_the_trial():
    run = Run()
    job = run.train(lambda run, start, stop: run.compute(start, stop))
    assert [one["step"] for one in job.evaluations] == [5, 8]
    assert run.calls == 2 * 32


def test_a_measure_that_raises_is_left_to_the_evaluation():
    run = Run()
    with pytest.raises(ZeroDivisionError):
        run.train(lambda run, start, stop: [1 / 0, 0.0])
