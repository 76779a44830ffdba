"""Further trials of a loss. In double precision a small part that compares records is found, which rounding hides in
single precision; with other values of numbers that code looks at, what decides by a loss or an accuracy is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from trueline.errors import UsageError
from trueline.train import api
from trueline.train.elastic import Elastic
from trueline.train.rehearsal import fork

INPUTS = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, (INPUTS.sum(dim=1) > 0).long())


def train(loss_of: Callable[[Tensor, Any], Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    job = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.05), DATA, global_batch=24)
    for batch in job:
        job.step(loss_of(model(batch.inputs), batch))
    assert job.steps == 4
    assert all(value.dtype == torch.float32 for value in model.parameters())


def entropy(outputs: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(outputs, batch.labels)


@pytest.mark.jobs
@pytest.mark.parametrize(
    "small",
    [lambda outputs: outputs.std(dim=0).mean(), lambda outputs: (outputs @ outputs.T).square().mean()],
    ids=["deviation", "pairs"],
)
def test_a_part_of_the_loss_that_compares_records_is_refused_however_small_its_factor_is(small):
    with pytest.raises(UsageError, match=r"in double precision, the loss of 13 records .* not made of its parts"):
        train(lambda outputs, batch: entropy(outputs, batch) + 5e-5 * small(outputs))


def accuracy(outputs: Tensor, batch: Any) -> float:
    return float((outputs.argmax(dim=1) == batch.labels).float().mean())


def decide(value: Tensor, *, by: Any) -> Tensor:
    return 0.1 * value if by else value


@pytest.mark.jobs
@pytest.mark.parametrize(
    "loss_of",
    [
        lambda outputs, batch: decide(value := entropy(outputs, batch), by=value < 0.3),
        lambda outputs, batch: decide(value := entropy(outputs, batch), by=value.item() < 0.3),
        lambda outputs, batch: (value := entropy(outputs, batch)) * (0.1 + (value > 0.3)),
        lambda outputs, batch: (value := entropy(outputs, batch)) * min(1.0, 20.0 / float(value.detach())),
        lambda outputs, batch: decide(entropy(outputs, batch), by=accuracy(outputs, batch) > 0.95),
    ],
    ids=["a loss", "its number", "a factor", "the smaller of two numbers", "an accuracy"],
)
def test_a_loss_that_decides_by_a_number_of_its_batch_is_refused_though_all_parts_are_on_one_side(loss_of):
    with pytest.raises(UsageError, match=r"a number of the batch that the code looks at .* times as large"):
        train(loss_of)


@pytest.mark.jobs
def test_numbers_that_decide_nothing_or_are_those_of_all_workers_train():
    bound, logged = torch.tensor(0.7), list[float]()

    def log(value: Tensor) -> Tensor:
        logged.append(value.item())
        return value

    for loss_of in (
        lambda outputs, batch: log(entropy(outputs, batch)),
        lambda outputs, batch: decide(entropy(outputs, batch), by=bound > 0.5),
        lambda outputs, batch: decide(value := entropy(outputs, batch), by=not value.isfinite()),
        lambda outputs, batch: decide(entropy(outputs, batch), by=len(outputs) > 10_000),
        lambda outputs, batch: (
            functional.cross_entropy(outputs, batch.labels, reduction="sum") / torch.ones(len(outputs)).sum().item()
        ),
    ):
        train(loss_of)
    assert logged


@pytest.mark.jobs
def test_what_double_precision_cannot_decide_and_what_it_confirms_trains(monkeypatch):
    """A mean whose divisor has a constant against zero is one to six digits."""
    monkeypatch.setattr(fork, "wants_double", lambda *_: True)
    for loss_of in (
        entropy,
        lambda outputs, batch: functional.cross_entropy(outputs, batch.labels, reduction="sum"),
        lambda outputs, batch: functional.cross_entropy(outputs, batch.labels, reduction="sum") / (len(outputs) + 1e-7),
        lambda outputs, batch: functional.binary_cross_entropy_with_logits(outputs[:, 0], batch.labels.float()),
        lambda outputs, batch: entropy(outputs.float(), batch) + 1e-5 * outputs.float().std(dim=0).mean(),
    ):
        train(loss_of)


RECIPE = """
import torch
from torch.utils.data import TensorDataset

name, epochs, global_batch = "small", 1, 24

def model():
    return torch.nn.Linear(4, 2)

def loss(outputs, labels):
    return torch.nn.functional.cross_entropy(outputs, labels) + 5e-5 * outputs.std(dim=0).mean()

def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)

def dataset(mode):
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
"""


@pytest.mark.jobs
def test_a_recipe_with_such_a_part_ends_before_its_first_step(tmp_path):
    (tmp_path / "small.py").write_text(RECIPE)
    with pytest.raises(UsageError, match="in double precision"):
        api.train(tmp_path / "small.py", job_dir=tmp_path / "job", workers=2)
    assert not list((tmp_path / "job").glob("checkpoints/step-*"))
