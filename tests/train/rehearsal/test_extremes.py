"""Loops that decide by what they count or list of a batch end before their first step; loops that only look train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from trueline.errors import UsageError
from trueline.train.elastic import Elastic
from trueline.train.rehearsal import extremes

pytestmark = pytest.mark.slow

INPUTS = torch.randn(120, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
DATA = TensorDataset(INPUTS, INPUTS[:, :5].argmax(dim=1))


def train(loss_of: Callable[[Tensor, Any], Tensor], *, classes: int = 5) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, classes)).double()
    job = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.05), DATA, global_batch=40, epochs=3)
    for batch in job:
        job.step(loss_of(model(batch.inputs), batch))
    assert job.steps == 9


def hits(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.argmax(dim=1) == batch.labels


def twice(outputs: Tensor, batch: Any, *, by: Any) -> Tensor:
    return cross_entropy(outputs, batch.labels) * (2.0 if by else 1.0)


DECIDE: dict[str, Callable[[Tensor, Any], Any]] = {
    "a count": lambda outputs, batch: hits(outputs, batch).sum().item() > 17,
    "a count that begins with few": lambda outputs, batch: hits(outputs, batch).sum() > 36,
    "a list": lambda outputs, batch: sum(hits(outputs, batch).tolist()) > 17,
    "an array": lambda outputs, batch: hits(outputs, batch).numpy().mean() > 0.75,
    "an array of losses": lambda outputs, batch: (
        cross_entropy(outputs, batch.labels, reduction="none").detach().numpy().mean() > 1.7
    ),
    "what numpy makes of it": lambda outputs, batch: np.asarray(hits(outputs, batch)).sum() > 17,
    "a size": lambda outputs, batch: len(hits(outputs, batch).nonzero()) > 17,
    "the most frequent label": lambda outputs, batch: batch.labels.bincount().max() > 30,
    "whether all are right": lambda outputs, batch: hits(outputs, batch).all(),
    "a count from a later step on": lambda outputs, batch: batch.step > 5 and hits(outputs, batch).sum() > 17,
}


@pytest.mark.jobs
@pytest.mark.parametrize("how", DECIDE)
def test_a_loss_that_decides_by_what_it_counts_or_lists_is_refused_before_the_first_step(how):
    with pytest.raises(UsageError, match="each worker would decide by its own part of a step"):
        train(lambda outputs, batch: twice(outputs, batch, by=DECIDE[how](outputs, batch)))


@pytest.mark.jobs
def test_an_accuracy_that_begins_with_zero_is_looked_at_with_weights_that_have_trained():
    with pytest.raises(UsageError, match="each worker would decide by its own part of a step"):
        train(lambda outputs, batch: twice(outputs, batch, by=hits(outputs, batch).sum() > 17), classes=400)


@pytest.mark.jobs
def test_code_that_only_looks_or_decides_record_by_record_trains(monkeypatch):
    """However much time there is to find something."""
    monkeypatch.setattr(extremes, "MOST_S", 60.0)
    logged = list[Any]()

    def log(outputs: Tensor, batch: Any) -> Tensor:
        logged.append((hits(outputs, batch).sum().item(), hits(outputs, batch).tolist(), outputs.detach().numpy()))
        return cross_entropy(outputs, batch.labels)

    def weigh_each(outputs: Tensor, batch: Any) -> Tensor:
        losses = cross_entropy(outputs, batch.labels, reduction="none")
        return sum(
            loss * (2.0 if label > 2 else 1.0) for loss, label in zip(losses, batch.labels.tolist(), strict=True)
        ) / len(losses)

    def divide(outputs: Tensor, batch: Any) -> Tensor:
        assert set(batch.labels.tolist()) <= set(range(5))
        return cross_entropy(outputs, batch.labels, reduction="sum") / int(batch.labels.ge(0).sum())

    def skip(outputs: Tensor, batch: Any) -> Tensor:
        losses, rare = cross_entropy(outputs, batch.labels, reduction="none"), batch.labels == 3
        return losses.mean() + (outputs * rare[:, None]).square().mean() if rare.any() else losses.mean()

    for loss_of in (log, weigh_each, divide, skip):
        train(loss_of)
    assert logged
