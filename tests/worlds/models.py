"""Small models, well- and ill-behaved. Tests find their lines by the marks in their comments.

Those whose loops decode, select and remember are in `loops`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from worlds import marks

line_of = functools.partial(marks.line_of, __file__)
place_of = functools.partial(marks.place_of, __file__)


class Mlp(nn.Module):
    """Batch norm and dropout: right only in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # data branch
            return x * 2
        return x - 1


class Ternary(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.mean().item() > 0 else x - 1  # ternary


class ShapeBranch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 6:  # shape branch
            x = x * 2
        return x + 1


class OnlyMany(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 3:
            return x * 2
        return x + 1


class Counter(nn.Module):
    """Keeps state in a Python attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # counter
        return x + self.calls


class Running(nn.Module):
    """Keeps state in a buffer, on which outputs depend."""

    total: Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum(0)
        return x + self.total


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True)  # noise


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x * 2


class Pair(nn.Module):
    """Positional inputs, a dict as output, with one value None."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)

    def forward(self, x: Tensor, ids: Tensor, scale: float = 2.0) -> dict[str, Tensor | None]:
        hidden = x * scale + self.embed(ids).sum(1)
        return {"hidden": hidden, "score": hidden.sum(1), "attention": None}


class Nested(nn.Module):
    """Keyword inputs in a dict and a tuple, nested outputs."""

    def forward(self, features: dict[str, Tensor], pair: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor]]:
        return features["a"] + pair[0], [features["b"] * pair[1], pair[1].repeat(2, 1)]


class Recurrent(nn.Module):
    """Its state has the batch in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        steps, (state, _) = self.lstm(x)
        return {"last": steps[:, -1], "state": state}


class Identity(nn.Module):
    """The output has the input's name."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x + 0}


class Text(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x, "done"


class Eigen(nn.Module):
    """torch.export follows it, ONNX has no such operator."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.linalg.eigvals(x.unsqueeze(-1) * x.unsqueeze(-2)).real.sum(-1)
        return found


# What follows has control flow or state that depends on the request: the doctor rewrites most of it.


class BranchThenMore(nn.Module):
    """Assigns in both branches and continues."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # value branch
            y = x * 2
        else:
            y = x - 1
        return y + 1


class EarlyReturn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max().item() > 2:  # early return
            return x
        x = self.layer(x)
        return torch.relu(x)


class Number(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scale = x.mean().item()  # number
        if scale > 1:
            x = x / scale
        return x


class Steps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        outs = []
        for t in range(x.shape[1]):  # steps
            outs.append(torch.tanh(x[:, t]))
        return torch.stack(outs, dim=1)


class Recurrence(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):  # recurrence
            h = 0.5 * h + x[:, t]
        return h


class Gated(nn.Module):
    """Its state is a slice: at batch 1 it has the strides of the whole."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            if x[:, t].abs().mean() > 0.5:
                h = torch.tanh(x[:, t] + h)
        return h


class Turned(nn.Module):
    """The state that a step returns has another memory layout than the one it got."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0]).t()
        for t in range(x.shape[1]):
            h = (torch.tanh(h.t()) + x[:, t]).t()
        return h.t()


class Length(nn.Module):
    """Its sizes are Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = nn.Parameter(torch.randn(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        steps = int(x.shape[1])  # int
        rows = self.seed.expand(len(x), -1)
        return x * rows[:, None] / steps


class Halve(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while x.norm() > 2:  # while
            x = x * 0.5
        return x


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.sum(-1) > 0).long()
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            if mask.any():  # experts
                out[mask] = expert(x[mask])
        return out


class Chosen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        if mask.any():  # masked mean
            centre = x[mask].mean()
        else:
            centre = x.new_zeros(())
        return x - centre


class Remembered(nn.Module):
    """All rows so far in a list, a decaying number, and a tensor in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Tensor] = []
        self.weight = 1.0
        self.last = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(x.mean(0))  # remembered
        self.weight *= 0.75
        found = x + self.weight * torch.stack(self.rows).sum(0) / len(self.rows) + self.last
        self.last = x[0] * 2
        return found


class Diary(nn.Module):
    """Keeps state in an object that is neither a tensor nor a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.days: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.days[len(self.days)] = x.sum()  # diary
        return x + torch.stack(list(self.days.values())).sum()


class Halves(nn.Module):
    """A counter in one submodule, a branch on values in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.counter, self.branch = Counter(), BranchThenMore()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.branch(self.counter(x))
        return found


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return called


@logged
def smoothed(x: Tensor, rate: float) -> Tensor:
    state = x.new_zeros(x.shape[0], x.shape[2])
    states = []
    for t in range(x.shape[1]):  # in a function
        state = rate * state + x[:, t]
        states.append(state)
    return torch.stack(states, 1)


class Decorated(nn.Module):
    """The loop is in a decorated function of the file, called by a decorated forward."""

    @logged
    def forward(self, x: Tensor) -> Tensor:
        return smoothed(x, 0.5)


class Strided(nn.Module):
    """Padding that depends on whether a size is even; sizes become Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 2, 3, stride=2), nn.Conv2d(2, 2, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.one, self.two):
            height, width = int(x.shape[2]), int(x.shape[3])  # made numbers
            down = 1 if height % 2 == 0 else 2
            right = 1 if width % 2 == 0 else 2
            x = layer(nn.functional.pad(x, (0, right, 0, down)))
        return x


class Statistics(nn.Module):
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum(0)  # statistics
        return x * 2


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


class Whole(nn.Module):
    """One dynamic part between two static ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Plain()
        self.middle = BranchThenMore()
        self.last = Plain()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.middle(self.first(x)))
        return found


class Opaque(nn.Module):
    """Decided by the digits of a number: no rewrite covers that."""

    def forward(self, x: Tensor) -> Tensor:
        count = len(str(float(x.sum())))  # digits
        return x * count


class Suppress(nn.Module):
    """A candidate that an earlier step dropped drops no other."""

    def forward(self, x: Tensor) -> Tensor:
        near = (x[:, :1] - x[:, 0]).abs() < 0.5
        order = torch.arange(x.shape[0])
        keep = torch.ones(x.shape[0], dtype=torch.bool)
        for i in range(x.shape[0]):
            if keep[i]:  # suppress
                keep = keep & ~(near[i] & (order > i))
        return x * keep[:, None]


class Rare(nn.Module):
    """No probe is as large as this."""

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 1e9:
            x = x + x.nonzero().sum()
        return x if x.sum() > 0 else -x  # rare
