"""Capture names the lines where a rounded number decides an answer, and none where both sides answer alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from trueline.capture.model.eager import EagerSession
from trueline.capture.proof import jumps
from trueline.capture.proof.observe import observe
from trueline.capture.proof.probes import make_probes

Forward = Callable[[torch.Tensor], torch.Tensor]


class Decides(nn.Module):
    """A layer, whose sums each runtime rounds in its own way, and what is decided by them."""

    def __init__(self, decide: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.decide = nn.Linear(4, 4), decide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decide(self.layer(x))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).mean(1).argmax(-1)


def find(module: nn.Module, example: torch.Tensor) -> tuple[jumps.Jump, ...]:
    eager = EagerSession(module.eval(), example)
    return jumps.find_jumps(eager, observe(eager, make_probes(eager.example, signature=eager.calling.presumed)))


JUMPS: dict[str, Forward] = {
    "a threshold": lambda h: (h > 0.1).float(),
    "the largest": lambda h: h.argmax(-1),
    "an order": lambda h: h.sort(-1).indices,
    "the places of the largest": lambda h: h.topk(2).indices,
    "whole numbers": lambda h: torch.round(h * 2),
    "an index": lambda h: (h * 4).long(),
    "a remainder": lambda h: torch.remainder(h, 0.3),
    "a bucket": lambda h: torch.bucketize(h, torch.tensor([-0.1, 0.0, 0.2])),
    "a quantized value": lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -128, 127),
    "a step among slopes": lambda h: torch.where(h > 0, h + 1, h),
    "a branch": lambda h: h if h.sum() > 0 else -h,
}
EVEN: dict[str, Forward] = {
    "a slope": lambda h: torch.where(h > 0, h, 0.1 * h),
    "a product with its sign": lambda h: h * (h > 0),
    "a loss of two parts": lambda h: torch.where(h.abs() < 1, 0.5 * h * h, h.abs() - 0.5),
    "the order's values": lambda h: h.sort(-1).values,
    "the largest value": lambda h: h.max(-1).values,
    "a steep slope": lambda h: torch.tanh(300 * h),
    "a threshold that nothing reaches": lambda h: torch.where(h > 1e30, h + 1, h),
}


@pytest.mark.parametrize("what", JUMPS)
def test_a_line_where_a_rounded_number_decides_the_answer_is_named(what: str) -> None:
    found = find(Decides(JUMPS[what]), torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
    assert [(jump.seen, f"{what}" in jump.place.source) for jump in found] == [(True, True)], found
    assert jumps.describe(found) == f"answers jump where a rounded number decides: {found[0]}"
    assert f"{found[0]}".startswith("test_jumps.py:")


@pytest.mark.parametrize("what", EVEN)
def test_nothing_is_said_where_both_sides_answer_alike(what: str) -> None:
    assert find(Decides(EVEN[what]), torch.randn(3, 4, generator=torch.Generator().manual_seed(1))) == ()


def test_numbers_that_each_runtime_has_alike_are_no_hazard() -> None:
    """Inputs, extremes of them, and one product: IEEE 754 leaves no choice."""
    module = Decides(lambda x: (x.abs().amax(-1) * 2 > 1).long())
    module.layer = nn.Identity()  # type: ignore[assignment]
    assert find(module, torch.randn(3, 4)) == ()
    module.layer = nn.Softmax(-1)  # type: ignore[assignment]
    assert find(module, torch.randn(3, 4)) != ()


def test_a_model_of_ids_jumps_between_the_vectors_that_it_looks_up() -> None:
    found = find(Words(), torch.randint(0, 20, (3, 5), generator=torch.Generator().manual_seed(1)))
    assert [jump.seen for jump in found] == [True]
    assert "argmax" in found[0].place.source


def test_lines_that_there_was_no_time_for_are_named_as_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jumps, "BUDGET_S", 0.0)
    monkeypatch.setattr(jumps, "CHEAP_CALLS", 0)
    found = find(Decides(JUMPS["a threshold"]), torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
    assert [jump.seen for jump in found] == [False]
    assert jumps.describe(found).startswith("answers may jump (not tried) where a rounded number decides: ")


def test_of_many_lines_three_are_named_and_the_others_counted() -> None:
    found = find(Decides(lambda h: h), torch.randn(3, 4))
    place = find(Decides(JUMPS["a threshold"]), torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))[0].place
    assert found == ()
    assert jumps.describe([jumps.Jump(place=place, seen=True)] * 5).endswith(" and 2 more lines")
