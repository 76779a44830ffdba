"""A part of the model that changes its mode while the job trains follows from the step, or ends the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trueline.errors import UsageError
from trueline.train.elastic import Elastic
from trueline.train.rehearsal.steps import many_batches
from worlds.cases import few
from worlds.groups import together

INPUTS = torch.randn(96, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = TensorDataset(INPUTS, INPUTS.sum(dim=1, keepdim=True))
Change = Callable[[nn.Module, Any], object]


class Counted(nn.Module):
    """Doubles what it gets while it trains, and counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.forwards += 1
        return 2 * inputs if self.training else inputs


def train(before: Change, after: Change = lambda *_: None, *, frozen: bool = False) -> list[Any]:
    """The weights after twelve steps, and the steps in which the body ran."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), Counted(), nn.Tanh(), nn.Linear(5, 1)).double()
    model[1].train(not frozen)
    job = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.05), DATA, global_batch=8)
    ran = []
    for batch in job:
        before(model, batch)
        if not batch.trial:
            ran.append(batch.step)
        if job.step((model(batch.inputs) - batch.labels).square().mean()):
            after(model, job)
    assert job.steps == 12
    return [value.tolist() for value in model.state_dict().values()] + [ran]


CHANGES = [
    (lambda *_: None, lambda model, at: model.eval() if at == 3 else None, "the model is in evaluation mode"),
    (lambda model, at: model[1].eval() if at == 3 else None, lambda *_: None, "'1' is in evaluation"),
    (lambda *_: None, lambda model, at: model.train() if at == 9 else None, "'1' is in training"),
]
CHANGE_NAMES = ["forgotten train", "once", "all of it thawed"]


@pytest.mark.jobs
@pytest.mark.parametrize(("before", "after", "part"), CHANGES, ids=CHANGE_NAMES)
def test_a_mode_that_is_set_in_one_named_step_is_refused_before_the_first_step(before, after, part):
    applied = []
    with pytest.raises(UsageError, match=rf"in step \d the loop .*: {part}") as refused:
        train(
            lambda model, batch: before(model, batch.step),
            lambda model, job: (applied.append(job.steps), after(model, job.steps)),
            frozen="'1' is in training" in part,
        )
    assert not applied
    assert "by batch.step" in refused.value.hint


@pytest.mark.jobs
@pytest.mark.parametrize(("before", "after", "part"), CHANGES, ids=CHANGE_NAMES)
@pytest.mark.parametrize("reached", [False, True])
def test_a_mode_that_an_earlier_batch_has_left_behind_ends_the_job(before, after, part, reached, monkeypatch):
    """A loop that does not show which step it waits for: of a plain number nothing is noted. Where the trial of many
    batches reaches that step, no step is applied."""
    if not reached:
        monkeypatch.setattr(many_batches, "MOST_S", 0.0)
    applied = []
    with pytest.raises(UsageError, match=part) as refused:
        train(
            lambda model, batch: before(model, int(batch.step)),
            lambda model, job: (applied.append(job.steps), after(model, int(job.steps))),
            frozen="'1' is in training" in part,
        )
    assert len(applied) in ([0] if reached else [3, 4, 9])
    assert "by batch.step" in refused.value.hint


@pytest.mark.jobs
def test_a_mode_that_follows_from_the_step_trains_alike_for_one_and_three_workers_and_runs_two_bodies_more():
    def thaw(model: nn.Module, batch: Any) -> None:
        model[1].train(batch.step >= 5)

    (*alone, ran) = train(thaw, frozen=True)
    assert ran == sorted([*range(12), 5, 6])
    assert alone[2] == 7, "forwards that are given up do not count"
    for *found, _ in together(3, lambda: train(thaw, frozen=True)):
        for mine, its in zip(found, alone, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(its), rtol=1e-6, atol=1e-9)


@pytest.mark.jobs
def test_a_model_that_is_evaluated_between_its_batches_trains():
    *_, ran = train(lambda model, _: model.train(), lambda model, _: model.eval())
    assert ran == list(range(12))


@pytest.mark.jobs
@pytest.mark.parametrize("length", few([1, 2, 4], 1, pytest.mark.jobs))
def test_a_loop_that_evaluates_after_an_epoch_and_calls_train_where_the_next_begins_trains(length):
    *_, ran = train(
        lambda model, batch: model.train() if batch.step % length == 0 else None,
        lambda model, job: model.eval() if job.steps % length == 0 else None,
    )
    assert ran == list(range(12))


def test_a_loop_that_calls_train_later_than_in_the_next_batch_is_refused():
    with pytest.raises(UsageError, match="the model is in evaluation mode"):
        train(
            lambda model, batch: model.train() if batch.step % 4 == 1 else None,
            lambda model, job: model.eval() if job.steps % 4 == 0 else None,
        )
