"""A loop that asks torch.distributed for its rank, or calls its collectives, is refused where its loss uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from trueline.errors import UsageError
from trueline.train.elastic import Elastic

INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(3))


def train(weigh: Callable[[torch.Tensor], torch.Tensor]) -> Elastic:
    """`weigh`: of the squares of a batch their loss."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = TensorDataset(INPUTS, INPUTS.sum(dim=1, keepdim=True))
    job = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.05), data, global_batch=16)
    for batch in job:
        job.step(weigh((model(batch.inputs) - batch.labels).square()))
    return job


def mean_of_all(squares: torch.Tensor) -> torch.Tensor:
    count = torch.tensor(float(len(squares)))
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(count)
    return squares.sum() / count


def test_a_collective_of_the_loop_is_refused_with_its_line_and_what_to_write():
    line = mean_of_all.__code__.co_firstlineno + 3
    with pytest.raises(UsageError, match=rf"line {line} of test_ranks\.py calls torch\.distributed's all_red") as told:
        train(mean_of_all)
    assert "job.step(loss, weight=count)" in str(told.value.hint)


def of_the_size(squares: torch.Tensor) -> torch.Tensor:
    return squares.mean() * (dist.get_world_size() if dist.is_initialized() else 1)


def of_the_rank(squares: torch.Tensor) -> torch.Tensor:
    return squares.mean() if not dist.is_initialized() or dist.get_rank() == 0 else 0.5 * squares.mean()


@pytest.mark.jobs
@pytest.mark.parametrize("weigh", [of_the_size, of_the_rank])
def test_a_loss_of_the_rank_or_the_number_of_workers_is_refused(weigh):
    with pytest.raises(UsageError, match="a number of workers") as refused:
        train(weigh)
    assert "job.leads" in str(refused.value.hint)


@pytest.mark.jobs
def test_a_loop_that_only_prints_by_its_rank_trains(capsys):
    def print_first(squares: torch.Tensor) -> Any:
        if not dist.is_initialized() or dist.get_rank() == 0:
            print("loss", float(squares.detach().mean()))
        return squares.mean()

    assert train(print_first).steps == 3
    assert "loss" in capsys.readouterr().out
