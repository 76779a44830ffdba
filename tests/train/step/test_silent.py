"""A loss that is 0 for the records that are tried proves nothing: more records are tried, and a job whose loss trains
nothing ends before its first step, with what was seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from trueline.errors import UsageError
from trueline.train.elastic import Elastic
from trueline.train.step.options import Options
from worlds.cases import few

INPUTS = torch.randn(128, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
Loss = Callable[[Tensor, Any], Tensor]
"""Of the squares of a batch, and the batch."""


def train(loss: Loss, **options: Any) -> tuple[Elastic, float]:
    """The job, and how far it has moved the weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    before = [value.detach().clone() for value in model.parameters()]
    data = TensorDataset(INPUTS, INPUTS.sin().sum(dim=1, keepdim=True))
    advance = torch.optim.SGD(model.parameters(), lr=0.05)
    job = Elastic(model, advance, data, global_batch=64, options=Options(**options))
    for batch in job:
        job.step(loss((model(batch.inputs) - batch.labels) ** 2, batch))
    moves = [float((one - two).detach().abs().max()) for one, two in zip(before, model.parameters(), strict=True)]
    return job, max(moves)


def count_from(records: int) -> Loss:
    return lambda squares, batch: squares.mean() if len(squares) > records else (squares * 0).sum()


def mask(squares: Tensor, batch: Any) -> Tensor:
    """Counts one record in thirty or so."""
    return (squares * (batch.inputs[:, :1] > 1.8)).mean()


NOTHING, SHARDS, PARTS = "a job would train nothing", "each of their shards of 8 is 0", "is not made of its parts"
REFUSED: dict[str, tuple[Loss, dict[str, Any], str]] = {
    "a hinge of a step's sum, as a mean": (lambda s, _: torch.relu(s.sum() - 90), {"reduction": "mean"}, SHARDS),
    "a least number of records": (count_from(20), {}, PARTS),
    "a least number of records, as a mean": (count_from(20), {"reduction": "mean"}, SHARDS),
    "a least number below the first batch": (count_from(10), {"reduction": "mean"}, SHARDS),
    "a least number that no shard has": (count_from(20), {"reduction": "mean", "micro_batch": 16}, NOTHING),
    "zero, as a sum": (lambda squares, _: squares.sum() * 0, {"reduction": "sum"}, NOTHING),
}


@pytest.mark.parametrize("name", few(REFUSED, 1, pytest.mark.jobs))
def test_a_loss_that_would_train_nothing_is_refused_whatever_reduction_is_named(name):
    loss, options, words = REFUSED[name]
    with pytest.raises(UsageError, match=words) as caught:
        train(loss, **options)
    assert "micro_batch" in str(caught.value.hint)


TRAINED: dict[str, tuple[Loss, dict[str, Any], str]] = {
    "shards that are large enough": (count_from(20), {"reduction": "mean", "micro_batch": 32}, "mean"),
    "few records that count": (mask, {}, "mean"),
    "a factor that is 0 in the first step": (lambda squares, batch: squares.sum() * batch.step, {}, "sum"),
}


@pytest.mark.parametrize("name", few(TRAINED, 1, pytest.mark.jobs))
def test_a_loss_that_is_0_for_the_first_records_or_the_first_step_trains(name):
    loss, options, how = TRAINED[name]
    job, moved = train(loss, **options)
    assert job._traits.reduction == how
    assert moved > 0
