"""A trial of a large model's loss keeps little of its gradients, and still finds what it has to."""

from typing import Any

import pytest
import torch

from trueline.data.loading.seeding import SeededReader
from trueline.data.sources.map_style import DatasetSource
from trueline.errors import UsageError
from trueline.train.step import reduction, trial
from trueline.train.step.options import Options


class Wide(torch.nn.Module):
    """A table that most records leave alone, and 900,000 weights in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(36_000, 25)
        self.last = torch.nn.Linear(25, 36_000)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.last(self.table(ids))


def attempt(loss_of: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[int]]:
    """The reduction that a trial finds, and the elements that it kept of each gradient."""
    kept: list[int] = []
    decide = reduction.decide

    def note(whole: Any, cuts: Any, *rest: Any, **named: Any) -> Any:
        kept.extend(sample.gradient.nbytes for sample in (whole, *(part for cut in cuts for part in cut)))
        return decide(whole, cuts, *rest, **named)

    monkeypatch.setattr(reduction, "decide", note)
    model = Wide()
    data = torch.utils.data.TensorDataset(torch.arange(30) * 1000, torch.arange(30) * 999)
    tried = trial.LossTrial(
        trial.TrialInputs(
            model=model, reader=SeededReader(DatasetSource(data, mode="training"), 0), num_records=30, seed=0,
            global_batch=16, options=Options(),
        )
    )  # fmt: skip
    for batch in tried.batches():
        tried.take(loss_of(model(batch.inputs), batch.labels), None, len(batch.records))
    return tried.traits.reduction, kept


def scores(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, labels, reduction="none")


def test_the_gradients_that_a_trial_keeps_of_a_large_model_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    how, kept = attempt(lambda outputs, labels: scores(outputs, labels).sum(), monkeypatch)
    assert how == "sum"
    assert len(kept) == 5
    assert max(kept) < 2 << 20  # whole, in double: 14 MB


def test_what_it_keeps_is_enough_to_find_a_loss_that_is_not_made_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_batch(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = scores(outputs, labels)
        return found.mean() + 0.1 * (found - found.mean()).square().mean()

    with pytest.raises(UsageError, match="not made of its parts"):
        attempt(by_batch, monkeypatch)


def test_a_trial_that_ends_at_a_record_leaves_no_gradient_for_the_next_one() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    data = torch.utils.data.TensorDataset(torch.randn(30, 4), torch.zeros(30, dtype=torch.int64))
    tried = trial.LossTrial(
        trial.TrialInputs(
            model=model, reader=SeededReader(DatasetSource(data, mode="training"), 0), num_records=30, seed=0,
            global_batch=16, options=Options(),
        )
    )  # fmt: skip
    batches = tried.batches()
    for _ in range(3):
        batch = next(batches)
        tried.take(scores(model(batch.inputs), batch.labels).mean(), None, len(batch.records))
    batches.close()  # code of the loop has raised for this one
    assert [value.grad for value in model.parameters()] == [None, None]
