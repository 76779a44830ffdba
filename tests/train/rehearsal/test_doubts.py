"""A loss that depends on what fewer than one of 512 records have, which no trial before the first step has seen, ends
before the step that has it; a loss that only looks like one trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from trueline import events
from trueline.errors import UsageError
from trueline.train.elastic import Elastic
from trueline.train.step import features
from trueline.train.step.options import Options
from worlds.cases import few

pytestmark = pytest.mark.slow

RECORDS = 1200
LOOKED_AT = np.linspace(0, RECORDS - 1, features.POOL).astype(int)
RARE = min(set(range(600, 700)) - set(LOOKED_AT.tolist()))
Loss = Callable[[nn.Module, Any], Tensor]


def records() -> list[Tensor]:
    made = torch.Generator().manual_seed(3)
    inputs = torch.randn(RECORDS, 4, generator=made, dtype=torch.float64).clamp(-2.5, 2.5)
    return [inputs, inputs.sin().sum(dim=1, keepdim=True)]


def train(loss_of: Loss, data: list[Tensor], outputs: int = 1, **options: Any) -> tuple[int, list[str]]:
    """Steps that were applied, and what was doubted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)).double()
    advance = torch.optim.SGD(model.parameters(), lr=0.05)
    job = Elastic(model, advance, TensorDataset(*data), global_batch=24, options=Options(**options))
    applied, doubted = 0, list[str]()
    with events.listening(lambda name, one: doubted.append(str(one["why"])) if name == "loss.doubted" else None):
        for batch in job:
            applied += job.step(loss_of(model, batch))
    return applied, doubted


def off(model: nn.Module, batch: Any) -> Tensor:
    return ((model(batch.inputs) - batch.labels.nan_to_num()) ** 2)[:, 0]


def present(batch: Any) -> Tensor:
    return ~batch.labels[:, 0].isnan()


def by_count(model: nn.Module, batch: Any) -> Tensor:
    return (off(model, batch) * present(batch)).sum() / present(batch).sum()


def by_index(model: nn.Module, batch: Any) -> Tensor:
    return off(model, batch)[present(batch)].mean()


def rare_extra(model: nn.Module, batch: Any) -> Tensor:
    absent = ~present(batch)
    return off(model, batch).mean() + 5 * (model(batch.inputs)[:, 0] * absent).sum() / absent.sum().clamp(min=1)


def rare_branch(model: nn.Module, batch: Any) -> Tensor:
    loss, absent = off(model, batch).mean(), ~present(batch)
    return loss + model(batch.inputs)[absent].square().mean() if absent.any() else loss


def by_threshold(model: nn.Module, batch: Any) -> Tensor:
    """No feature of a record shows it."""
    usual = batch.inputs[:, 0] < 50
    return (off(model, batch) * usual).sum() * (1.0 / usual.sum())


@pytest.mark.jobs
@pytest.mark.parametrize(
    "loss_of", few([by_count, by_index, rare_extra, rare_branch, by_threshold], 2, pytest.mark.jobs)
)
@pytest.mark.parametrize("looks", [True, False])
def test_a_loss_that_counts_what_few_records_have_ends_before_the_step_that_has_it(loss_of, looks, monkeypatch):
    if not looks:  # as where a record shows nothing: what the loss divides by is left
        if loss_of is rare_extra:
            pytest.skip("what it divides by is 1 without and with one such record")
        monkeypatch.setattr(features.Looks, "columns", lambda _: [])
    data = records()
    data[1][RARE] = np.nan
    data[0][RARE, 0] = 60.0
    words = r"step \d+ has "
    if loss_of is rare_branch:  # another operator shows these records before the first step, if there is time
        words += "|with records that few steps have together"
    with pytest.raises(UsageError, match=words) as refused:
        train(loss_of, data)
    assert "weight" in refused.value.hint


@pytest.mark.jobs
def test_a_loss_that_counts_what_few_records_have_trains_with_its_weight_or_over_whole_shards():
    data = records()
    data[1][RARE] = np.nan
    assert train(by_count, data, reduction="mean", micro_batch=24) == (50, [])


def test_a_loop_whose_code_fails_in_that_trial_meets_the_record_in_its_step():
    def fails(model: nn.Module, batch: Any) -> Tensor:
        if not present(batch).all():
            raise ValueError("a missing value")
        return off(model, batch).mean()

    data = records()
    data[1][RARE] = np.nan
    with pytest.raises(ValueError, match="a missing value"):
        train(fails, data)


def scheduled(model: nn.Module, batch: Any) -> Tensor:
    return off(model, batch).sum() / (len(batch.records) * (1.0 + batch.step))


def warmed(model: nn.Module, batch: Any) -> Tensor:
    loss = off(model, batch).mean()
    return loss + 0.1 * model(batch.inputs).square().mean() if batch.step > 3 else loss


@pytest.mark.jobs
@pytest.mark.parametrize("loss_of", [scheduled, warmed])
def test_a_loss_that_follows_from_the_step_is_tried_once_more_and_trains(loss_of):
    applied, doubted = train(loss_of, records())
    assert (applied, len(doubted)) == (50, 1)


@pytest.mark.jobs
def test_a_record_that_is_something_new_is_tried_and_trains_where_the_loss_is_a_mean_all_the_same():
    data = records()
    data[0][RARE, 1] = 0.0
    data[1] = torch.randint(0, 3, (RECORDS,), generator=torch.Generator().manual_seed(1))
    data[1][RARE] = 3
    applied, doubted = train(lambda model, batch: cross_entropy(model(batch.inputs), batch.labels), data, outputs=4)
    assert (applied, len(doubted)) == (50, 2)
    assert sorted(why.split(" that was")[0] for why in doubted) == [
        "has records with a label that no record had", "has records with another number of zeros than all records"
    ]  # fmt: skip
