"""Loops whose first or last step takes another way: that step stands by itself, and the answers stay the same."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.examine import prove_onnx
from trueline.doctor.patch import patch_module
from trueline.doctor.rewrites.control import first_steps
from trueline.doctor.rewrites.scope import Scope
from trueline.doctor.survey import survey

X = torch.randn(3, 9, 4, generator=torch.Generator().manual_seed(0))
APART = {
    "the first step has no gate": """
def f(x):
    hs = []
    for t in range(x.shape[1]):
        if t == 0:
            h = x[:, t]
        else:
            h = h * 0.5 + x[:, t]
        hs.append(h)
    return torch.stack(hs, 1)
""",
    "a state that begins with None, over two streams": """
def f(x):
    h, out = None, 0
    for i, (a, b) in enumerate(zip(x.unbind(1), (x * 2).unbind(1))):
        h = a + b if h is None else 0.5 * h + b
        if i >= 1 and i < 4:
            h = h / (i + 1)
        out = out + h
    return out, h
""",
    "a list that begins empty": """
def f(x):
    states = []
    for row in x.transpose(0, 1):
        states.append(0.9 * states[-1] + row if len(states) > 0 else row)
    return torch.stack(states)
""",
    "the first frame is left out": """
def f(x):
    prev, outs = None, []
    for frame in x.unbind(1):
        if prev is None:
            prev = frame
            continue
        outs.append(frame - prev)
        prev = frame
    return sum(outs), prev
""",
    "the last step looks at nothing": """
def f(x):
    B, T, _ = x.shape
    h, outs = x[:, 0], []
    for t in range(1, T):
        if t != x.size(1) - 1:
            h = h + x[:, t + 1]
        if T == t + 1:
            h = h * 3
        outs.append(h)
    return h, len(outs)
""",
    "the last one by a size with a name of its own": """
def f(x):
    h = x[:, 0]
    batch, length = x.shape[:2]
    last = x.size(1) - 1
    for t in range(length):
        h = h + x[:, t + 1] if t < last else h * 2
    return h
""",
    "warm-up, and every third step": """
def f(x):
    h, late, thirds = 0, [], []
    for t in range(x.size(1)):
        h = 0.5 * h + x[:, t]
        if t % 3 == 1:
            thirds.append(h)
        if t + 1 < 3:
            continue
        late.append(h)
    return sum(late) + sum(thirds), len(late), len(thirds)
""",
    "neither the first nor the last": """
def f(x):
    total = x.new_zeros(())
    for t in range(len(x)):
        if not t:
            continue
        total = total + (x[t] * x[t - 1]).sum() * (1 if t == 1 else t)
    return total
""",
}
KEPT = {
    "a name that is None again": """
def f(x):
    best = None
    for t in range(x.size(1)):
        if best is None:
            best = x[:, t]
        if x[0, t, 0] > 0.5:
            best = None
""",
    "a name that is None again from some step on": """
def f(x):
    best = None
    for t in range(x.size(1)):
        if best is None:
            best = x[:, t]
        best = None if x[0, t, 0] > 0.5 else best
""",
    "a name that is None again from a later step on": """
def f(x):
    best, total = None, 0
    for t in range(x.size(1)):
        if best is None:
            best = x[:, t]
        total = total + best
        if t > 3:
            best = None
    return total
""",
    "a list that begins anew": """
def f(x):
    held, total = [], 0
    for t in range(x.size(1)):
        if held:
            total = total + held[-1]
        held.append(x[:, t])
        if t > 3:
            held = []
    return total
""",
    "a list that loses its elements": """
def f(x):
    held = []
    for t in range(x.size(1)):
        if held:
            held.pop()
        else:
            held.append(x[:, t])
""",
    "a step that another size tells from the others": """
def f(x):
    (batch, length), h = x.shape[:2], 0
    for t in range(length):
        h = h + x[:, t] * (2 if t < batch - 1 else 1)
    return h
""",
    "a size that the loop changes": """
def f(x):
    for t in range(x.size(1)):
        if t > 0:
            x = x[:, 1:]
""",
    "a counter that is read later": """
def f(x):
    h = 0
    for t in range(x.size(1)):
        h = h + x[:, t] if t > 0 else x[:, t]
    return h * t
""",
    "a first step that ends the loop": """
def f(x):
    h = x[:, 0]
    for t in range(x.size(1)):
        if t == 0:
            break
        h = h + x[:, t]
    return h
