"""Loops that decide by what they count or list of a batch end before their first step; loops that only look train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset, default_collate

from trueline.data.loading.seeding import SeededReader
from trueline.data.open import open_training
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


class Counted(Dataset):
    """Counts what is read; `ragged`: records of several lengths, as a list."""

    def __init__(self, *, ragged: bool = False) -> None:
        self.reads, self.ragged = 0, ragged

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> tuple[Any, int]:
        self.reads += 1
        return (INPUTS[index, : 2 + index % 4] if self.ragged else {"x": INPUTS[index], "at": index}), index % 5

    def collate_fn(self, items: list[tuple[Any, int]]) -> Any:
        if not self.ragged:
            return default_collate(items)
        return [one for one, _ in items], torch.tensor([label for _, label in items])


def test_a_record_that_a_batch_has_many_times_is_read_once_and_is_the_same_record():
    once, plain = Counted(), Counted()
    reader = extremes.RepeatsReader(SeededReader(open_training(once), 0))
    for ids in (np.array([7, 3, 7, 7, 110, 3]), np.resize([4], 64), np.array([5, 9, 2])):
        found, wanted = reader.read(ids, epoch=0), SeededReader(open_training(plain), 0).read(ids, epoch=0)
        assert torch.equal(found.inputs["x"], wanted.inputs["x"])
        assert found.inputs["at"].tolist() == ids.tolist()
        assert torch.equal(found.labels, wanted.labels)
    assert (once.reads, plain.reads) == (3 + 1 + 3, 6 + 64 + 3)


def test_records_that_are_no_rows_of_tensors_are_read_as_they_are_asked_for():
    ragged = Counted(ragged=True)
    found = extremes.RepeatsReader(SeededReader(open_training(ragged), 0)).read(np.array([7, 3, 7]), epoch=0)
    assert [row.tolist() for row in found.inputs] == [INPUTS[at, : 2 + at % 4].tolist() for at in (7, 3, 7)]
