"""A loop over the parts of a tensor is taken as one, where its statements say that each row is treated by itself."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.patch import patch_module
from trueline.doctor.rewrites.loops.whole_parts import take_whole
from trueline.doctor.rewrites.scope import Scope, Spot
from trueline.doctor.survey import Survey, survey
from worlds.cases import few


class Attends(nn.Module):
    """Attention, two queries at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        outs = []
        for part in q.split(2, dim=1):
            w = (part @ k.transpose(1, 2) / 2.0).softmax(-1)
            outs.append(w @ v)
        return torch.cat(outs, 1)


class Zipped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows, y = [], x.exp()
        for one, other in zip(torch.split(x, 3, 1), y.split(3, 1), strict=True):
            rows.append(one.tanh() * other)
        return torch.cat(rows, dim=1)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(part).relu() for part in x.chunk(5, dim=1)], dim=1)


class OverAPart(nn.Module):
    """Each part is a distribution."""

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for part in x.split(2, dim=1):
            rows.append(part.softmax(1))
        return torch.cat(rows, dim=1)


class Carries(nn.Module):
    """A part counts with the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        rows, last = [], torch.zeros(())
        for part in x.split(2, dim=1):
            scaled = part * (last + 1.0)
            last = torch.ones(())
            rows.append(scaled)
        return torch.cat(rows, dim=1)


class JoinsAnotherWay(nn.Module):
    """Parts one below the other."""

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for part in x.split(2, dim=1):
            rows.append(part * 2)
        return torch.cat(rows, dim=0)


class CallsItsOwn(nn.Module):
    """A method with the name of an operator."""

    def add(self, part: Tensor) -> Tensor:
        return part - part.mean(1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for part in x.split(2, dim=1):
            rows.append(self.add(part))
        return torch.cat(rows, dim=1)


def surveyed(kind: type[nn.Module]) -> tuple[nn.Module, Survey]:
    torch.manual_seed(0)
    model = kind().eval()
    eager = EagerSession(copy.deepcopy(model), torch.randn(3, 5, 4), dynamic_shapes={"x": {1: "length"}})
    return model, survey(model, calls_of(eager), onnx=None, base=Path(__file__).parent)


@pytest.mark.slow
@pytest.mark.parametrize("kind", few([Attends, Zipped, Listed], 2, pytest.mark.jobs))
def test_parts_are_taken_as_one_and_the_answer_is_the_same_at_sizes_of_many_parts(kind: type[nn.Module]) -> None:
    model, done = surveyed(kind)
    row = done.rows["(model)"]
    assert row.rewrite is not None, row.why_not
    assert "takes the parts as one" in row.rewrite.steps[0]
    edited = patch_module(model, done.texts)
    for batch, length in ((1, 1), (2, 7), (4, 200)):
        x = torch.randn(batch, length, 4)
        torch.testing.assert_close(edited(x), model(x))


@pytest.mark.parametrize("kind", [OverAPart, Carries, JoinsAnotherWay, CallsItsOwn])
def test_parts_that_know_of_one_another_are_left_as_they_are(kind: type[nn.Module]) -> None:
    """Whatever the calls of the proof would show."""
    text = textwrap.dedent(inspect.getsource(kind.forward))
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    scope = Scope(text=text, function=function, seen={"x": torch.randn(3, 6, 4), "self": kind()})
    loop = next(at for at, one in enumerate(function.body) if isinstance(one, ast.For))
    assert not [*take_whole(scope, Spot(block=function.body, index=loop, outer=()))]
