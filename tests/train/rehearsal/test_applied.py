"""What a loop does after a step that was applied, and a worker that joins would not do, is refused before the first
step; what only looks does not disturb it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from trueline.errors import UsageError
from trueline.train.elastic import Elastic

pytestmark = pytest.mark.slow

RECORDS = 48


class World:
    """A loop of a user's own, which calls `after` for each step that was applied; `loss` may use what that keeps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.inputs = torch.randn(RECORDS, 4, dtype=torch.float64)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.advance = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.kept: Any = 0.0
        self.applied = 0

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return ((outputs - batch.labels) ** 2).mean()

    def train(self, after: Callable[[World], object], **given: Any) -> None:
        data = TensorDataset(self.inputs, self.inputs.sin().sum(dim=1, keepdim=True))
        for batch in (job := Elastic(self.model, self.advance, data, global_batch=12, **given)):
            if job.step(self.loss(self.model(batch.inputs), batch)):
                self.applied += 1
                after(self)


class Uses(World):
    """Its loss uses what the loop keeps."""

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return super().loss(outputs, batch) + 0.1 * ((outputs - self.kept) ** 2).mean()


def clamp(world: World) -> None:
    for value in world.model.parameters():
        value.data.clamp_(-100, 100)  # beyond all that these parameters ever are


def average(world: World) -> None:
    for mine, its in zip(world.kept.parameters(), world.model.parameters(), strict=True):
        mine.data.mul_(0.9).add_(its.data, alpha=0.1)


def average_tensors(world: World) -> None:
    world.kept.update({name: 0.9 * world.kept[name] + 0.1 * value for name, value in world.model.state_dict().items()})


def slow_down(world: World) -> None:
    for group in world.advance.param_groups:
        group["lr"] *= 0.9


def count(world: World) -> None:
    world.kept += 1


@pytest.mark.parametrize(
    ("make", "keep", "after", "why", "act"),
    [
        (World, None, clamp, "changes parameters itself after a step", "the step"),
        (World, AveragedModel, lambda world: world.kept.update_parameters(world.model), "AveragedModel", "ema="),
        (World, copy.deepcopy, average, r"another module \(Sequential\)", "JointOptimizer"),
        (World, lambda model: dict(copy.deepcopy(model.state_dict())), average_tensors, "copy of the weights", "ema="),
        (World, None, slow_down, "sets the optimizer's numbers", "batch.step"),
        (Uses, lambda model: 0, count, "the loss of the same records is .* instead of", "batch.step or job.steps"),
        (Uses, lambda _: torch.zeros(()), lambda world: world.kept.copy_(world.inputs.mean()), "instead of", "buffer"),
    ],
    ids=["clamp", "swa", "second model", "tensors", "rate", "counter", "tensor"],
)  # fmt: skip
def test_what_a_worker_that_joins_would_not_have_is_refused_before_the_first_step(make, keep, after, why, act):
    world = make()
    world.kept = keep(world.model) if keep else None
    with pytest.raises(UsageError, match=why) as refused:
        world.train(after)
    assert (world.applied, act in refused.value.hint) == (0, True)


def test_a_scheduler_that_the_job_does_not_have_is_refused_and_given_ones_train_with_their_parts():
    world = World()
    own = lr_scheduler.StepLR(world.advance, 100)
    with pytest.raises(UsageError, match="has a scheduler that was not given to the job"):
        world.train(lambda _: own.step())
    world = World()
    parts = [lr_scheduler.ConstantLR(world.advance, 0.5, 2), lr_scheduler.ExponentialLR(world.advance, 0.9)]
    given = lr_scheduler.SequentialLR(world.advance, parts, [2])
    world.train(lambda _: None, scheduler=given)
    assert world.applied == RECORDS // 12


def test_a_loop_that_keeps_its_best_weights_writes_files_evaluates_and_counts_trains_and_leaves_no_trace_of_the_trial(
    tmp_path,
):
    """What it keeps does not come back into the steps."""
    losses = []

    def look(world: World) -> None:
        world.kept = copy.deepcopy(world.model.state_dict())
        with torch.no_grad():
            losses.append(float(world.model.eval()(world.inputs).mean()))
        world.model.train()
        torch.save(world.kept, tmp_path / f"{world.applied}.pt")
        with (tmp_path / "losses.csv").open("a") as file:
            file.write(f"{losses[-1]}\n")

    world = World()
    world.train(look)
    assert len(losses) == world.applied == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.pt", "2.pt", "3.pt", "4.pt", "losses.csv"]
    assert (tmp_path / "losses.csv").read_text().count("\n") == 4
    assert max(abs(loss) for loss in losses) < 100, "no evaluation saw the trial's odd weights"


def test_parameters_that_are_thawed_or_added_later_end_the_job_before_that_step():
    for turn, why in ((True, "thaws parameters in step 2"), (False, "freezes parameters in step 2")):
        world = World()
        world.model[0].requires_grad_(not turn)
        with pytest.raises(UsageError, match=why):
            world.train(lambda world, turn=turn: world.model[0].requires_grad_(turn) if world.applied == 2 else None)
        assert world.applied == 2
    world = World()
    world.advance = torch.optim.SGD(world.model[2].parameters(), lr=0.05)
    group = {"params": list(world.model[0].parameters()), "lr": 0.01}
    with pytest.raises(UsageError, match="changes the parameter groups of the optimizer in step 2"):
        world.train(lambda world: world.advance.add_param_group(group) if world.applied == 2 else None)
