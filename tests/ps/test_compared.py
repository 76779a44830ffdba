"""A worker with parameter servers whose loss is not the first worker's takes no minibatch."""

from __future__ import annotations

import ctypes
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from trueline import errors, events
from trueline.data.sources.map_style import DatasetSource
from trueline.ps import compared
from trueline.ps.compared import ServedComparison
from trueline.ps.model.embedding import Embedding
from trueline.ps.model.strategy import ServedModel
from trueline.train.api import train
from trueline.train.settings import JobSettings
from trueline.train.step.model_traits import ModelTraits
from worlds.recipes import TEACHES, untrained


@pytest.mark.jobs
def test_a_recipe_whose_features_each_worker_draws_ends_the_job_before_the_second_one_trains(tmp_path):
    (tmp_path / "teaches.py").write_text(TEACHES)
    trained = set[str]()
    listener = events.listening(lambda _, fields: trained.add(fields.get("worker", "")) if "loss" in fields else None)
    with listener, pytest.raises(errors.UsageError, match="uses the recipe's FEATURES, which is not that of the first"):
        train(tmp_path / "teaches.py", job_dir=tmp_path / "job", strategy="ps", workers=2, servers=1)
    assert len(trained - {""}) <= 1


class Words(torch.nn.Module):
    """Rows of words whose ids follow from a number that no look at names shows."""

    def __init__(self, salt: int) -> None:
        super().__init__()
        self.salt, self.words, self.head = ctypes.c_long(salt), Embedding(4, init="zeros"), torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.words(ids + self.salt.value))
        return out


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Compares a worker's model and loss with those of the first worker, which are the first that it is called with."""
    settled: list[str] = []

    def settle(traits: ModelTraits) -> ModelTraits:
        settled.append(json.dumps(dataclasses.asdict(traits)))
        return traits

    monkeypatch.setattr(compared, "settle_traits", settle)
    monkeypatch.setattr(compared, "load_traits", lambda _: ModelTraits(**json.loads(settled[0])) if settled else None)

    def expect(make: Callable[[], torch.nn.Module], loss: Callable[..., Any], labels: int = 3) -> None:
        torch.manual_seed(0)
        model = make()
        recipe = dataclasses.replace(untrained(make), loss=loss)
        served = ServedModel(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=3)
        source = DatasetSource(TensorDataset(torch.arange(40), torch.arange(40.0)[:, None] % labels), mode="training")
        settings = JobSettings(name="words", recipe="", recipe_digest="", workers=2, epochs=1, global_batch=8, seed=0)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        ServedComparison(recipe, served, source, settings).expect_alike()
        torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
        assert all(value.grad is None for value in model.parameters())

    return expect


def error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((outputs - labels) ** 2).mean()


def test_ids_of_a_table_that_begins_with_zeros_are_those_of_the_first_worker(compare):
    for _ in range(2):
        compare(lambda: Words(0), error)
    with pytest.raises(errors.UsageError, match="is not that of the first worker"):
        compare(lambda: Words(1), error)


def test_records_that_are_not_those_of_the_first_worker_are_refused(compare):
    for _ in range(2):
        compare(lambda: Words(0), error)
    with pytest.raises(errors.DataError, match="is another one than when the job began"):
        compare(lambda: Words(0), error, labels=4)


def test_what_only_the_gradients_that_are_pushed_show_is_compared(compare):
    def scaled_back(scale: float) -> Callable[..., Any]:
        hidden = ctypes.c_double(scale)

        def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            scaled = outputs * hidden.value
            return error(scaled + (outputs - scaled).detach(), labels)

        return loss

    for _ in range(2):
        compare(lambda: Words(0), scaled_back(1.0))
    with pytest.raises(errors.UsageError, match="the gradients of the same records"):
        compare(lambda: Words(0), scaled_back(2.0))


def test_a_loss_that_fails_for_every_record_is_left_to_its_minibatches(compare):
    def fail(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise ValueError("the labels look odd")

    for _ in range(2):
        compare(lambda: Words(0), fail)
