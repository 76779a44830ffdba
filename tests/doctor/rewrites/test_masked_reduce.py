"""Sets, spans and segments, numbers of a request, and what a `try` catches are rewritten where that is honest."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.patch import patch_module
from trueline.doctor.survey import Survey, survey
from worlds.cases import few

pytestmark = pytest.mark.slow
LENGTHS = torch.tensor([4, 1, 3])


class SetMeans(nn.Module):
    def forward(self, x: Tensor, group: Tensor) -> Tensor:
        means = []
        for g in range(3):
            rows = x[group == g]
            if len(rows) > 0:
                means.append(rows.mean(0))
            else:
                means.append(torch.zeros(4))
        return torch.stack(means)


class AboveMean(nn.Module):
    """The loop stands around a part that has a name, and is asked three things."""

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for row in x:
            high = row[row > row.mean()]
            found.append(high.max() - high.min() if high.numel() else row.sum())
        return torch.stack(found)


class Windows(nn.Module):
    """The last window may be shorter."""

    def forward(self, x: Tensor) -> Tensor:
        means = []
        for s in range(0, x.shape[1], 3):
            means.append(x[:, s : s + 3].mean(1))
        return torch.stack(means, 1)


class SpanMeans(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return torch.stack([x[i, :n].sum(0) / math.sqrt(max(n, 1)) for i, n in enumerate(lengths.tolist())])


class LastSteps(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return torch.stack([x[i, n - 1] for i, n in enumerate(lengths.tolist())])


class Cleared(nn.Module):
    """What lies beyond each length is cleared in place."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        y = x.clone()
        for i in range(y.size(0)):
            y[i, lengths[i] :] = 0
        return y.cumsum(1)


