"""Loops over pairs of positions, sums over a size, and branches that append or pad become one expression."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.patch import patch_module
from trueline.doctor.survey import survey
from worlds.cases import few

pytestmark = pytest.mark.slow


class Products(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for i in range(x.shape[1]):
            for j in range(x.shape[1]):
                rows.append((x[:, i] * x[:, j]).sum(-1))
        return torch.stack(rows, 1)


class Distances(nn.Module):
    """Each pair once; of one position there is none."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        total = x.new_zeros(x.shape[0])
        for i in range(n):
            for j in range(i + 1, n):
                total = total + (x[:, i] - x[:, j]).abs().sum(-1)
        return total


class Listed(nn.Module):
    """Each pair once, and each position with itself."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        rows = [(x[:, i] - 2 * x[:, j]).sum(-1) for i in range(n) for j in range(i, n)]
        return torch.stack(rows, 1)


class Combined(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(x.shape[0], 4)
        for i, j in itertools.combinations(range(x.shape[1]), 2):
            total = total + x[:, i] * x[:, j]
        return total


class Weighted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sum(x[:, i] * 0.5**i for i in range(x.shape[1]))


class Kinds(nn.Module):
    """One way of three for each record."""

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for row in x:
            if row.sum() > 3:
                rows.append(row * 2)
            elif row.sum() > 0:
                rows.append(row + 1)
            else:
                rows.append(-row)
        return torch.stack(rows)


class Padded(nn.Module):
    """At least eight steps."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n < 8:
            x = F.pad(x, (0, 0, 0, 8 - n))
        return x.cumsum(1)[:, 7:]


@pytest.mark.parametrize(
    "kind", [*few([Padded, Distances, Listed, Combined, Weighted, Kinds], 1), *few([Products], 0, pytest.mark.jobs)]
)
def test_the_rewrite_answers_as_the_model_does_at_sizes_that_it_never_saw(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    eager = EagerSession(copy.deepcopy(model), torch.randn(3, 5, 4), dynamic_shapes={"x": {1: "length"}})
    done = survey(model, calls_of(eager), onnx=None, base=Path(__file__).parent)
    row = done.rows["(model)"]
    assert row.rewrite is not None, row.why_not
    edited = patch_module(model, done.texts)
    for batch, length in ((1, 2), (2, 11), (4, 40)):
        x = torch.randn(batch, length, 4)
        torch.testing.assert_close(edited(x), model(x))
