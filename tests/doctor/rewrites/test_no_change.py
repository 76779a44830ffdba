"""What a rewrite leaves out, or runs always, changes nothing at any values: the statements say so, not the calls.

The models below answer every call of the doctor alike with and without the rewrite, and differently beyond.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.patch import patch_module
from trueline.doctor.survey import survey

pytestmark = pytest.mark.slow

FAR = 1e7


class SkipsOfRecords(nn.Module):
    """The step also bounds what the earlier ones gave."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]))
            out = out - torch.relu(x.amax() - 1e6)
        return out


class Forgets(nn.Module):
    """With a mask it bounds the scores too."""

    def forward(self, x: Tensor) -> Tensor:
        mask: Tensor | None = x[..., 0] > 0
        if not mask.any():
            mask = None
        scores = x.sum(-1)
        if mask is not None:
            scores = scores.masked_fill(mask, 0.0).clamp(min=-1e6)
        return scores


class ForgetsFew(nn.Module):
    """It drops a mask of few places too, which no call has."""

    def forward(self, x: Tensor) -> Tensor:
        mask: Tensor | None = x[..., 0] < -1e6
        few = x[..., 0] < 0
        if not (few & (x[..., 1] < 1e6)).any():
            mask = None
        scores = x.sum(-1)
        if mask is not None:
            scores = scores.masked_fill(mask, 0.0)
        return scores


class PadsAndBounds(nn.Module):
    """What is filled up is bounded too."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n % 4:
            x = F.pad(x, (0, 0, 0, 4 - n % 4))
            x = x.clamp(max=1e6)
        return x.unflatten(1, (-1, 4)).mean(2)


class ChoosesAndBounds(nn.Module):
    """The other way leaves large values as they are."""

    def forward(self, x: Tensor) -> Tensor:
        batch, n, width = x.shape
        if n % 3 != 0:
            whole = (n // 3 + 1) * 3
            x = F.pad(x, (0, 0, 0, whole - n)).clamp(max=1e6)
        else:
            whole = n
        return x.reshape(batch, whole // 3, 3, width).mean(2)


class LosesTheOtherWay(nn.Module):
    """The other way does something of its own."""

    def forward(self, x: Tensor) -> Tensor:
        batch, n, width = x.shape
        if n % 3 != 0:
            whole = (n // 3 + 1) * 3
            x = F.pad(x, (0, 0, 0, whole - n))
        else:
            whole = n
            x = x.clamp(max=1e6)
        return x.reshape(batch, whole // 3, 3, width).mean(2)


class FillsAndBounds(nn.Module):
    """Places under a mask are filled, and what is large elsewhere too."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        gone = x[..., 0] > 0
        if gone.any():
            x[gone] = 0.0
            x[:, 0].clamp_(min=-1e6)
        return x * 2


class ScalesSteps(nn.Module):
    """Each step by its own largest value, where that is large."""

    def forward(self, x: Tensor) -> Tensor:
        steps = []
        for t in range(x.shape[1]):
            steps.append(x[:, t] / x[:, t].abs().amax().clamp(min=1e6))
        return torch.stack(steps, 1) * 1e6


class ScalesMasked(nn.Module):
    """What a mask selects by the largest of that, where it is large."""

    def forward(self, x: Tensor) -> Tensor:
        out, mask = torch.zeros_like(x), x > 0.5
        if x.shape[1] > 1:
            for _ in range(2):
                out[mask] = x[mask] / x[mask].abs().sum().clamp(min=1e6) * 1e6
        else:
            out[mask] = x[mask]
        return out


class ScalesPlaces(nn.Module):
    """Each record under a mask by its own largest value, where that is large."""

    def forward(self, x: Tensor) -> Tensor:
        out, mask = torch.zeros_like(x), x[:, 0] > 0
        for i in mask.nonzero().flatten().tolist():
            out[i] = x[i] / x[i].abs().amax().clamp(min=1e6) * 1e6
        return out


class EndsEarly(nn.Module):
    """The mean of as many steps as there were."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        steps = [x]
        for layer in self.layers:
            x = layer(x).relu()
            if x.amax() > 1e4:
                break
            steps.append(x)
        return torch.stack(steps).mean(0)


class CutsToTheLargest(nn.Module):
    """Large values beyond the cut would count."""

    def forward(self, x: Tensor) -> Tensor:
        length = (x[..., 0] > 0).sum(1).max()
        cut = x[:, : int(length)]
        return torch.relu(cut - 1e6).sum(1) + x.mean(1)


class KeepsLarge(nn.Module):
    """What is kept for a length tells whether the first values were large."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n not in self.kept:
            self.kept[n] = torch.arange(n)[:, None] + torch.relu(x.amax() - 1e6)
        return x + self.kept[n]


