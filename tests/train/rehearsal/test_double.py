"""The trial in double precision finds a small part of a loss that compares records, which rounding hides in single
precision. A loss that cannot be computed in double precision is left to the trial in single precision."""

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


@pytest.mark.parametrize(
    "small",
    [lambda outputs: outputs.std(dim=0).mean(), lambda outputs: (outputs @ outputs.T).square().mean()],
    ids=["deviation", "pairs"],
)
def test_a_part_of_the_loss_that_compares_records_is_refused_however_small_its_factor_is(small):
    with pytest.raises(UsageError, match=r"in double precision, the loss of 13 records .* not made of its parts"):
        train(lambda outputs, batch: entropy(outputs, batch) + 5e-5 * small(outputs))


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
