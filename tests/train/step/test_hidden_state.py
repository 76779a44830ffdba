"""What a loop, a model or an optimizer keeps beside its parameters depends on no worker: it is shared, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trueline.errors import UsageError
from trueline.train.elastic import Elastic
from trueline.train.step.options import Options
from worlds.cases import few
from worlds.groups import together

pytestmark = pytest.mark.slow

RECORDS = 25


@pytest.fixture(autouse=True)
def _no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Centred(nn.Module):
    """Subtracts a moving mean, which a forward puts in the place of the last one, and counts its forwards."""

    mean: Tensor
    forwards: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("forwards", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
        self.forwards += 1
        return centred


class Forgetful(Centred):
    """Its buffers are no part of the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.register_buffer("forwards", torch.tensor(0), persistent=False)


class Codebook(nn.Module):
    """Adds to the sums of each code, so that twice the records change it twice as much."""

    size: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = nn.functional.one_hot(x[:, :3].argmax(dim=1), 3)
        scaled = x / self.size.sum()
        self.size = 0.9 * self.size + 0.1 * chosen.sum(dim=0)
        return scaled


class Follows(nn.Module):
    """A teacher that begins as its student, zeros included, so that the first average changes nothing."""

    def __init__(self, *, puts: bool = False) -> None:
        super().__init__()
        self.net, self.puts = nn.Linear(4, 4), puts
        nn.init.zeros_(self.net.bias)
        for name, value in self.net.named_parameters():
            self.register_buffer(f"its_{name}", value.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for name, value in self.net.named_parameters():
                its = getattr(self, f"its_{name}")
                if self.puts:
                    setattr(self, f"its_{name}", 0.9 * its + 0.1 * value)
                else:
                    its.lerp_(value, 0.1)
        outputs: Tensor = self.net(x) + nn.functional.linear(x, self.its_weight, self.its_bias)
        return outputs


class Langevin(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            for value in self.param_groups[0]["params"]:
                value += 0.01 * torch.randn_like(value)


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))


def loop(part: Callable[[], nn.Module], optimizer: Any = torch.optim.SGD, batch: int = 8, **options: Any) -> Any:
    """A loop of a user's own that clears gradients, to be run in each worker; it returns the state of the model."""

    def run() -> dict[str, Any]:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(RECORDS, 4), torch.randn(RECORDS, 1))
        model = nn.Sequential(part(), nn.Dropout(0.2), nn.Linear(4, 1)).double()
        advance = optimizer(model.parameters(), lr=0.1)
        job = Elastic(model, advance, data, global_batch=batch, epochs=3, options=Options(**options))
        for step in job:
            advance.zero_grad()
            job.step(((model(step.inputs.double()) - step.labels) ** 2).mean())
        return {name: value.tolist() for name, value in model.state_dict().items()}

    return run


@pytest.mark.parametrize(
    "run",
    few(
        [
            pytest.param(loop(Centred), id="a moving mean", marks=pytest.mark.long),
            pytest.param(loop(Forgetful), id="a moving mean that is not in the state_dict", marks=pytest.mark.jobs),
            pytest.param(loop(spectral, batch=4), id="power iterations, and a worker without records"),
            pytest.param(
                loop(Codebook, reduction="mean", micro_batch=4), id="a codebook by shards", marks=pytest.mark.long
            ),
            pytest.param(loop(Follows), id="a teacher that begins as its student"),
            pytest.param(loop(lambda: Follows(puts=True)), id="a teacher in new tensors", marks=pytest.mark.jobs),
            pytest.param(loop(spectral, bitwise=True), id="bitwise", marks=pytest.mark.long),
            pytest.param(loop(nn.Identity, Langevin), id="an optimizer that draws"),
        ],
        1,
        pytest.mark.jobs,
    ),
)
def test_buffers_that_forwards_change_and_what_an_optimizer_draws_are_equal_in_all_workers(run):
    (alone,), (one, other) = together(1, run), together(2, run)
    assert one == other
    for name, value in alone.items():
        torch.testing.assert_close(torch.tensor(one[name]), torch.tensor(value), rtol=1e-6, atol=1e-9)


def test_a_step_changes_buffers_as_one_forward_however_many_batches_it_has():
    assert loop(Centred)()["0.forwards"] == 3 * 4


def test_a_buffer_that_a_forward_does_not_change_by_a_mean_is_refused_before_the_first_step():
    with pytest.raises(UsageError, match=r"changes the model's buffer '0.size'.* off"):
        loop(Codebook)()


@pytest.mark.jobs
@pytest.mark.parametrize("optimizer", few([torch.optim.SGD, torch.optim.Adam], 1, pytest.mark.jobs))
def test_a_loop_that_clears_gradients_before_each_of_a_steps_batches_trains_with_all_of_them(optimizer):
    """Its dropout cuts a step into shards: one process has two batches of four records in each step."""

    def run(*, clears: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 1))
        advance = optimizer(model.parameters(), lr=0.1)
        job = Elastic(model, advance, TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), global_batch=8)
        for step in job:
            if clears:
                advance.zero_grad(set_to_none=step.step % 2 == 0)
            job.step(((model(step.inputs) - step.labels) ** 2).mean())
        return [value.tolist() for value in model.parameters()]

    assert run(clears=True) == run(clears=False)


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("first", "why"),
    [(0, "sets the optimizer's numbers .* instead of"), (1, "changes 'lr' .* between two batches of step 1")],
)
def test_a_rate_that_the_loop_changes_with_each_batch_ends_the_job_before_that_step(first, why):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 1))
    advance = torch.optim.SGD(model.parameters(), lr=0.5)
    job = Elastic(model, advance, TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), global_batch=8)

    def train() -> None:
        for step in job:
            job.step(((model(step.inputs) - step.labels) ** 2).mean())
            if job._replica.ledger.steps >= first:  # which no trial reaches
                advance.param_groups[0]["lr"] *= 0.5

    with pytest.raises(UsageError, match=why):
        train()
    assert job.steps == first
