"""What the user's code decides by a size is claimed by no program that was traced on the other side, however far."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export import decided_sizes, torch_export
from trueline.capture.model.eager import EagerSession

Sizes = tuple[int, int]


class Decides(nn.Module):
    """Doubles what has sizes that keep a condition."""

    def __init__(self, condition: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.condition = condition

    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0 if self.condition(x.shape[1], x.shape[2]) else x * 3.0


def claim_sizes(condition: Callable[[Any, Any], Any], example: Sizes, at: int = 0) -> Callable[[Sizes], bool]:
    """Whether the widest claim of the exported model, or another one, has two sizes."""
    free = {1: "height", 2: "width"}
    eager = EagerSession(Decides(condition), torch.randn(2, *example), dynamic_shapes={"x": free})
    claim = torch_export.export(eager.module, eager.calling).claims[at]
    return lambda sizes: claim.allows({"batch": 2, "height": sizes[0], "width": sizes[1]})


FAR_ONES: list[tuple[Callable[[Any, Any], Any], list[Sizes], list[Sizes]]] = [
    (lambda h, w: h // 16_000 == 5, [(80_000, 41), (95_999, 3)], [(79_999, 41), (96_000, 3)]),
    (lambda h, w: h // 4096 in (17, 33), [(69_632, 1), (139_263, 9)], [(69_631, 1), (139_264, 9)]),
    (lambda h, w: ((h - 20) // 160 + 1) % 500 == 498, [(79_600, 7), (159_600, 7)], [(79_000, 7)]),
    (lambda h, w: h - h // 3 * 2 == 25_001, [(74_999, 5), (75_003, 5)], [(74_998, 5), (75_004, 5)]),
    (lambda h, w: abs(h / 16_000 - 1.5) < 1e-3, [(23_990, 5), (24_000, 2)], [(23_900, 5), (24_100, 2)]),
    (lambda h, w: h * 0.5 == 61_000.5, [(122_001, 2)], [(122_000, 2), (122_002, 2)]),
    (lambda h, w: abs(h - 1037) + abs(w - 41) <= 2, [(1037, 41), (1038, 42)], [(1037, 44), (900, 41)]),
]
# Small sizes break these: values decide between the claims, and the strictest leaves them out.
TWO_WITH_FRACTIONS: list[tuple[Callable[[Any, Any], Any], list[Sizes], list[Sizes]]] = [
    (lambda h, w: w == 1.5 * h, [(20, 30), (2000, 3000)], [(20, 31), (300, 20)]),
    (lambda h, w: h * 0.6 == w, [(50, 30), (5000, 3000)], [(50, 31)]),
    (lambda h, w: int(h * 0.3) == int(w * 0.7), [(30, 13), (121, 52)], [(30, 41)]),
    (lambda h, w: round(h * 0.7) == w, [(10, 7), (3000, 2100)], [(10, 41)]),
    (lambda h, w: abs(h / 208 - 1) + abs(w / 208 - 1) < 0.1, [(208, 208), (200, 210)], [(30, 41), (64, 64)]),
]


@pytest.mark.parametrize(
    ("condition", "outside", "inside", "at"),
    [(*case, 0) for case in FAR_ONES] + [(*case, -1) for case in TWO_WITH_FRACTIONS],
)
def test_a_claim_ends_where_the_users_code_decides_otherwise(
    condition: Callable[[Any, Any], Any], outside: list[Sizes], inside: list[Sizes], at: int
) -> None:
    assert all(condition(*sizes) for sizes in outside)
    assert not any(condition(*sizes) for sizes in inside)
    claims = claim_sizes(condition, (30, 41), at)
    assert [sizes for sizes in outside if claims(sizes)] == []
    assert [sizes for sizes in inside if not claims(sizes)] == []


def test_a_condition_that_can_only_be_bounded_keeps_the_example() -> None:
    condition = lambda h, w: math.sqrt(h) > 9.5  # noqa: E731
    claims = claim_sizes(condition, (120, 41))
    assert claims((120, 41))
    assert not claims((90, 41))


def test_conditions_of_torch_are_not_the_users() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            halves = x.unflatten(1, (-1, 2)).transpose(1, 2).reshape(x.shape[0], -1)
            return halves if x.shape[1] != 34 else halves * 2

    eager = EagerSession(Mixed(), torch.randn(3, 12), dynamic_shapes={"x": {1: "length"}})
    exported = torch_export.export(eager.module, eager.calling)
    codes = decided_sizes.list_codes(exported.program)
    assert len(codes) == 1 < len(getattr(exported.program, "_guards_code", []))
    assert "34" in next(iter(codes))
