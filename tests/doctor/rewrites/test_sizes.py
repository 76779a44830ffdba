"""Lengths that values choose, and sizes that a branch chooses, become sizes that follow from the inputs' own."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.export import ask_capture
from trueline.doctor.patch import patch_module
from trueline.doctor.survey import Survey, survey

pytestmark = pytest.mark.slow
T = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([4, 1, 3])
WHOLE = "x[:, :{}]".format("x.shape[1]")
"""What the slice becomes: put together here, since the edited file is this one."""


class CutToTheLongest(nn.Module):
    """The mean of each record's own steps."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x[:, : int(lengths.max())]
        inside = torch.arange(x.shape[1])[None] < lengths[:, None]
        return (x * inside.unsqueeze(-1)).sum(1) / lengths.clamp(min=1).unsqueeze(-1)


class SumsToTheLongest(nn.Module):
    """What lies beyond the longest record is not 0, and would count."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return (x[:, : int(lengths.max())] + 1).sum(1)


class WholePeriods(nn.Module):
    """A length is filled up to whole periods, as TimesNet does it."""

    def forward(self, x: Tensor) -> Tensor:
        batch, n, width = x.shape
        if n % 3 != 0:
            whole = (n // 3 + 1) * 3
            filled = torch.cat([x, torch.zeros(batch, whole - n, width)], 1)
        else:
            whole = n
            filled = x
        return filled.reshape(batch, whole // 3, 3, width).mean(2)


class AtLeast(nn.Module):
    """One way leaves the size as it is."""

    def forward(self, x: Tensor) -> Tensor:
        n, least = x.shape[1], 8
        if n > least or n == 2:
            least = n
            x = F.pad(x, (0, 0, 0, least - n))
        return F.adaptive_avg_pool1d(x.transpose(1, 2), 1) * least


class Doubled(nn.Module):
    """Sums of twice as many at every step, whose slices may be longer than the whole."""

    def forward(self, x: Tensor) -> Tensor:
        n, step = x.shape[1], 1
        while step < n:
            x = x + torch.cat([torch.zeros_like(x[:, :step]), x[:, :-step]], 1)
            step *= 2
        return x


class Spread(nn.Module):
    """Rows and lengths in a list of a zip."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return torch.stack([r[:n].sum(0) - r[:n].mean(0) for r, n in zip(x, lengths.tolist(), strict=True)])


class Widest(nn.Module):
    """Of no steps there is no largest."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return torch.stack([r[:n].max(0).values for r, n in zip(x, lengths.tolist(), strict=True)])


def eager_of(model: nn.Module, *inputs: Tensor) -> EagerSession:
    given = inputs if len(inputs) > 1 else inputs[0]
    return EagerSession(copy.deepcopy(model), given, dynamic_shapes={"x": {1: "length"}})


def surveyed(model: nn.Module, *inputs: Tensor) -> Survey:
    return survey(model, calls_of(eager_of(model, *inputs)), onnx=None, base=Path(__file__).parent)


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("model", "example", "fresh"),
    [
        (CutToTheLongest(), (T, LENGTHS), (T[:2, :4], LENGTHS[1:])),
        (WholePeriods(), (T,), (torch.cat([T, T, T, T], 1)[:, :19],)),
        (AtLeast(), (T,), (torch.cat([T, T], 1)[:, :9],)),
        (Doubled(), (T,), (torch.cat([T, T, T, T], 1)[:, :19],)),
        (Spread(), (T, LENGTHS), (T[:2, :4], LENGTHS[1:] - torch.tensor([3, 0]))),  # one counts from the end
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, nn.Module) else "",
)
def test_a_size_that_a_value_or_a_branch_chooses_is_computed_from_the_inputs_sizes(
    model: nn.Module, example: tuple[Tensor, ...], fresh: tuple[Tensor, ...]
) -> None:
    found = surveyed(model.eval(), *example)
    row = found.rows["(model)"]
    assert row.rewrite is not None, row.why_not
    edited = patch_module(model, found.texts)
    for inputs in (example, fresh):
        torch.testing.assert_close(edited(*inputs), model(*inputs))


def test_the_largest_of_what_may_be_nothing_has_no_rewrite() -> None:
    """The model raises there, and a mask would answer with minus infinity."""
    assert surveyed(Widest(), T, LENGTHS).rows["(model)"].rewrite is None


def test_a_length_is_not_left_out_where_what_lies_beyond_counts() -> None:
    found = surveyed(SumsToTheLongest(), T, LENGTHS)
    assert not any(WHOLE in text for text in found.texts.values())


@pytest.mark.jobs
def test_a_length_is_not_left_out_where_every_call_has_the_whole_one() -> None:
    """No call shows what the edit changes."""
    model = CutToTheLongest()
    eager = eager_of(model, T, LENGTHS)
    calls = [call for call in calls_of(eager) if int(call.tensors[1].max()) >= call.tensors[0].shape[1]]
    found = survey(model, calls, onnx=None, base=Path(__file__).parent)
    assert not any(WHOLE in text for text in found.texts.values())


@pytest.mark.jobs
def test_a_model_that_capture_refuses_is_not_called_ready() -> None:
    calls = calls_of(eager_of(WholePeriods(), T))
    why = "capture's program leaves out an example"
    found = survey(WholePeriods(), calls, onnx=None, base=Path(__file__).parent, refuse=lambda edited: (why, None))
    row = found.rows["(model)"]
    assert row.status == "blocked"


class Filled(nn.Module):
    """A length is filled up to a multiple of 4, by nothing at the first example."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        return F.pad(x, (0, 0, 0, -n % 4)).cumsum(1)[:, :n]


@pytest.mark.jobs
@pytest.mark.parametrize(("kind", "why"), [(WholePeriods, "leaves out example 2"), (Filled, "")])
def test_a_program_that_leaves_out_an_example_is_refused_as_by_capture(kind: type[nn.Module], why: str) -> None:
    """What fills up a size is traced at the size of another example."""
    one, two = (3, 4) if kind is WholePeriods else (4, 5)
    eager = EagerSession(kind(), T[:, :one], others=[T[:, :two]], dynamic_shapes={"x": {1: "length"}})
    found, _ = ask_capture(eager, eager.module)
    assert why in found
    assert bool(found) is bool(why)
