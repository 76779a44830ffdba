"""A product of three operands stays free in its sizes, whoever looks for the best order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.backends import opt_einsum

from trueline.capture.export.tracing import apply_patches

EQUATION = "...nd,...de,...n->...ne"  # linear attention


class Product(nn.Module):
    def forward(self, q: Tensor, kv: Tensor, scale: Tensor) -> Tensor:
        return torch.einsum(EQUATION, q, kv, scale)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """opt_einsum, which needs numbers for its sizes; what it was asked."""
    asked: list[Any] = []

    def contract_path(equation: str, *operands: Any, optimize: Any, shapes: bool = False) -> Any:
        sizes = [tuple(int(size) for size in (one if shapes else one.shape)) for one in operands]
        asked.append((equation, sizes, shapes))
        return [(1, 2), (0, 1)], ""

    monkeypatch.setattr(opt_einsum, "get_opt_einsum", lambda: SimpleNamespace(contract_path=contract_path))
    monkeypatch.setattr(opt_einsum, "is_available", lambda: True)
    monkeypatch.setattr(opt_einsum, "enabled", True, raising=False)
    return asked


def test_a_product_of_three_stays_free_and_is_ordered_as_for_the_example(asked: list[Any]) -> None:
    q, kv, scale = torch.randn(3, 5, 4), torch.randn(3, 4, 6), torch.randn(3, 5)
    free = torch.export.Dim.DYNAMIC
    shapes = ({0: free, 1: free}, {0: free}, {0: free, 1: free})
    with apply_patches():
        program = torch.export.export(Product(), (q, kv, scale), dynamic_shapes=shapes, strict=False)
    assert asked[-1] == (EQUATION, [(3, 5, 4), (3, 4, 6), (3, 5)], True)
    other = torch.randn(2, 7, 4), torch.randn(2, 4, 6), torch.randn(2, 7)
    torch.testing.assert_close(program.module()(*other), Product()(*other))
    assert asked[-1][2] is False  # outside of the export torch asks as it always does
