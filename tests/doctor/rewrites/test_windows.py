"""Lists of the last few tensors, lists of places and elements that values name become tensors, right at every size."""

from __future__ import annotations

import collections
import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.patch import patch_module
from trueline.doctor.survey import survey

pytestmark = pytest.mark.slow


class Popped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        window, out = [], []
        for t in range(x.shape[1]):
            window.append(x[:, t])
            if len(window) > 4:
                window.pop(0)
            out.append(sum(window) / len(window) + window[0] - window[-1])
        return torch.stack(out, 1)


class PoppedFirst(nn.Module):
    """Four at most, as one is taken out before one is appended."""

    def forward(self, x: Tensor) -> Tensor:
        window, out = [], []
        for row in x.unbind(1):
            if len(window) == 4:
                window.pop(0)
            window.append(row)
            out.append(torch.stack(window, 1).mean(1))
        return torch.stack(out, 1)


class Deque(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        window = collections.deque(maxlen=3)
        h, out = torch.zeros_like(x[:, 0]), []
        for row in x.unbind(1):
            h = torch.tanh(row + 0.5 * h)
            window.append(h)
            out.append(torch.stack(list(window)).amax(0) - torch.stack(tuple(window)).min(0).values)
        return torch.stack(out, 1)


class LastOfAll(nn.Module):
    """The list itself is an answer too."""

    def forward(self, x: Tensor) -> Tensor:
        seen, out = [], []
        for t in range(x.shape[1]):
            seen.append(x[:, t] * 2)
            recent = seen[-3:]
            out.append(sum(recent) / len(recent))
        return torch.stack(out, 1) + torch.stack(seen, 1)


class Seasons(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        season = [x[:, i] * 0.1 for i in range(3)]
        out = []
        for t in range(x.shape[1]):
            s = season[t % 3]
            season[t % 3] = 0.5 * s + x[:, t]
            out.append(s + season[(t + 1) % 3])
        return torch.stack(out, 1) + season[x.shape[1] % 3][:, None]


class TakenBetween(nn.Module):
    """Five while the mean is taken, which no window of four holds."""

    def forward(self, x: Tensor) -> Tensor:
        window, out = [], []
        for t in range(x.shape[1]):
            window.append(x[:, t])
            out.append(sum(window) / len(window))
            if len(window) > 4:
                window.pop(0)
        return torch.stack(out, 1)


class Spans(nn.Module):
    """The ends of a span in each record, as numbers."""

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for b in range(x.size(0)):
            start = int(x[b, 0, 0].abs() * 2)
            end = start + int(x[b, 0, 1].abs()) + 1
            at = min(start, x.size(1) - 1)
            out.append(torch.cat([x[b, at], x[b, min(end, x.size(1)) - 1]]))
        return torch.stack(out)


class Depths(nn.Module):
    """Each record ends at a depth of its own, which is an answer too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.halt = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, depths = [], []
        for row in x:
            depth = 0
            while depth < 5:
                row = torch.tanh(self.layer(row))
                depth += 1
                if torch.sigmoid(self.halt(row)).item() > 0.5:
                    break
            rows.append(row)
            depths.append(depth)
        return torch.stack(rows), torch.tensor(depths)


def steps_and_edited(model: nn.Module, x: Tensor) -> tuple[str, nn.Module]:
    """Steps of the rewrite of `model`, and the model with it."""
    eager = EagerSession(copy.deepcopy(model).eval(), x, dynamic_shapes={"x": {1: "length"} if x.ndim == 3 else {}})
    found = survey(model.eval(), calls_of(eager), onnx=None, base=Path(__file__).parent)
    row = found.rows["(model)"]
    return " ".join(row.rewrite.steps if row.rewrite else ()), patch_module(model, found.texts)


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Popped, "the last 4 elements of `window` are a tensor"),
        (PoppedFirst, "the last 4 elements of `window` are a tensor"),
        (Deque, "the last 3 elements of `window` are a tensor"),
        (LastOfAll, "the last 3 elements of `seen` are a tensor"),
        (Seasons, "the places of `season` are a tensor"),
        (Spans, "stays a tensor"),
        (Depths, "in a plainer form"),
    ],
)
def test_a_short_list_of_a_loop_becomes_a_tensor_and_answers_at_every_length(kind: type[nn.Module], words: str) -> None:
    torch.manual_seed(0)
    model = kind()
    shapes = [(3, 4)] if kind is Depths else [(3, 7, 4), (2, 3, 4), (1, 4, 4), (4, 12, 4)]
    steps, edited = steps_and_edited(model, torch.randn(*shapes[0]))
    assert words in steps
    for shape in [*shapes, (1, *shapes[0][1:])]:
        x = torch.randn(*shape)
        with torch.no_grad():
            torch.testing.assert_close(edited(x), model(x))


def test_a_window_that_is_read_before_it_is_cut_is_left_as_it_is() -> None:
    assert "elements of `window`" not in steps_and_edited(TakenBetween(), torch.randn(3, 7, 4))[0]
