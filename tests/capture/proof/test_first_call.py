"""A model that puts its weights within limits at each call is a function of its inputs; one that drifts is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.determinism import check_twice
from trueline.errors import CaptureError
from worlds import marks


class Weighs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class Clamps(Weighs):
    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data.clamp_(0, 1)
        found: Tensor = self.layer(x)
        return found


class Masks(Weighs):
    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data *= torch.ones(4, 4).tril()
        found: Tensor = self.layer(x)
        return found


class ClampsAfterwards(Weighs):
    """Its first answer is one that no later call gives."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        self.layer.weight.data.clamp_(0, 1)  # afterwards
        return found


class ClampsOnce(Weighs):
    ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.layer.weight.data.clamp_(0, 1)  # once
            self.ready = True
        found: Tensor = self.layer(x)
        return found


class TakesTheFirst(Weighs):
    def forward(self, x: Tensor) -> Tensor:
        if self.layer.weight.max() > 0:
            self.layer.weight.data.copy_(-x[:4].abs())  # the first
        found: Tensor = self.layer(x)
        return found


class ClampsByItsInput(Weighs):
    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data.clamp_(0, float(x.abs().max()))  # by its input
        found: Tensor = self.layer(x)
        return found


class ClampsFarByItsInput(Weighs):
    """At a limit that no weight is near, and that some inputs move among them."""

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data.clamp_(0, 20 + float(x.max()))  # far by its input
        found: Tensor = self.layer(x)
        return found


class NearsItsLimits(Weighs):
    """Each call moves weights a part of the way, which the signs that it answers do not show."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight.detach()
        nearer = weight.sign() * (0.1 + (weight.abs() - 0.1).floor() / 2)
        self.layer.weight.data.copy_(torch.where(weight.abs() > 0.1, nearer, weight))  # nears
        return (x.abs() @ weight[:1].abs().T).sign() + x


class Shrinks(Weighs):
    """By less than an answer shows."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.9999999)  # again
        found: Tensor = self.layer(x)
        return found


def open_eager(model: type[nn.Module]) -> EagerSession:
    torch.manual_seed(0)
    return EagerSession(model().eval(), torch.randn(4, 4))


@pytest.mark.parametrize("model", [Clamps, Masks])
def test_a_write_that_changes_nothing_after_the_first_call_is_no_reason_to_refuse(model: type[nn.Module]) -> None:
    eager = open_eager(model)
    kept = eager.module.layer.weight.detach().clone()
    assert eager.changed
    assert check_twice(eager) is None
    assert torch.equal(eager.module.layer.weight, kept)


@pytest.mark.parametrize(
    ("model", "mark"),
    [
        (ClampsAfterwards, "afterwards"),
        (ClampsOnce, "once"),
        (TakesTheFirst, "the first"),
        (ClampsByItsInput, "by its input"),
        (ClampsFarByItsInput, "far by its input"),
        (NearsItsLimits, "nears"),
    ],
)
def test_a_write_that_an_answer_depends_on_is_refused_with_its_line(model: type[nn.Module], mark: str) -> None:
    found = check_twice(open_eager(model))
    assert found is not None
    assert "the model changes itself when it is first called (layer.weight)" in found.why
    assert marks.place_of(__file__, mark) in str(found.place)


def test_weights_that_each_call_changes_are_said_to_change_again() -> None:
    found = check_twice(open_eager(Shrinks))
    assert found is not None
    assert "each call of the model changes its own weights again (layer.weight)" in found.why
    assert "leave the parameter as it is" in found.hint


def test_a_trace_that_fails_leaves_the_weights_as_they_were() -> None:
    eager = open_eager(Masks)
    kept = eager.module.layer.weight.detach().clone()
    with pytest.raises(CaptureError):
        torch_export.export(eager.module, eager.calling)
    assert torch.equal(eager.module.layer.weight, kept)


class ClampsTheRowsOfItsIds(nn.Module):
    """Other ids put other rows within limits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids: Tensor) -> Tensor:
        self.table.weight.data[ids] = self.table.weight.data[ids].clamp(-0.1, 0.1)  # rows of its ids
        found: Tensor = self.table(ids)
        return found


def test_limits_of_the_rows_that_whole_numbers_choose_are_refused() -> None:
    torch.manual_seed(0)
    found = check_twice(EagerSession(ClampsTheRowsOfItsIds().eval(), torch.tensor([[1, 2], [3, 4]])))
    assert found is not None
    assert "the model changes itself when it is first called (table.weight)" in found.why
    assert marks.place_of(__file__, "rows of its ids") in str(found.place)