class StepsAsked(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for _ in range(int(lengths.max())):
            x = torch.tanh(x) * 1.5
        return x


class SkipsTheLoud(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for scale in (1.0, 2.0):
            y = (x * scale).sin() + x
            if y.abs().max() > 5:
                continue
            total = total + y
        return total


class Alone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        def standard(t: Tensor) -> Tensor:
            if len(t) == 1:
                return t
            return (t - t.mean(0)) / (t.std(0) + 1e-5)

        return standard(x).relu()


class Flat(nn.Module):
    """Raises and catches by itself."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            spread = x.std()
            if spread < 1e-2:
                raise ValueError("flat")
            return (x - x.mean()) / spread
        except ValueError:
            return torch.zeros_like(x)


class Factor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        square = x.transpose(1, 2) @ x
        try:
            return torch.linalg.cholesky(square)
        except RuntimeError:
            return torch.linalg.cholesky(square + torch.eye(4))


class CaughtElsewhere(nn.Module):
    """The check stands in one function, what catches it in another: without it the answer is another."""

    def scaled(self, x: Tensor) -> Tensor:
        if x.abs().max() < 1e-12:
            raise ValueError("nothing to scale by")
        return x / x.abs().max()

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.scaled(x + 1e-6)
        except ValueError:
            return x * 0 - 1


class SkipsTheUnheard(nn.Module):
    """What is left out seldom is never left out on a probe."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for scale in (1.0, 2.0):
            if ((x - 3.25) * scale).abs().max() < 1e-6:
                continue
            total = total + scale
        return total + x


class SkipsForARareNumber(nn.Module):
    """Probes go both ways, and what is skipped would change an answer at one number that none of them holds."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for scale in (1.0, 2.0):
            if (x * scale).max() > 1:
                continue
            total = total + scale + ((x - 3.25).abs() < 1e-6)
        return total * torch.where((x * 2).max() > 1, (x == 3.25), 1)


class CountsFar(nn.Module):
    """Answers otherwise after more calls than anybody asks of it here."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if x.sum() > 0:
            x = x * 2
        return x if self.calls < 10_000 else x * 0


class Still(nn.Module):
    """Returns from the loop when nothing moves any more; halves its step until it does."""

    def forward(self, x: Tensor) -> Tensor:
        step = 1.0
        for _ in range(3):
            if (x * step).sum() < 4:
                break
            step *= 0.5
        for _ in range(4):
            new = x + step * x.sin() * 0.1
            if (new - x).abs().max() < 0.05:
                return new * 2
            x = new
        return x


class LeavesEarly(nn.Module):
    """The layers end where all are sure; what is read after them is made inside of the loop alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = x + torch.relu(layer(x))
            shares = head(x).softmax(-1)
            best = shares.argmax(-1)
            if shares.max(-1).values.min() > 0.5:
                break
        return shares, best


class RaggedMeans(nn.Module):
    """Sentences behind one another, some of them empty."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        means, at = [], 0
        for n in lengths.tolist():
            piece = x[at : at + n]
            means.append(piece.mean(0) if n > 0 else x.new_zeros(4))
            at += n
        return torch.stack(means)


class Pieces(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([piece.mean(1, keepdim=True) for piece in torch.split(x, 3, dim=1)], dim=1)


class NumberedPieces(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        parts = x.split(3, 1)
        return torch.as_tensor(sum(part.sum(1) * (i + 1) for i, part in enumerate(parts)))


TABLES: dict[tuple[int, int], Tensor] = {}


def table(n: int, width: int) -> Tensor:
    if (n, width) not in TABLES:
        at = torch.arange(n).unsqueeze(1)
        TABLES[(n, width)] = torch.sin(at / torch.arange(1, width + 1))
    return TABLES[(n, width)]


class KeptByTheFile(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + table(x.size(1), x.size(2))


def surveyed(model: nn.Module, *inputs: Tensor) -> Survey:
    free = {name: {1: "length"} for name, one in zip(("x",), inputs, strict=False) if one.ndim == 3}
    given = inputs if len(inputs) > 1 else inputs[0]
    eager = EagerSession(copy.deepcopy(model), given, dynamic_shapes=free)
    return survey(model, calls_of(eager), onnx=None, base=Path(__file__).parent)


T = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
R = T[:, 0].contiguous()


@pytest.mark.jobs
@pytest.mark.filterwarnings("ignore:std")  # of the way that torch.where does not choose
@pytest.mark.parametrize(
    ("model", "example", "fresh"),
    [
        *few([(Cleared(), (T, LENGTHS), (T[:2, :4], LENGTHS[:2]))], 0, pytest.mark.jobs),
        (SetMeans(), (R, torch.tensor([0, 2, 2])), (-R[:1], torch.tensor([1]))),
        (Flat(), (R,), (torch.full((2, 4), 7.0),)),
        *few([(NumberedPieces(), (T,), (T[:2, :4],))], 0, pytest.mark.jobs),
        *few(
            [
                (AboveMean(), (R,), (torch.ones(2, 4),)),
                (Windows(), (T,), (T[:2, :2],)),
                (SpanMeans(), (T, LENGTHS), (T[:2, :4] * 3, LENGTHS[:2])),
                (LastSteps(), (T, LENGTHS), (T[:2, :4], LENGTHS[:2])),
                (StepsAsked(), (R, LENGTHS), (R[:2], torch.tensor([0, 0]))),
                (SkipsTheLoud(), (R,), (9 * R[:2],)),
                (SkipsTheUnheard(), (R,), (torch.full((2, 4), 3.25),)),
                (SkipsForARareNumber(), (R,), (torch.full((2, 4), 3.25),)),
                (Alone(), (R,), (R[:1],)),
                (Factor(), (T,), (T[:1, :2],)),
                (Still(), (R,), (1e-3 * R[:2],)),
                (LeavesEarly(), (R,), (30 * R[:2],)),
                (RaggedMeans(), (T.flatten(0, 1), LENGTHS), (T[1, :4], torch.tensor([0, 3, 0, 1]))),
                (Pieces(), (T,), (T[:2, :4],)),
                (KeptByTheFile(), (T,), (T[:2, :4],)),
            ],
            0,
        ),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, nn.Module) else "",
)
def test_a_rewrite_answers_as_the_model_does_where_nobody_asked_it(
    model: nn.Module, example: tuple[Tensor, ...], fresh: tuple[Tensor, ...]
) -> None:
    found = surveyed(model.eval(), *example)
    row = found.rows["(model)"]
    assert row.rewrite is not None, row.why_not
    edited = patch_module(model, found.texts)
    for inputs in (example, fresh):
        torch.testing.assert_close(edited(*inputs), model(*inputs))


@pytest.mark.parametrize(
    "model", [CaughtElsewhere(), SkipsTheUnheard(), CountsFar()], ids=lambda one: type(one).__name__
)
def test_what_no_probe_shows_is_not_left_out(model: nn.Module) -> None:
    found = surveyed(model.eval(), R)
    for text in found.texts.values():
        for line in ("raise ValueError", "self.calls"):
            assert text.count(line) == Path(__file__).read_text().count(line)
