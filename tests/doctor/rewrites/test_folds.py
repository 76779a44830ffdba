"""Folds over the steps of a tensor, loops whose number of steps a size bounds, and generators inside of others."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.survey import Survey, survey
from worlds.cases import few

pytestmark = pytest.mark.slow


class Reduced(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = functools.reduce(lambda one, other: torch.tanh(one + other), x.transpose(0, 1))
        return h * 2


class Begun(nn.Module):
    """With a beginning of its own."""

    def forward(self, x: Tensor) -> Tensor:
        start = torch.zeros_like(x[:, 0])
        return functools.reduce(lambda one, other: 0.5 * one + other.sin(), x.unbind(1), start)


class Smoothed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = itertools.accumulate(x.unbind(1), lambda one, other: 0.9 * one + 0.1 * other)
        return torch.stack(list(rows), 1)


class Deep(nn.Module):
    """As many layers as a size says, of those there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for k in range(min(4, x.shape[1] // 3)):
            x = torch.tanh(self.layers[k](x))
        return x


class First(Deep):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: x.shape[1] // 4]:
            x = torch.tanh(layer(x))
        return x


class Halving(nn.Module):
    """A number of steps that grows with the logarithm of a size, one at least."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(max(1, int(math.log2(x.shape[1])))):
            x = x + self.layer(x).tanh()
        return x


class Nested(nn.Module):
    """Means of pieces of three steps, by a generator inside of a generator."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [part.mean(1) for part in (x[:, at : at + 1] for at in range(x.shape[1]))]
        return torch.stack(parts, 1)


def examined(model: nn.Module) -> Survey:
    torch.manual_seed(0)
    eager = EagerSession(model.eval(), torch.randn(3, 6, 4), dynamic_shapes={"x": {1: "length"}})
    return survey(model, calls_of(eager), onnx=None, base=Path(__file__).parent)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Reduced, "is a loop"),
        (First, "takes all of its steps, masked"),
        *few([(Nested, "is one loop"), (Smoothed, "is a loop")], 0, pytest.mark.jobs),
        *few([(Begun, "is a loop"), *((kind, "takes all of its steps, masked") for kind in (Deep, Halving))], 0),
    ],
)
def test_a_fold_or_a_bounded_loop_is_rewritten_and_proven(model: type[nn.Module], words: str) -> None:
    row = examined(model()).rows["(model)"]
    assert row.status == "rewritten", row
    assert row.rewrite is not None
    assert words in " ".join(row.rewrite.steps)
    assert row.rewrite.probes >= 10
