"""A share of a size, rounded by Python's own ceil, floor or round, goes into a file and comes back as it was."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export.torch_export import emit, export
from trueline.capture.model.eager import EagerSession
from trueline.runtime.torch_export import load


class Share(nn.Module):
    """The first so many steps, rounded up and down, of steps before and after nought."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        length = x.shape[1]
        up, down = math.ceil(0.5 * length), math.floor(0.3 * length)
        before = math.floor(-0.5 * length) + math.ceil(-0.3 * length)
        return x[:, :up] * 2, x * (torch.arange(length) < down) + before


class Nearest(nn.Module):
    """Half to even: 0.5, 1.5 and 2.5 become 0, 2 and 2, and so do their negatives."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        length = x.shape[1]
        return x * (torch.arange(length) < round(0.5 * length)), x + round(-0.5 * length) + round(length / 3)


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[nn.Module], tuple[str, str, nn.Module]]:
    """Writes a model's program, once for all lengths: its graph before and after that, and what was written."""

    @functools.cache
    def write_program(model: nn.Module) -> tuple[str, str, nn.Module]:
        eager = EagerSession(model, torch.randn(3, 9), dynamic_shapes={"x": {1: "length"}})
        exported = export(eager.module, eager.calling)
        before = str(exported.program.graph)
        program = load(emit(exported, tmp_path_factory.mktemp("written"))).module(check_guards=False)
        return before, str(exported.program.graph), program

    return write_program


@pytest.mark.parametrize("model", [Share(), Nearest()])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9, 10])
def test_a_rounded_share_of_a_size_is_the_same_after_it_was_written(
    write: Callable[[nn.Module], tuple[str, str, nn.Module]], model: nn.Module, length: int
) -> None:
    before, after, program = write(model)
    assert after == before
    x = torch.randn(2, length)
    for found, expected in zip(program(x), model(x), strict=True):
        assert torch.equal(found, expected)
