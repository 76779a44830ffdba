"""Whether a program may write into a buffer is told from its graph; where that is not sure, it may."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export.operators import may_write_buffers
from trueline.capture.export.tracing import tracing


class Sums(nn.Module):
    total: Tensor

    def __init__(self, way: Callable[[Sums, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def exported(way: Callable[[Sums, Tensor], Tensor]) -> torch.export.ExportedProgram:
    with tracing():
        return torch.export.export(Sums(way).eval(), (torch.randn(3, 4),), strict=False)


def written(program: torch.export.ExportedProgram) -> dict[str, str]:
    with tracing():
        return dict(program.run_decompositions({}).graph_signature.buffers_to_mutate)


def renewed(model: Sums, x: Tensor) -> Tensor:
    model.total = model.total + x.sum(0)
    return x


def in_a_copy(model: Sums, x: Tensor) -> Tensor:
    mine = model.total.clone()
    mine[1:].add_(1)
    return x + mine


@pytest.mark.parametrize(
    "way",
    [
        lambda model, x: x + model.total.add_(1),
        lambda model, x: x + model.total[1:].zero_().sum(),
        lambda model, x: x + model.total.reshape(2, 2).add_(1).sum(),
        lambda model, x: x + model.total.contiguous().add_(1),
        lambda model, x: x + model.total.split(2)[0].add_(1).sum(),
        lambda model, x: nn.functional.batch_norm(x, model.total, model.total + 1, training=True),
        renewed,
    ],
    ids=["itself", "a view", "reshaped", "contiguous", "a part of it", "statistics", "renewed"],
)
def test_a_program_that_writes_a_buffer_is_known_for_it(way: Callable[[Sums, Tensor], Tensor]) -> None:
    program = exported(way)
    assert written(program)
    assert may_write_buffers(program)


@pytest.mark.parametrize(
    "way",
    [
        lambda model, x: model.norm(x).relu().reshape(-1),
        lambda model, x: torch.tensor([1.0, 2.0, 3.0, 4.0]) + x,
        in_a_copy,
    ],
    ids=["statistics that are kept", "a constant", "a copy"],
)
def test_a_program_that_writes_what_it_made_itself_writes_no_buffer(way: Callable[[Sums, Tensor], Tensor]) -> None:
    program = exported(way)
    assert not written(program)
    assert not may_write_buffers(program)
