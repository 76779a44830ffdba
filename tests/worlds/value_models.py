"""Models whose programs once answered values that the model refuses, or numbers where the model answers NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

F = nn.functional


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


X, IMAGE, SEQUENCE = _numbers(5, 8), _numbers(5, 3, 8, 8), _numbers(5, 6, 8)
IDS = torch.tensor([[1, 5, 0, 2], [3, 3, 4, 9], [7, 2, 1, 1], [0, 1, 2, 3], [9, 8, 7, 6]])
AT = torch.tensor([1, 3, 0, 7, 2])
MISSING = torch.where(torch.arange(8) == torch.tensor([2, 9, 9, 0, 9])[:, None], torch.nan, X)


class Applied(nn.Module):
    """A function of the inputs and, where it takes one more, of a layer or a table."""

    def __init__(self, function: Callable[..., Tensor], part: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.part = function, part() if part else None

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs) if self.part is None else self.function(self.part, *inputs)


class Checked(nn.Module):
    """Raises for a value: the check is lost in ONNX."""

    def forward(self, x: Tensor) -> Tensor:
        torch._assert_async((x < 1e6).all(), "large")
        return x * 2


def _table() -> nn.Module:
    return nn.Embedding(20, 6)


ATTACKS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "divided by the maximum of the batch": (lambda: Applied(lambda x: x / x.abs().max()), X),
    "topk": (lambda: Applied(lambda x: x.topk(3, dim=1).values), X),
    "sort": (lambda: Applied(lambda x: x.sort(1).values), X),
    "max_pool": (lambda: Applied(lambda x: F.max_pool2d(x, 2)), IMAGE),
    "amax": (lambda: Applied(lambda x: x.amax(1)), X),
    "clamp from below": (lambda: Applied(lambda x: x.clamp(min=0.0)), X),
    "quantile": (lambda: Applied(lambda x: torch.quantile(x, 0.5, dim=1)), X),
    "sign": (lambda: Applied(torch.sign), X),
    "gelu and silu": (lambda: Applied(lambda part, x: part(F.gelu(x)) + F.silu(part(x)), lambda: nn.Linear(8, 4)), X),
    "layer norm": (lambda: Applied(lambda part, x: part(x), lambda: nn.LayerNorm(8)), X),
    "gru": (lambda: Applied(lambda part, x: part(x)[0][:, -1], lambda: nn.GRU(8, 4, batch_first=True)), SEQUENCE),
    "softmax of what a comparison hides": (
        lambda: Applied(lambda x: torch.softmax(x.masked_fill(x > 0, float("-inf")), 1)), X,
    ),
    "missing values are filled": (lambda: Applied(torch.nan_to_num), MISSING),
    "embedding": (lambda: Applied(lambda part, ids: part(ids).mean(1), _table), IDS),
    "embedding of INT32": (lambda: Applied(lambda part, ids: part(ids).mean(1), _table), IDS.int()),
    "embedding bag": (lambda: Applied(lambda part, ids: part(ids), lambda: nn.EmbeddingBag(20, 6)), IDS),
    "embedding with an offset": (lambda: Applied(lambda part, ids: part(ids + 5).mean(1), _table), IDS),
    "embedding of clamped ids": (lambda: Applied(lambda part, ids: part(ids.clamp(0, 19)).mean(1), _table), IDS),
    "index that wraps": (lambda: Applied(lambda part, ids: part.weight[ids].mean(1), _table), IDS),
    "gather": (lambda: Applied(lambda x, at: x.gather(1, at[:, None])), (X, AT)),
    "scatter": (lambda: Applied(lambda x, at: torch.zeros_like(x).scatter(1, at[:, None], x[:, :1])), (X, AT)),
    "one_hot": (lambda: Applied(lambda at: F.one_hot(at, 8).float()), AT),
    "sum of two indices": (
        lambda: Applied(lambda part, x, at: x[:, :6] + part(at + (x[:, 0] > 0).long()), _table), (X, AT),
    ),
    "float as an index": (lambda: Applied(lambda part, x: part(x[:, 0].abs().long()), _table), X),
    "a check on values": (Checked, X.abs()),
}  # fmt: skip
