"""A draw of torch's that changes the answer once in a long time is found; one that changes nothing does no harm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.determinism import check_rare
from worlds import marks


class Drawing(nn.Module):
    """Answers by a function that may draw."""

    def __init__(self, answer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(x)


def seeded(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return x + torch.randn(4)


def with_entropy(x: Tensor) -> Tensor:
    generator = torch.Generator()
    generator.seed()
    return x * 2 if torch.rand((), generator=generator).item() < 1e-6 else x


def attend(x: Tensor) -> Tensor:
    rows = x.view(1, 1, -1, 4)
    return F.scaled_dot_product_attention(rows, rows, rows, dropout_p=1e-6).view(-1, 4)


RARE: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli_": lambda x: F.dropout(x, 1e-6, training=True),  # drops
    "alpha dropout": lambda x: F.feature_alpha_dropout(x[None], 1e-6, training=True)[0],
    "attention": attend,
    "rand": lambda x: x * torch.where(torch.rand(()) < 1e-6, 2.0, 1.0),
    "rand at the top": lambda x: x * 2 if torch.rand(1).item() > 1 - 1e-6 else x,
    "rand at a number": lambda x: x * 2 if abs(torch.rand(1).item() - 0.25) < 1e-7 else x,
    "randn": lambda x: x + (torch.randn(4) > 5.5).float(),
    "normal": lambda x: x + (torch.normal(torch.ones(4), 2.0) > 12).float(),
    "randint": lambda x: x * 2 if int(torch.randint(0, 100_000, (1,))) == 7 else x,
    "randperm": lambda x: x * 2 if bool((torch.randperm(12)[:5] == torch.arange(5)).all()) else x,
    "bernoulli": lambda x: x + torch.bernoulli(torch.full((4,), 1e-6)),
    "multinomial": lambda x: x * (1 + torch.multinomial(torch.tensor([1.0, 1e-6]), 1)),
    "poisson": lambda x: x + torch.poisson(torch.full((4,), 1e-6)),
    "exponential": lambda x: x + (torch.empty(4).exponential_() > 14).float(),
    "geometric": lambda x: x + (torch.empty(4).geometric_(0.5) > 21).float(),
    "gumbel": lambda x: x * F.gumbel_softmax(torch.tensor([20.0, 0.0]), hard=True)[0],
    "entropy": with_entropy,
}

HARMLESS: dict[str, Callable[[Tensor], Tensor]] = {
    "seeded": seeded,
    "times nothing": lambda x: x + torch.randn_like(x) * 0.0,
    "dropout of nothing": lambda x: F.dropout(x, 0.0, training=True),
    "never below": lambda x: x * 2 if torch.rand(1).item() < 0.0 else x,
    "sure": lambda x: x * torch.bernoulli(torch.ones(4)),
    "overwritten": lambda x: x + torch.randn(4).zero_(),
}


def find_why(answer: Callable[[Tensor], Tensor]) -> str:
    torch.manual_seed(0)
    found = check_rare(EagerSession(Drawing(answer).eval(), torch.ones(3, 4)))
    return f"{found.why} at {found.place}, random: {found.random}" if found is not None else ""


@pytest.mark.parametrize("name", RARE)
def test_a_draw_that_changes_the_answer_once_in_a_million_is_found(name: str) -> None:
    why = find_why(RARE[name])
    assert "not deterministic in evaluation mode: aten." in why
    assert "draws random numbers, and it answers differently when another number is drawn" in why


def test_the_line_that_draws_is_named_and_may_be_allowed() -> None:
    why = find_why(RARE["bernoulli_"])
    assert marks.place_of(__file__, "drops") in why
    assert why.endswith("random: True")


@pytest.mark.parametrize("name", HARMLESS)
def test_a_draw_that_changes_nothing_is_no_reason_to_refuse(name: str) -> None:
    assert find_why(HARMLESS[name]) == ""


def test_what_chance_draws_is_afterwards_as_it_was() -> None:
    model = EagerSession(Drawing(lambda x: x + torch.randn_like(x) * 0.0).eval(), torch.ones(3, 4))
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    with torch.random.fork_rng(devices=[]):
        check_rare(model)
    assert torch.equal(torch.randn(3), expected)
