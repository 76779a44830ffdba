"""Noise that a loop seeds by the step alone is the same in all shards of it, and is refused with its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from trueline.errors import UsageError
from trueline.train.elastic import Elastic

INPUTS = torch.randn(96, 4, generator=torch.Generator().manual_seed(3))
Noise = Callable[[Any], torch.Tensor]
"""Of a batch."""


def train(noise: Noise) -> Elastic:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    data = TensorDataset(INPUTS, INPUTS.sum(dim=1, keepdim=True))
    job = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.05), data, global_batch=32)
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


def last_line(noise: Noise) -> int:
    return max(line for *_, line in noise.__code__.co_lines() if line is not None)


def of_the_records(batch: Any) -> torch.Tensor:
    own = torch.Generator().manual_seed(batch.step * len(INPUTS) + int(batch.records[0]))
    return torch.randn(batch.inputs.shape, generator=own)


def of_the_step(batch: Any) -> torch.Tensor:
    """One for all records of the step."""
    return torch.randn(4, generator=torch.Generator().manual_seed(batch.step))


def of_all_steps(batch: Any) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(batch.inputs.shape)


@pytest.mark.parametrize("noise", [of_the_records, of_the_step, of_all_steps, lambda b: torch.randn(b.inputs.shape)])
def test_noise_of_the_records_of_one_step_for_all_and_of_no_seed_trains(noise):
    assert train(noise)._plan.micro_batch == 4
