"""Hand-written models with control flow that depends on the request, written as research code is written.

Each class says what is dynamic. `EXAMPLES` gives a small batch for each, `DYNAMIC` the dimensions that vary beside
the batch. Weights are random; nothing here is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TimeLoop(nn.Module):
    """A GRU cell over time, outputs collected in a list. Dynamic: the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 6)
        outs = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            outs.append(h)
        return torch.stack(outs, dim=1)


class StepwiseProjection(nn.Module):
    """The same layer on every step, one by one. Dynamic: the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        outs = []
        for t in range(x.size(1)):
            y = self.proj(x[:, t])
            outs.append(torch.tanh(y))
        return torch.stack(outs, 1)


class RunningTotal(nn.Module):
    """A sum over time that starts from a number. Dynamic: the number of steps."""

    def forward(self, x: Tensor) -> Tensor:
        total = 0.0
        for t in range(x.shape[1]):
            total = total * 0.5 + x[:, t]
        return total


class EarlyExit(nn.Module):
    """A confident first head answers alone. Dynamic: a return inside an `if` on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.body = nn.Linear(4, 4)
        self.second = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        early = self.first(x)
        if early.softmax(-1).max().item() > 0.9:
            return early
        x = torch.relu(self.body(x))
        return self.second(x)


class ValueBranch(nn.Module):
    """Two gains. Dynamic: an `if` on a sum."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            y = x * 2
        else:
            y = x - 1
        return y + 1


class ThreeWays(nn.Module):
    """Dynamic: `if`, `elif`, `else` on values, with returns."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean().item()
        if mean > 1:
            return x / mean
        if mean < -1:
            scale = abs(mean)
            return x * scale
        return x + 1


class Ternary(nn.Module):
    """Dynamic: a conditional expression on a value."""

    def forward(self, x: Tensor) -> Tensor:
        gain = 2.0 if x.abs().max() > 3 else 0.5
        return x * gain


class SizeBranch(nn.Module):
    """Large batches are scaled. Dynamic: an `if` on the batch size."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 6:
            x = x * 2
        return x + 1


class PadToMultiple(nn.Module):
    """Chunks of four steps. Dynamic: padding that depends on the length."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n % 4 != 0:
            x = F.pad(x, (0, 0, 0, 4 - n % 4))
        return x.reshape(x.shape[0], -1, 4, x.shape[2]).mean(2)


class NormByNumber(nn.Module):
    """Dynamic: arithmetic with `.item()` and math."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.pow(2).mean().item()
        scale = max(math.sqrt(scale), 1.0)
        return x / scale


class HalveUntilSmall(nn.Module):
    """Dynamic: a `while` on a norm."""

    def forward(self, x: Tensor) -> Tensor:
        while x.norm() > 2:
            x = x * 0.5
        return x


class Newton(nn.Module):
    """A fixed point with a limit on the steps. Dynamic: `while` on a residual and a counter."""

    def forward(self, x: Tensor) -> Tensor:
        target = x.abs() + 1
        y = target
        steps = 0
        while (y * y - target).abs().max() > 1e-4 and steps < 20:
            y = 0.5 * (y + target / y)
            steps += 1
        return y


class Halting(nn.Module):
    """Adaptive computation time. Dynamic: `break` once every record has halted."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)
        self.halt = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        halted = torch.zeros(x.shape[0], 1)
        out = torch.zeros_like(x)
        for _ in range(6):
            x = torch.tanh(self.step(x))
            p = torch.sigmoid(self.halt(x) * 4)
            out = out + p * x * (1 - halted)
            halted = (halted + p).clamp(max=1.0)
            if (halted >= 0.99).all():
                break
        return out


class Experts(nn.Module):
    """A mixture of experts, each on its own tokens. Dynamic: which records go where."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            if mask.any():
                out[mask] = expert(x[mask])
        return out


class MaskedMean(nn.Module):
    """Dynamic: the mean of what is positive."""

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        if mask.any():
            centre = x[mask].mean()
        else:
            centre = x.new_zeros(())
        return x - centre


class RaggedMeans(nn.Module):
    """Means over the first n steps of each record. Dynamic: lengths in a tensor."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        rows = []
        for i, n in enumerate(lengths.tolist()):
            rows.append(x[i, :n].mean(0))
        return torch.stack(rows)


