"""Experts that the router weighs least are removed with its rows; the rest is chosen among as before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from trueline.compress.derive.experts import choose_experts, remove_experts
from trueline.errors import CaptureError


class Mixture(nn.Module):
    """The two best experts of each record."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).topk(self.top_k, -1)
        weights, out = weights.softmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        return out


class Fused(Mixture):
    """Experts as one parameter (as transformers' Mixtral has them)."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.num_experts = 4
        self.experts.weight = nn.Parameter(torch.randn(4, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = functional.linear(x, self.gate.weight, self.gate.bias).topk(self.top_k, -1)
        picked = functional.one_hot(chosen, self.experts.num_experts) * weights.softmax(-1)[..., None]
        return torch.einsum("ne,ni,eio->no", picked.sum(-2), x, self.experts.weight)


@pytest.mark.parametrize("kind", [Mixture, Fused])
def test_the_router_never_chooses_what_is_removed_and_the_rest_answers_as_before(kind: type[Mixture]) -> None:
    torch.manual_seed(0)
    model, records = kind().eval(), torch.randn(50, 4)
    with torch.no_grad():
        model.gate.bias.copy_(torch.tensor([3.0, -9.0, 3.0, 3.0]))  # the second is hardly ever chosen
    kept = choose_experts(model, [records], 0.25)
    assert kept == {"experts": [0, 2, 3]}
    smaller = remove_experts(copy.deepcopy(model), records, kept)
    assert sum(one.numel() for one in smaller.parameters()) < sum(one.numel() for one in model.parameters())
    torch.testing.assert_close(smaller(records), model(records))


def test_as_many_stay_as_a_record_chooses() -> None:
    torch.manual_seed(0)
    kept = choose_experts(Mixture().eval(), [torch.randn(50, 4)], 0.9)
    assert len(kept["experts"]) == 2


def test_a_list_without_a_router_is_no_mixture() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    assert choose_experts(Stack().eval(), [torch.randn(5, 4)], 0.5) == {}
    with pytest.raises(CaptureError, match="no such mixture"):
        remove_experts(Stack().eval(), torch.randn(5, 4), {"layers": [0, 1]})
