"""A number of an input that the claim holds at one value may choose what a trace keeps, and no other number may."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.errors import NotProven, RequestError
from trueline.runtime.open import open_program
from worlds.cases import few
from worlds.recipes import untrained

pytestmark = pytest.mark.slow
RARE = 777.0
"""A number that no probe holds."""


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        answer: Tensor = self.heads[int(task.item())](x)
        return answer


class Scales(Heads):
    """A dict, by a number in another dtype."""

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        return x * {0: 0.5, 1: 2.0, 2: -1.0, 3: 4.0}[task.int().squeeze().item()]  # type: ignore[index]


class OneOfAList(Heads):
    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        return x * [0.5, 2.0, -1.0, 4.0][task.tolist()]


@pytest.mark.jobs
@pytest.mark.parametrize("kind", few([Heads, Scales, OneOfAList], 1, pytest.mark.jobs))
def test_a_part_that_an_input_chooses_is_sealed_for_that_value_alone(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example = kind().eval(), (torch.randn(3, 4), torch.tensor(2))
    bundle = open_bundle(capture(untrained(lambda: model, examples=lambda: example), None, tmp_path / "b").path)
    program = open_program(bundle)
    for batch in (1, 3, 70):
        x = torch.randn(batch, 4)
        (found,) = program.run({"x": x.numpy(), "task": np.array(2)}).values()
        np.testing.assert_allclose(found, model(x, torch.tensor(2)).detach().numpy(), rtol=1e-5, atol=1e-6)
    for task in (0, 1, 3, -1):
        with pytest.raises(RequestError, match="proven only for values that are 2"):
            program.run({"x": x.numpy(), "task": np.array(task)})


class ByAnotherTooRarely(Heads):
    """The number follows from `x` too."""

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        return super().forward(x, task - (x == RARE).any().long())


class WritesIntoIt(Heads):
    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        task.data.sub_((x == RARE).any().long())
        return super().forward(x, task)


class WritesByNumpy(Heads):
    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        memory = task.numpy()
        memory -= np.any(x.numpy() == np.float32(RARE))
        return super().forward(x, task)


class AddsASize(Heads):
    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        return super().forward(x, task - torch.tensor(int(len(x) == RARE)))


@pytest.mark.parametrize("kind", few([ByAnotherTooRarely, WritesIntoIt, WritesByNumpy, AddsASize], 1, pytest.mark.jobs))
def test_a_number_that_follows_from_more_than_that_input_is_not_frozen(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example = kind().eval(), (torch.randn(3, 4), torch.tensor(2))
    with pytest.raises(NotProven, match=r"test_fixed_inputs\.py:"):
        capture(untrained(lambda: model, examples=lambda: example), None, tmp_path / "b")
