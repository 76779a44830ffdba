"""A loop that draws from a generator of its own in a step that no trial has met ends before that step is applied; one
whose losses do not follow from what it draws trains."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trueline.errors import UsageError
from trueline.train.elastic import Elastic
from trueline.train.rehearsal import generators, places
from worlds.cases import few

INPUTS = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS.sum(dim=1, keepdim=True))
RARE = float(INPUTS[:, 3].sort().values[-2])
"""One record of these is above it."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def train(draw: Callable[[], float], *, epochs: int = 2, always: bool = False) -> int:
    """The steps of a loop that changes records by what it draws: the rare one, or none though it draws `always`."""
    model = make_model()
    job = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01), DATA, global_batch=8, epochs=epochs)
    for batch in job:
        inputs = batch.inputs.clone()
        if always:
            draw()
        elif not batch.trial:
            for at in range(len(inputs)):
                if inputs[at, 3] > RARE:
                    inputs[at] += draw()
        job.step((model(inputs) - batch.labels).square().mean())
    return job.steps


def draw_by_torch(own: torch.Generator) -> float:
    return float(torch.randn((), generator=own))


MADE: list[tuple[Callable[[], Any], Callable[[Any], float]]] = [
    (lambda: torch.Generator().manual_seed(5), draw_by_torch),
    (lambda: np.random.default_rng(5), lambda own: float(own.random())),
    (lambda: np.random.RandomState(5), lambda own: float(own.random())),
    (lambda: np.random.Generator(np.random.MT19937(5)), lambda own: float(own.random())),
    (lambda: random.Random(5), lambda own: own.random()),
]


@pytest.mark.parametrize(("make", "draw"), few(MADE, 1, pytest.mark.jobs))
def test_a_step_that_draws_from_a_generator_of_the_loops_own_ends_before_it_is_applied(
    make: Callable[[], Any], draw: Callable[[Any], float]
) -> None:
    own = make()
    with pytest.raises(UsageError, match=r"step \d+ draws from the loop's draw.own, a generator of its own"):
        train(lambda: draw(own))


@pytest.mark.jobs
@pytest.mark.parametrize(("make", "draw"), few(MADE, 1, pytest.mark.jobs))
def test_a_loop_whose_losses_do_not_follow_from_what_it_draws_trains(
    make: Callable[[], Any], draw: Callable[[Any], float]
) -> None:
    own = make()
    assert train(lambda: draw(own), always=True) == 30


class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Draws for the record `rare` from the second epoch on."""

    own = np.random.default_rng(5)

    def __init__(self, rare: int) -> None:
        self.rare, self.reads = rare, 0

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += index == self.rare
        noise = float(self.own.random()) if index == self.rare and self.reads > 10 else 0.0
        return INPUTS[index] + noise, INPUTS[index].sum(dim=0, keepdim=True)


def test_a_data_set_that_draws_from_a_generator_of_its_own_for_few_records_ends_before_the_step_is_applied() -> None:
    model, data = make_model(), Noisy(rare=77)
    with pytest.raises(UsageError, match=r"step \d+ draws from the loop's Noisy.own, a generator of its own"):
        read_all(model, data)


def read_all(model: nn.Module, data: Noisy) -> None:
    for batch in (job := Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01), data, global_batch=8, epochs=20)):
        job.step((model(batch.inputs) - batch.labels).square().mean())


def test_the_generators_of_the_process_are_none_of_the_loops_own() -> None:
    own = random.Random(1)
    room = {"torchs": torch.default_generator, "numpys": np.random.mtrand._rand, "own": own}
    assert generators.list_generators(make_model(), lambda: [("the loop's ", room)]) == {"the loop's own": own}
    assert not places.is_generator(random.SystemRandom())
    assert not places.is_generator(Tensor())