""",
}


def edits(text: str) -> list[str]:
    """The text after each of the edits."""
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    line = next(node.lineno for node in ast.walk(function) if isinstance(node, ast.For))
    scope = Scope(text=text, function=function, seen={"x": X})
    spot = scope.spot(line)
    assert spot is not None
    return [found.text for found in first_steps.rewrites(scope, spot) if found is not None]


def answer(text: str, x: Tensor) -> Any:
    names: dict[str, Any] = {"torch": torch}
    exec(text, names)
    return names["f"](x)


@pytest.mark.parametrize("name", APART)
def test_a_step_of_its_own_answers_as_the_loop_does_at_each_length(name: str) -> None:
    texts = edits(APART[name])
    assert texts
    for text in texts:
        for length in range(2, 9):
            torch.testing.assert_close(answer(text, X[:, :length]), answer(APART[name], X[:, :length]))


def test_a_loop_without_a_first_step_is_refused() -> None:
    for text in edits(APART["the first step has no gate"]):
        with pytest.raises(RuntimeError):
            answer(text, X[:, :0])


@pytest.mark.parametrize("name", KEPT)
def test_a_step_that_may_be_like_the_others_stays_among_them(name: str) -> None:
    assert edits(KEPT[name]) == []


class Scaled(nn.Module):
    """Forward and backward through a chain, as a hidden Markov model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen, alpha, sums = x.exp(), [], []
        a = seen[:, 0] / 3
        for t in range(x.size(1)):
            if t > 0:
                a = (alpha[-1] @ self.step) * seen[:, t]
            total = a.sum(-1, keepdim=True)
            alpha.append(a / total)
            sums.append(total)
        beta = [torch.ones_like(alpha[0])]
        for t in reversed(range(x.size(1) - 1)):
            beta.insert(0, (seen[:, t + 1] * beta[0]) @ self.step.t() / sums[t + 1])
        return torch.stack(alpha, 1) * torch.stack(beta, 1), torch.cat(sums, 1).log().sum(1)


class Ahead(nn.Module):
    """Each step but the last one sees the next frame."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.alone = nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        last, h, outs = x.size(1) - 1, torch.zeros_like(x[:, 0]), []
        for t in range(x.size(1)):
            if t < last:
                h = torch.tanh(self.both(torch.cat([x[:, t], x[:, t + 1]], -1)) + h)
            else:
                h = torch.tanh(self.alone(x[:, t]) + h)
            outs.append(h)
        return torch.stack(outs, 1)


class Changed(nn.Module):
    """Differences with an average of the frames before."""

    def forward(self, x: Tensor) -> Tensor:
        prev: Tensor | None = None
        outs: list[Tensor] = []
        for frame in x.unbind(1):
            if prev is None:
                prev = frame
                continue
            outs.append(frame - prev)
            prev = 0.5 * frame + 0.5 * prev
        return F.pad(torch.stack(outs, 1), (0, 0, 1, 0))


class Totals(nn.Module):
    """A total that begins with a number, of what each step alone computes, as of a tour's logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, total = torch.zeros(x.size(0), 3), 0.0
        for t in range(x.size(1)):
            h = torch.tanh(self.cell(torch.cat([x[:, t], h], -1)))
            best, _ = F.log_softmax(h, -1).max(1)
            total = total + best
        return h, total  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "scans"),
    [
        pytest.param(Totals, 1),
        pytest.param(Scaled, 2, marks=pytest.mark.long),
        pytest.param(Ahead, 1, marks=pytest.mark.long),
        pytest.param(Changed, 1, marks=pytest.mark.jobs),
    ],
)
def test_a_recurrence_with_a_step_of_its_own_is_a_scan_that_is_proven(kind: type[nn.Module], scans: int) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    eager = EagerSession(model, torch.randn(3, 5, 3), dynamic_shapes={"x": {1: "length"}})
    done = survey(model, calls_of(eager), onnx=prove_onnx, base=Path.cwd())
    row = done.rows["(model)"]
    assert row.rewrite is not None, row.why_not
    assert row.rewrite.onnx == "proven"
    assert row.rewrite.diff.count(" = scan(") == scans
    edited = patch_module(model, done.texts)
    for length in (2, 3, 17):
        x = torch.randn(2, length, 3)
        with torch.no_grad():
            torch.testing.assert_close(edited(x), model(x))
