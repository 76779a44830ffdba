"""A mean over what is drawn, such as masked tokens, needs its divisor; with it, a mask of nothing is no silent loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from trueline.errors import UsageError
from trueline.train.elastic import Elastic
from trueline.train.step.options import Options
from worlds.groups import together

TOKENS = torch.randint(1, 20, (60, 8), generator=torch.Generator().manual_seed(5))
Mask = Callable[[torch.Tensor], torch.Tensor]
"""Which tokens are masked, by what was drawn."""


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.mix = torch.nn.Embedding(21, 6), torch.nn.Linear(6, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.words(tokens)
        return (found + self.mix(found.mean(dim=1, keepdim=True)).tanh()) @ self.words.weight.T


def train(choose: Mask, *, weighs: bool, **options: Any) -> list[Any]:
    model = Tied()
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(TOKENS, TOKENS)
    job = Elastic(model, optimizer, data, global_batch=16, options=Options(**options))
    for batch in job:
        mask = choose(torch.rand(batch.inputs.shape))
        labels = batch.labels.masked_fill(~mask, -100)
        outputs = model(batch.inputs.masked_fill(mask, 20))
        loss = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())
        job.step(loss, weight=mask.sum() if weighs else None)
    return [value.tolist() for value in model.parameters()]


def few(drawn: torch.Tensor) -> torch.Tensor:
    return drawn < 0.15


def last(drawn: torch.Tensor) -> torch.Tensor:
    return drawn > 0.8


def test_a_mean_over_tokens_that_are_drawn_is_refused_without_its_divisor():
    with pytest.raises(UsageError, match=r"divides by other counts \(\d+, \d+, \d+\)") as refused:
        train(few, weighs=False)
    assert "weight=mask.sum()" in str(refused.value.hint)


@pytest.mark.parametrize("choose", [few, pytest.param(last, marks=pytest.mark.jobs)])
def test_with_its_divisor_it_trains_though_nothing_is_masked_while_nothing_is_drawn(choose):
    assert train(choose, weighs=True) != [value.tolist() for value in Tied().parameters()]


@pytest.mark.jobs
def test_three_workers_train_it_as_one_does():
    def run() -> list[Any]:
        return train(few, weighs=True)

    (alone,), (one, *_) = together(1, run), together(3, run)
    for mine, its in zip(alone, one, strict=True):
        torch.testing.assert_close(torch.tensor(its), torch.tensor(mine), rtol=1e-5, atol=1e-6)


@pytest.mark.jobs
def test_a_named_mean_averages_the_means_of_shards():
    train(few, weighs=False, reduction="mean")
