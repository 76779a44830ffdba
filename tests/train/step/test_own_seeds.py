"""Noise that a loop seeds by the step alone is the same in all shards of it, and is refused with its line."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from trueline.errors import UsageError
from trueline.train.elastic import Elastic
from trueline.train.step.options import Options
from trueline.train.step.parts.own_seeds import DrawnNumbers, _expect_no_same_draws
from worlds.cases import few

INPUTS = torch.randn(96, 4, generator=torch.Generator().manual_seed(3))
Noise = Callable[[Any], torch.Tensor]
"""Of a batch."""


def train(noise: Noise, **options: Any) -> Elastic:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    data = TensorDataset(INPUTS, INPUTS.sum(dim=1, keepdim=True))
    optimizer, chosen = torch.optim.SGD(model.parameters(), lr=0.05), Options(**options)
    job = Elastic(model, optimizer, data, global_batch=32, options=chosen)
    for batch in job:
        job.step((model(batch.inputs + noise(batch)) - batch.labels).square().mean())
    return job


def of_the_process(batch: Any) -> torch.Tensor:
    torch.manual_seed(batch.step)
    return torch.randn(batch.inputs.shape)


def of_its_own(batch: Any) -> torch.Tensor:
    return torch.rand(batch.inputs.shape, generator=torch.Generator().manual_seed(batch.step + 7))


@pytest.mark.parametrize("noise", [of_the_process, of_its_own])
def test_noise_seeded_by_the_step_alone_is_refused_with_its_line_and_what_to_seed_by(noise):
    line = last_line(noise)
    with pytest.raises(UsageError, match=rf"draw the same numbers in test_own_seeds\.py:{line}: seeded by") as refused:
        train(noise)
    assert "batch.records[0]" in str(refused.value.hint)


def of_numpy(batch: Any) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(batch.step).normal(size=batch.inputs.shape)).float()


def of_numpys_global(batch: Any) -> torch.Tensor:
    before = np.random.get_state()
    np.random.seed(batch.step)
    drawn = np.random.normal(size=batch.inputs.shape)
    np.random.set_state(before)
    return torch.from_numpy(drawn).float()


def of_python(batch: Any) -> torch.Tensor:
    own = random.Random(batch.step + 7)
    return torch.tensor([[own.gauss(0, 1) for _ in row] for row in batch.inputs])


KEPT = np.random.RandomState(0)


def of_one_that_is_kept(batch: Any) -> torch.Tensor:
    KEPT.seed(batch.step)
    return torch.from_numpy(KEPT.normal(size=batch.inputs.shape)).float()


@pytest.mark.parametrize(
    ("noise", "line", "options"),
    [
        (of_numpy, 1, {}),
        pytest.param(of_numpys_global, 2, {"reduction": "mean"}, marks=pytest.mark.jobs),
        (of_python, 1, {"reduction": "mean", "micro_batch": 4}),
        pytest.param(of_python, 1, {}, marks=pytest.mark.jobs),
        pytest.param(of_one_that_is_kept, 0, {"reduction": "mean"}, marks=pytest.mark.jobs),
    ],
)
def test_noise_of_numpy_and_random_seeded_by_the_step_alone_is_refused_with_the_line_of_its_seed(noise, line, options):
    where = rf"in test_own_seeds\.py:{noise.__code__.co_firstlineno + line} " if line else ""
    with pytest.raises(UsageError, match=rf"same numbers from numpy or random, .* seeded {where}by the") as refused:
        train(noise, **options)
    assert "[batch.step, int(record)]" in str(refused.value.hint)


def test_noise_of_torch_seeded_by_the_step_alone_is_refused_where_shards_are_of_few_records():
    with pytest.raises(UsageError, match="draw the same numbers"):
        train(of_its_own, reduction="mean", micro_batch=3)


def last_line(noise: Noise) -> int:
    return max(line for *_, line in noise.__code__.co_lines() if line is not None)


def of_the_records(batch: Any) -> torch.Tensor:
    own = torch.Generator().manual_seed(batch.step * len(INPUTS) + int(batch.records[0]))
    return torch.randn(batch.inputs.shape, generator=own)


def of_the_step(batch: Any) -> torch.Tensor:
    """One for all records of the step."""
    return torch.randn(4, generator=torch.Generator().manual_seed(batch.step))


def of_numpy_for_each_record(batch: Any) -> torch.Tensor:
    each = [np.random.default_rng([batch.step, int(record)]).normal(size=4) for record in batch.records]
    return torch.from_numpy(np.stack(each)).float()


def of_numpy_for_the_step(batch: Any) -> torch.Tensor:
    """One for all records of the step, and the same one for each record."""
    each = [random.Random(batch.step).random() for _ in batch.records]
    return torch.tensor(each)[:, None] + float(np.random.default_rng(batch.step).normal())


@pytest.mark.jobs
@pytest.mark.parametrize("noise", [of_numpy_for_each_record, of_numpy_for_the_step])
def test_numbers_of_numpy_for_each_record_or_for_the_step_need_no_shards(noise):
    assert train(noise)._plan.micro_batch == 0


def test_small_masks_that_are_the_same_by_chance_are_not_taken_for_noise_of_the_step():
    mask, few = DrawnNumbers(5, (1.0, 1.0, 1.0, 0.0, 1.0), "a.py:1"), DrawnNumbers(4, (1.0,) * 4, "a.py:1")
    later = mask._replace(first=(1.0,) * 5)
    _expect_no_same_draws([[mask], [mask], [mask], [few], [later]])
    noise, longer = mask._replace(first=(0.1, 0.5, 0.7, 0.2, 0.3)), few._replace(first=(0.1, 0.5, 0.7, 0.2))
    with pytest.raises(UsageError, match=r"in a\.py:1"):
        _expect_no_same_draws([[noise], [noise], [noise], [longer], [later]])


def of_all_steps(batch: Any) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(batch.inputs.shape)


@pytest.mark.parametrize(
    "noise",
    few([of_the_records, of_the_step, of_all_steps, lambda b: torch.randn(b.inputs.shape)], 1, pytest.mark.jobs),
)
def test_noise_of_the_records_of_one_step_for_all_and_of_no_seed_trains(noise):
    assert train(noise)._plan.micro_batch == 4
