"""Small models, well- and ill-behaved. Their lines are found by the marks in their comments."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn


def line_of(mark: str) -> str:
    """`models.py:LINE` of the line that carries `# mark`."""
    for number, line in enumerate(Path(__file__).read_text().splitlines(), 1):
        if line.endswith(f"# {mark}"):
            return f"models.py:{number}"
    raise AssertionError(f"no line is marked {mark}")


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
    """Remembers in a Python attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


class Running(nn.Module):
    """Remembers in a buffer."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum(0)
        return x + self.total


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x * 2


class Pair(nn.Module):
    """Positional inputs, a dict out, one of whose values is nothing."""

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


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


class Text(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x, "done"
