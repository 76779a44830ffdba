"""Heads are removed only where the smaller model answers as the whole one without what they contribute."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from trueline.compress.derive.attention_heads import choose_heads, remove_heads
from trueline.compress.derive.smaller_attention import SmallerAttention
from trueline.errors import CaptureError

WIDTH, HEADS = 32, 4


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Block(nn.Module):
    """Attention as libraries write it; subclasses say how queries, keys and values are split."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.inner = HEADS, WIDTH // HEADS, WIDTH
        self.make()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def make(self) -> None:
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        return parts.permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = functional.scaled_dot_product_attention(*self.split(x))
        return self.proj(mixed.transpose(1, 2).reshape(*x.shape[:2], self.inner))


class HeadsOutside(Block):
    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.qkv(x).unflatten(-1, (self.num_heads, 3 * self.head_dim)).transpose(1, 2).chunk(3, -1)


class SharedKeys(Block):
    """Two query heads for each key-value head, no count but the size of a head (as in transformers' Llama)."""

    def make(self) -> None:
        del self.num_heads
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = (
            one(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        return query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)


class HardCoded(Block):
    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        size = x.shape[-1] // self.num_heads
        return tuple(one.unflatten(-1, (self.num_heads, size)).transpose(1, 2) for one in self.qkv(x).split(WIDTH, -1))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize(("make", "left"), [(Block, 3), (HeadsOutside, 3), (SharedKeys, 1), (encoder, 3)])
def test_the_smaller_model_answers_as_the_whole_one_without_these_heads(
    make: Callable[[], nn.Module], left: int
) -> None:
    model, example = make().eval(), torch.randn(2, 5, WIDTH)
    kept = choose_heads(model, example, 0.5 if make is SharedKeys else 0.25)
    assert [len(stay) for stay in kept.values()] == [left] * (2 if make is encoder else 1)
    smaller = remove_heads(copy.deepcopy(model), example, kept)
    assert sum(one.numel() for one in smaller.parameters()) < sum(one.numel() for one in model.parameters())
    other = torch.randn(3, 9, WIDTH)
    assert smaller(other).shape == (3, 9, WIDTH)
    if isinstance(model, Block):
        [stay] = kept.values()
        places = torch.arange(WIDTH).reshape(2 if make is SharedKeys else HEADS, -1)[stay].flatten()
        mask = torch.zeros(WIDTH).index_fill(0, places, 1)
        with torch.no_grad():
            model.proj.weight.mul_(mask)
        torch.testing.assert_close(smaller(other), model(other))


def test_heads_that_weigh_least_go_first() -> None:
    model = Block().eval()
    with torch.no_grad():
        model.proj.weight[:, WIDTH // HEADS : 2 * WIDTH // HEADS] *= 1e-3
    assert choose_heads(model, torch.randn(2, 5, WIDTH), 0.25) == {"": [0, 2, 3]}


def test_a_block_whose_sizes_are_written_into_it_keeps_its_heads() -> None:
    assert choose_heads(HardCoded().eval(), torch.randn(2, 5, WIDTH), 0.5) == {}


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(CaptureError, match="no such attention block"):
        remove_heads(HardCoded().eval(), torch.randn(2, 5, WIDTH), {"": [0, 1]})


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masked", [None, "padding", "causal", "both"])
def test_attention_with_all_heads_answers_as_torchs_own(batch_first: bool, masked: str | None) -> None:
    whole = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, kdim=16, vdim=12).eval()
    own = SmallerAttention.of(whole, range(HEADS))
    sizes = (2, 5) if batch_first else (5, 2)
    given = [torch.randn(*sizes, width) for width in (WIDTH, 16, 12)]
    how: dict[str, torch.Tensor] = {}
    if masked in ("padding", "both"):
        how["key_padding_mask"] = torch.tensor([[False] * 5, [False, False, True, True, True]])
    if masked in ("causal", "both"):
        how["attn_mask"] = torch.ones(5, 5).tril().logical_not()
    for wanted in (True, False):
        want, weights = whole(*given, need_weights=wanted, **how)
        have, shown = own(*given, need_weights=wanted, **how)
        torch.testing.assert_close(have, want)
        if wanted:
            torch.testing.assert_close(shown, weights)
