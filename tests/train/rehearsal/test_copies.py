"""Averages of weights in hooks of an optimizer, and collections of copies, are refused: no state of a job has them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from trueline.errors import UsageError
from trueline.train.elastic import Elastic

INPUTS = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
Kept = Callable[[nn.Module, list[Any]], object]


def train(hook: Kept = lambda *_: None, after: Kept = lambda *_: None) -> int:
    """Calls `hook` in a hook of the optimizer, and `after` after each step that was applied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.05), list[Any]()
    average = AveragedModel(model)
    moved = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer.register_step_post_hook(lambda *_: hook(model, [kept, average, moved]))
    job = Elastic(model, optimizer, TensorDataset(INPUTS, INPUTS.sum(dim=1, keepdim=True)), global_batch=24)
    for batch in job:
        if job.step((model(batch.inputs) - batch.labels).square().mean()):
            after(model, kept)
    return job.steps


def average(model: nn.Module, kept: list[Any]) -> None:
    kept[1].update_parameters(model)


def move(model: nn.Module, kept: list[Any]) -> None:
    with torch.no_grad():
        for name, value in model.named_parameters():
            kept[2][name].lerp_(value, 0.1)


def append(model: nn.Module, kept: list[Any]) -> None:
    kept[0].append(copy.deepcopy(model.state_dict()))


@pytest.mark.parametrize(
    ("hook", "words"),
    [(average, r"another module \(AveragedModel\)"), (move, "copy of the weights"), (append, "grows by copies")],
)
def test_averages_and_copies_of_weights_in_a_hook_of_the_optimizer_are_refused(hook, words):
    with pytest.raises(UsageError, match=f"in a hook of the optimizer the loop changes .*{words}") as refused:
        train(hook=hook)
    assert "Options(ema=" in str(refused.value.hint)


SNAPSHOTS: list[Kept] = [
    lambda model, kept: kept.append(copy.deepcopy(model.state_dict())),
    lambda model, kept: kept.append([value.detach().clone() for value in model.parameters()]),
    lambda model, kept: kept.append(nn.utils.parameters_to_vector(model.parameters()).detach()),
    lambda model, kept: kept.append(copy.deepcopy(model)),
]


@pytest.mark.jobs
@pytest.mark.parametrize("after", SNAPSHOTS, ids=["states", "lists", "vectors", "modules"])
def test_copies_of_weights_that_a_loop_collects_are_refused(after):
    with pytest.raises(UsageError, match="the loop's kept, a collection that grows by copies of the weights"):
        train(after=after)


def replace_best(model: nn.Module, kept: list[Any]) -> None:
    kept[:] = [copy.deepcopy(model.state_dict())]


def clamp(model: nn.Module, _: list[Any]) -> None:
    with torch.no_grad():
        for value in model.parameters():
            value.clamp_(-2, 2)


@pytest.mark.jobs
def test_one_copy_a_history_of_numbers_and_hooks_that_change_parameters_train():
    assert train(after=replace_best) == 4
    assert train(hook=lambda model, kept: kept[0].append(model[0].weight.norm().item())) == 4
    assert train(hook=clamp) == 4
