"""Channels are removed with all that depends on them: the model is smaller, and is called as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trueline.compress.derive.channels import remove_channels
from trueline.errors import CaptureError

pytest.importorskip("torch_pruning", reason="torch-pruning is not installed: pip install 'trueline[prune]'")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.third = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        x = x + self.third(self.second(x).relu())
        return self.last(x.mean((2, 3)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(32, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(self.embed(tokens)).mean(1))


class HandMadeAttention(nn.Module):
    """Its head size is written into the forward, as in most models: a pruned projection would break the view."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], x.shape[1], 3, 4, 8).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(found.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = HandMadeAttention()
        self.wide, self.narrow, self.last = nn.Linear(32, 128), nn.Linear(128, 32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return self.last((x + self.narrow(self.wide(x).relu())).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.wide, self.last = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.wide(self.recurrent(x)[0][:, -1]).relu())


def separable() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 16, 3, groups=16), nn.BatchNorm2d(16),
        nn.ReLU6(), nn.Conv2d(16, 32, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "residual": (Residual, lambda count: torch.rand(count, 3, 8, 8)),
    "separable": (separable, lambda count: torch.rand(count, 3, 16, 16)),
    "encoder": (Encoder, lambda count: torch.randint(0, 50, (count, 5 + count))),
    "attention by hand": (Block, lambda count: torch.rand(count, 5 + count, 32)),
    "recurrent": (Recurrent, lambda count: torch.rand(count, 3 + count, 8)),
}


def size(model: nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_smaller_and_takes_other_sizes_as_before(name: str) -> None:
    make, example = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    before = size(model)
    pruned = remove_channels(model, example(2), 0.3)
    assert size(pruned) < before
    for count in (1, 4):
        assert pruned(example(count)).shape == make().eval()(example(count)).shape


def test_a_model_without_channels_to_spare_is_an_error_in_words() -> None:
    with pytest.raises(CaptureError, match="no channel of this model") as refused:
        remove_channels(nn.Linear(4, 2), torch.rand(2, 4), 0.3)
    assert "--prune" in refused.value.hint
