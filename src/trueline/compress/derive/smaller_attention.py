"""torch's MultiheadAttention with fewer heads than its width has room for, called as that is.

torch's own has the width of its heads times their number as its width, so it cannot lose one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional


class SmallerAttention(nn.Module):
    """Shapes as of torch.nn.MultiheadAttention: [batch, length, width], or with the first two swapped."""

    in_proj_bias = None
    _qkv_same_embed_dim = False
    """So that torch's encoder layer takes no fast path around this module."""

    def __init__(self, whole: nn.MultiheadAttention, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.batch_first = heads, whole.head_dim, whole.batch_first
        self.embed_dim, self.dropout = whole.embed_dim, whole.dropout
        inner, bias = heads * whole.head_dim, whole.in_proj_bias is not None
        self.q_proj = nn.Linear(whole.embed_dim, inner, bias)
        self.k_proj = nn.Linear(whole.kdim or whole.embed_dim, inner, bias)
        self.v_proj = nn.Linear(whole.vdim or whole.embed_dim, inner, bias)
        self.out_proj = nn.Linear(inner, whole.embed_dim, whole.out_proj.bias is not None)

    @classmethod
    def of(cls, whole: nn.MultiheadAttention, stay: Sequence[int] | range) -> SmallerAttention:
        """With the heads `stay` of `whole`."""
        made = cls(whole, len(stay)).to(whole.out_proj.weight)
        rows = torch.arange(whole.embed_dim).reshape(whole.num_heads, -1)[list(stay)].flatten()
        weights = _split(whole)
        with torch.no_grad():
            for at, layer in enumerate((made.q_proj, made.k_proj, made.v_proj)):
                layer.weight.copy_(weights[at][rows])
                if whole.in_proj_bias is not None:
                    layer.bias.copy_(whole.in_proj_bias.chunk(3)[at][rows])
            made.out_proj.weight.copy_(whole.out_proj.weight[:, rows])
            if whole.out_proj.bias is not None:
                made.out_proj.bias.copy_(whole.out_proj.bias)
        return made.train(whole.training)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_padding_mask: Any = None,
        need_weights: bool = True, attn_mask: Any = None, average_attn_weights: bool = True, is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """The answer and, with `need_weights`, the attention weights, averaged over the heads that are left."""
        single = query.dim() == 2
        given = [query, key, value]
        if single:
            given = [one.unsqueeze(0) for one in given]
        elif not self.batch_first:
            given = [one.transpose(0, 1) for one in given]
        layers = (self.q_proj, self.k_proj, self.v_proj)
        parts = [layer(one).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                 for layer, one in zip(layers, given, strict=True)]  # fmt: skip
        mask = _join_masks(key_padding_mask, attn_mask, parts[0])
        drop = self.dropout if self.training else 0.0
        if need_weights:
            scores = parts[0] @ parts[1].transpose(-2, -1) / self.head_dim**0.5
            weights = (scores if mask is None else scores + mask).softmax(dim=-1)
            mixed = functional.dropout(weights, drop) @ parts[2]
            shown = weights.mean(dim=1) if average_attn_weights else weights
        else:
            mixed, shown = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], mask, drop), None
        answer = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if single:
            return answer.squeeze(0), shown if shown is None else shown.squeeze(0)
        return answer if self.batch_first else answer.transpose(0, 1), shown


def _split(whole: nn.MultiheadAttention) -> list[torch.Tensor]:
    if whole._qkv_same_embed_dim:
        return list(whole.in_proj_weight.detach().chunk(3))
    return [cast("torch.Tensor", one).detach() for one in
            (whole.q_proj_weight, whole.k_proj_weight, whole.v_proj_weight)]  # fmt: skip


def _join_masks(padding: Any, mask: Any, like: torch.Tensor) -> torch.Tensor | None:
    """Both masks, true or -inf where nothing is looked at, as one that is added; [batch, heads, query, key]."""
    added: torch.Tensor | None = None
    for one, is_padding in ((padding, True), (mask, False)):
        if one is None:
            continue
        number = (
            torch.zeros_like(one, dtype=like.dtype).masked_fill(one, float("-inf")) if one.dtype == torch.bool else one
        )
        if is_padding:
            number = number.unsqueeze(-2).unsqueeze(-2) if number.dim() == 2 else number
        elif number.dim() == 3:
            number = number.unflatten(0, (like.shape[0], -1))
        added = number if added is None else added + number
    return added
