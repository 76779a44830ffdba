"""Layers that a draw drops, or that begin to count later, train alike for any number of workers, with no setting."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trueline.train.elastic import Elastic
from trueline.train.step import trial
from trueline.train.step.options import Options
from trueline.train.step.plan import JobPlan
from worlds.groups import together

pytestmark = pytest.mark.slow

INPUTS = torch.randn(60, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
DATA = TensorDataset(INPUTS, INPUTS.sin().sum(dim=1, keepdim=True))
FEW = INPUTS[:, 0].topk(3).values[2].item()
"""Two records have more in their first column."""
DRAWS: list[Callable[[], float]] = [
    lambda: float(torch.rand(())),
    random.random,
    lambda: float(np.random.random()),
    lambda: torch.empty(3).uniform_()[1].item(),
]


class Dropped(nn.Module):
    """A layer that half of all forwards leave out."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self._draw = nn.Linear(6, 6), draw

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if self.training and self._draw() < 0.5 else inputs + self.layer(inputs)


class WithRare(nn.Module):
    """A model with a head that its forward does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.usual(inputs)
        return outputs


def run(draw: Callable[[], float], seed: int = 0, *, skips: bool = True) -> Any:
    def train() -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(Dropped(draw), Dropped(draw), nn.Linear(6, 1)).double()
        advance = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        job = Elastic(model, advance, DATA, global_batch=12, epochs=3, seed=seed)
        for batch in job:
            job.step((model(batch.inputs) - batch.labels).square().mean())
        assert (job.steps, job._traits.skips) == (15, skips)
        return [value.tolist() for value in model.parameters()]

    return train


@pytest.mark.jobs
def test_layers_that_are_dropped_at_random_train_alike_for_one_and_three_workers():
    runs = [run(draw) for draw in DRAWS]
    alone, three = [one() for one in runs], together(3, lambda: [one() for one in runs])
    for members in three:
        for found, expected in zip(members, alone, strict=True):
            for mine, its in zip(found, expected, strict=True):
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(its), rtol=1e-6, atol=1e-9)


def test_a_layer_that_only_a_later_step_uses_trains():
    torch.manual_seed(0)
    model = nn.ModuleDict({"usual": nn.Linear(6, 1), "later": nn.Linear(6, 1)}).double()
    job = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.02), DATA, global_batch=12, epochs=3)
    before = model["later"].weight.tolist()
    for batch in job:
        outputs = model["usual"](batch.inputs)
        outputs = outputs + model["later"](batch.inputs) if batch.step > 9 else outputs
        job.step((outputs - batch.labels).square().mean())
        assert batch.trial or (model["later"].weight.tolist() == before) == (job.steps <= 10)
    assert job.steps == 15


@pytest.mark.jobs
def test_a_part_of_the_model_that_the_loop_calls_for_few_records_trains_alike_for_one_and_three_workers():
    """`model(...)` does not show that the loss will use it."""

    def train() -> list[Any]:
        torch.manual_seed(0)
        model = WithRare().double()
        job = Elastic(model, torch.optim.Adam(model.parameters(), lr=0.02), DATA, global_batch=12, epochs=3)
        for batch in job:
            losses = (model(batch.inputs) - batch.labels).square()
            few = batch.inputs[:, :1] > FEW
            if few.any():
                losses = losses + few * model.rare(batch.inputs)
            job.step(losses.mean())
        assert (job.steps, job._traits.skips) == (15, True)
        return [value.tolist() for value in model.parameters()]

    alone = train()
    for members in together(3, train):
        for found, expected in zip(members, alone, strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=1e-9)


class Branches(nn.Module):
    """Its second half is left out of one step; `whole` calls the model, otherwise the loop calls its halves."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, inputs: Tensor, left_out: Tensor | bool) -> Tensor:
        outputs: Tensor = self.one(inputs)
        return outputs if left_out else outputs + self.other(inputs)


def train_branches(*, parts: bool, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    model = Branches().double()
    advance = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5)
    job = Elastic(model, advance, DATA, global_batch=12, epochs=3, options=Options(**options))
    for batch in job:
        out = batch.step == 8 and not batch.trial
        if parts:
            outputs = model.one(batch.inputs) if out else model.one(batch.inputs) + model.other(batch.inputs)
        else:
            outputs = model(batch.inputs, out)
        job.step((outputs - batch.labels).square().mean())
    assert (job.steps, job._traits.skips) == (15, False)
    return [value.tolist() for value in model.parameters()]


def plain_branches() -> list[Any]:
    torch.manual_seed(0)
    model, plan = Branches().double(), JobPlan(num_records=60, global_batch=12, epochs=3, seed=0)
    advance = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5)
    for step in range(15):
        inputs, labels = DATA[plan.records(step)]
        advance.zero_grad()
        (model(inputs, step == 8) - labels).square().mean().backward()
        advance.step()
    return [value.tolist() for value in model.parameters()]


@pytest.mark.jobs
@pytest.mark.parametrize("how", [{"parts": False}, {"parts": True}, {"parts": False, "bitwise": True},
                                 {"parts": True, "micro_batch": 3}], ids=str)  # fmt: skip
def test_parameters_that_one_step_leaves_out_are_those_of_a_plain_loop_for_one_and_three_workers(how):
    """No trial has seen that step. With gradients of zeros, weight decay and momentum would move them."""
    expected = plain_branches()
    for found in (*together(1, lambda: train_branches(**how)), *together(3, lambda: train_branches(**how))):
        for mine, its in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(its), rtol=1e-6, atol=1e-9)


@pytest.mark.jobs
def test_a_layer_that_no_trial_has_seen_left_out_trains(monkeypatch):
    monkeypatch.setattr(trial, "TOSSES", 0)
    run(lambda: 10 * DRAWS[0](), seed=3, skips=False)()  # one layer of twenty is left out, none in the trial


def weigh(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A mean over few of the records: NaN where a batch has none of them."""
    counts = labels > 0.6
    return ((outputs - labels).square() * counts).sum() / counts.sum(), counts.sum()


def weigh_plainly() -> list[Any]:
    torch.manual_seed(0)
    model, plan = Branches().double(), JobPlan(num_records=60, global_batch=12, epochs=3, seed=0)
    advance = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5)
    for step in range(15):
        inputs, labels = DATA[plan.records(step)]
        advance.zero_grad()
        weigh(model(inputs, step % 3 == 1), labels)[0].backward()
        advance.step()
    return [value.tolist() for value in model.parameters()]


@pytest.mark.jobs
@pytest.mark.parametrize("seen", [False, True], ids=["in a step alone", "in the trial too"])
def test_a_batch_without_weight_uses_what_its_loss_does_and_moves_nothing_else(seen):
    """Three records have often no weight. What the step leaves out is without a gradient then, too."""
    torch.manual_seed(0)
    model, empty = Branches().double(), 0
    advance = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5)
    job = Elastic(model, advance, DATA, global_batch=12, epochs=3, options=Options(micro_batch=3))
    for batch in job:
        out = batch.step % 3 == 1 and (seen or not batch.trial)
        loss, weight = weigh(model(batch.inputs, out), batch.labels)
        empty += not batch.trial and not weight
        job.step(loss, weight=weight)
    assert empty > 3
    assert (job.steps, job._traits.skips) == (15, seen)
    for mine, its in zip(model.parameters(), weigh_plainly(), strict=True):
        torch.testing.assert_close(mine.detach(), torch.tensor(its, dtype=mine.dtype), rtol=1e-6, atol=1e-9)