class Counter(nn.Module):
    """A counter in a Python attribute that answers depend on. Dynamic: state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


class RunningMean(nn.Module):
    """Statistics are kept on every call, and used in none. Dynamic: a buffer written in place."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.scale = nn.Parameter(torch.full((4,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum(0)
        return x * self.scale


class Cache(nn.Module):
    """Keys of earlier calls are remembered. Dynamic: a cache in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(4, 4)
        self.keys: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.keys.append(self.key(x).mean(0))
        keys = torch.stack(self.keys)
        return torch.softmax(x @ keys.T, -1) @ keys


class Tree(nn.Module):
    """Pairs are merged until one is left. Dynamic: recursion on the number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.merge = nn.Linear(8, 4)

    def reduce(self, x: Tensor) -> Tensor:
        if x.shape[1] == 1:
            return x[:, 0]
        middle = x.shape[1] // 2
        pair = torch.cat([self.reduce(x[:, :middle]), self.reduce(x[:, middle:])], -1)
        return torch.tanh(self.merge(pair))

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(x)


class BeamStep(nn.Module):
    """One step of a beam, whose width shrinks when the model is sure. Dynamic: an `if` on entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(self.head(x), -1)
        entropy = -(logp.exp() * logp).sum(-1).mean()
        if entropy < 1.2:
            logp = logp * 2.0
        total = scores[:, :, None] + logp[:, None, :]
        best, index = total.flatten(1).topk(2, -1)
        return best, index


class Suppress(nn.Module):
    """Non-maximum suppression as a mask over sorted boxes. Dynamic: a loop over boxes with an `if` on what is kept."""

    def forward(self, boxes: Tensor) -> Tensor:
        centre = boxes[:, 0]
        near = (centre[:, None] - centre[None, :]).abs() < 0.5
        keep = torch.ones_like(centre, dtype=torch.bool)
        order = torch.arange(boxes.shape[0])
        for i in range(boxes.shape[0]):
            if keep[i]:
                keep = keep & ~(near[i] & (order > i))
        return boxes * keep[:, None]


class DictInputs(nn.Module):
    """Inputs in a dict, one of them steers. Dynamic: an `if` on a flag tensor."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = batch["x"]
        if batch["flag"].any():
            x = x * 3
        return {"y": x.sigmoid()}


class Layered(nn.Module):
    """A static encoder, a dynamic step, a static head. Dynamic: only the part in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.middle = EarlyExit()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.middle(self.encoder(x)))
        return found


class GatedStep(nn.Module):
    """A recurrence that skips quiet steps. Dynamic: time, and an `if` on values inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            if x[:, t].abs().mean() > 0.5:
                h = torch.tanh(self.cell(torch.cat([x[:, t], h], -1)))
        return h


def _rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


EXAMPLES: dict[type[nn.Module], Callable[[], Any]] = {
    TimeLoop: lambda: _rows(3, 5, 4),
    StepwiseProjection: lambda: _rows(3, 5, 4),
    RunningTotal: lambda: _rows(3, 5, 4),
    EarlyExit: lambda: _rows(3, 4),
    ValueBranch: lambda: _rows(3, 4),
    ThreeWays: lambda: _rows(3, 4),
    Ternary: lambda: _rows(3, 4),
    SizeBranch: lambda: _rows(3, 4),
    PadToMultiple: lambda: _rows(3, 6, 4),
    NormByNumber: lambda: _rows(3, 4),
    HalveUntilSmall: lambda: _rows(3, 4),
    Newton: lambda: _rows(3, 4),
    Halting: lambda: _rows(3, 4),
    Experts: lambda: _rows(5, 4),
    MaskedMean: lambda: _rows(3, 4),
    RaggedMeans: lambda: (_rows(3, 5, 4), torch.tensor([5, 2, 3])),
    Counter: lambda: _rows(3, 4),
    RunningMean: lambda: _rows(3, 4),
    Cache: lambda: _rows(3, 4),
    Tree: lambda: _rows(3, 5, 4),
    BeamStep: lambda: (_rows(3, 4), _rows(3, 2)),
    Suppress: lambda: _rows(5, 4),
    DictInputs: lambda: {"batch": {"x": _rows(3, 4), "flag": torch.tensor([False, False, True])}},
    Layered: lambda: _rows(3, 4),
    GatedStep: lambda: _rows(3, 5, 4),
}

DYNAMIC: dict[type[nn.Module], dict[str, list[int]]] = {
    model: {"x": [1]} for model in (TimeLoop, StepwiseProjection, RunningTotal, PadToMultiple, Tree, GatedStep)
}