class Suppresses(nn.Module):
    """It ends once a fixed number of boxes is kept."""

    def forward(self, x: Tensor) -> Tensor:
        order, keep = x[:, 0].argsort(descending=True), []
        while order.numel() > 0:
            i = order[0]
            keep.append(i)
            if len(keep) == 80:
                break
            rest = order[1:]
            order = rest[(x[rest, 1] - x[i, 1]).abs() > 1e-4]
        return x[torch.stack(keep)]


class FewerRows(nn.Module):
    """The mean of all records where one is large, which torch.where broadcasts."""

    def forward(self, x: Tensor) -> Tensor:
        y = x if x.abs().max() < 1e6 else x.mean(0, keepdim=True)
        return y * 2


class WholeNumbers(nn.Module):
    """Whole numbers where one is large, which torch.where promotes."""

    def forward(self, x: Tensor) -> Tensor:
        y = x
        if x.abs().max() > 1e6:
            y = x.round().long()
        return y * 2


class ReturnsASum(nn.Module):
    """One number where one is large."""

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 1e6:
            return x.sum()
        return x * 2


def answers(model: nn.Module, x: Tensor) -> tuple[str, nn.Module]:
    """Steps of the rewrite of `model`, and the model with it."""
    torch.manual_seed(0)
    eager = EagerSession(model.eval(), x, dynamic_shapes={"x": {1: "length"} if x.ndim == 3 else {}})
    found = survey(model, calls_of(eager), onnx=None, base=Path(__file__).parent)
    row = found.rows["(model)"]
    return " ".join(row.rewrite.steps if row.rewrite else ()), patch_module(model, found.texts)


def far(*shape: int) -> list[Tensor]:
    """Inputs in which some values, or all, are large."""
    some = torch.randn(*shape)
    some.view(-1)[::5] = FAR
    one = torch.randn(*shape)
    one.view(-1)[-1] = FAR
    return [some, -some, some.abs(), -some.abs(), one, torch.full(shape, FAR), torch.full(shape, -FAR)]


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (SkipsOfRecords, ((5, 4), (1, 4), (9, 4))),
        (Forgets, ((3, 6, 4), (1, 2, 4), (2, 8, 4))),
        (ForgetsFew, ((3, 6, 4), (1, 2, 4), (2, 8, 4))),
        (PadsAndBounds, ((3, 6, 4), (1, 8, 4), (2, 4, 4))),
        (ChoosesAndBounds, ((3, 6, 4), (1, 7, 4), (2, 9, 4))),
        (LosesTheOtherWay, ((3, 6, 4), (1, 7, 4), (2, 9, 4))),
        (FillsAndBounds, ((3, 6, 4), (1, 2, 4), (2, 8, 4))),
        (ScalesSteps, ((3, 6, 4), (1, 2, 4), (2, 8, 4))),
        (ScalesMasked, ((3, 6, 4), (1, 2, 4), (2, 8, 4))),
        (ScalesPlaces, ((5, 4), (2, 4), (9, 4))),
        (EndsEarly, ((5, 4), (2, 4), (9, 4))),
        (CutsToTheLargest, ((3, 6, 4), (1, 2, 4), (2, 8, 4))),
        (FewerRows, ((3, 6, 4), (2, 2, 4), (2, 8, 4))),
        (WholeNumbers, ((3, 6, 4), (1, 2, 4), (2, 8, 4))),
        (ReturnsASum, ((3, 6, 4), (1, 2, 4), (2, 8, 4))),
        (KeepsLarge, ((3, 6, 4), (1, 2, 4), (2, 8, 4))),
    ],
)
def test_a_rewrite_answers_as_the_model_does_where_no_call_was(
    model: type[nn.Module], shapes: tuple[tuple[int, ...], ...]
) -> None:
    original = model()
    _, edited = answers(original, torch.randn(*shapes[0]))
    for shape in shapes:
        for x in far(*shape):
            with torch.no_grad():
                torch.testing.assert_close(edited(x.clone()), original(x.clone()))


def test_a_loop_that_ends_at_a_count_ends_there() -> None:
    original = Suppresses()
    _, edited = answers(original, torch.rand(9, 4))
    x = torch.rand(120, 4)
    assert len(edited(x)) == len(original(x)) == 80
