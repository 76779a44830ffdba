"""Nothing that is not finite is applied: the records that make gradients or a loss of a loop infinite are found, named
and left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trueline.errors import TrainError, UsageError
from trueline.train.elastic import Elastic
from trueline.train.step.options import Options
from trueline.train.step.plan import JobPlan
from worlds.cases import few

pytestmark = pytest.mark.slow

RECORDS, BATCH = 60, 12


class World:
    """A loop of a user's own; `bad` records have an infinite number among their inputs."""

    def __init__(self, bad: dict[int, float], **options: Any) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.advance = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        self.inputs = torch.randn(RECORDS, 4, dtype=torch.float64)
        for record, value in bad.items():
            self.inputs[record, 1] = value
        self.labels = torch.arange(RECORDS).double()[:, None] / RECORDS
        self.suspects: dict[int, str] = {}
        self.options = Options(**options)

    def loss(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        return ((model(inputs) - labels) ** 2).mean()

    def train(self) -> None:
        data = TensorDataset(self.inputs, self.labels)
        job = Elastic(self.model, self.advance, data, global_batch=BATCH, epochs=2, options=self.options)
        suspect = job._link.suspect

        def note(step: int, record: int, why: str, where: str) -> None:
            self.suspects[record] = why
            suspect(step, record, why, where)

        job._link.suspect = note  # type: ignore[method-assign]
        for batch in job:
            job.step(self.loss(self.model, batch.inputs, batch.labels))

    def train_plainly(self, without: set[int]) -> list[Tensor]:
        """The weights of a plain loop over the same steps without some records."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        advance = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        plan = JobPlan(num_records=RECORDS, global_batch=BATCH, epochs=2, seed=0)
        for step in range(plan.total_steps):
            ids = [at for at in plan.records(step).tolist() if at not in without]
            advance.zero_grad()
            self.loss(model, self.inputs[ids], self.labels[ids]).backward()  # type: ignore[no-untyped-call]
            advance.step()
        return list(model.parameters())


def expect_trained_without(world: World, bad: set[int]) -> None:
    for mine, plain in zip(world.model.parameters(), world.train_plainly(bad), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    few([{}, {"micro_batch": 4}, {"bitwise": True, "micro_batch": 4}, {"clip_norm": 1e6}], 2, pytest.mark.jobs),
)
def test_an_infinite_number_that_tanh_hides_from_the_loss_costs_its_record_and_no_step(options: dict[str, Any]) -> None:
    """The loss of such a record is finite, and the gradient of the first layer is zero times infinity."""
    world = World({17: math.inf, 38: -math.inf}, **options)
    world.train()
    assert world.suspects == dict.fromkeys((17, 38), "its gradient of 0.weight is not finite")
    expect_trained_without(world, {17, 38})


@pytest.mark.jobs
def test_a_record_whose_loss_is_no_number_is_left_out_of_a_loop_too() -> None:
    world = World({17: math.nan})
    world.train()
    assert world.suspects == {17: "its loss is nan"}
    expect_trained_without(world, {17})


@pytest.mark.jobs
def test_a_record_with_new_zeros_whose_gradient_is_no_number_is_left_out_and_no_reason_to_refuse() -> None:
    """It is the only one with zeros: its step tries it first, as what may count otherwise."""

    def rooted(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        sizes = (inputs.square().sum(dim=1) * model[0].weight[0, 0] ** 2).sqrt()  # type: ignore[index]
        return ((model(inputs) - labels) ** 2).mean() + sizes.mean()

    world = World({})
    world.inputs[17] = 0.0
    world.loss = rooted  # type: ignore[method-assign]
    world.train()
    assert world.suspects == {17: "its gradient of 0.weight is not finite"}
    expect_trained_without(world, {17})


class Follows(nn.Module):
    """Its buffer follows numbers that its outputs do not show."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Any:
        self.seen += 0.1 * (inputs.detach().exp().mean() - self.seen)
        return self.net(inputs)


@pytest.mark.jobs
def test_a_record_that_makes_a_buffer_infinite_is_left_out() -> None:
    world = World({17: 1e4})
    world.model = Follows()
    world.advance = torch.optim.SGD(world.model.parameters(), lr=0.05)
    world.train()
    assert world.suspects == {17: "it makes the buffer seen infinite"}
    assert all(bool(value.isfinite().all()) for value in world.model.state_dict().values())


def everywhere(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return ((model(inputs) - labels) ** 2).mean() + (inputs[:, 0] * 0 + model[0].bias.sum() * 0).sqrt().mean()  # type: ignore[index]


@pytest.mark.jobs
@pytest.mark.parametrize("how", ["gradients", "loss"])
def test_where_all_records_are_not_finite_the_training_has_diverged_and_no_record_is_named(how: str) -> None:
    world = World({})
    change: Callable[..., Tensor] = everywhere if how == "gradients" else lambda *given: everywhere(*given) * math.inf
    world.loss = change  # type: ignore[method-assign]
    before = [value.tolist() for value in world.model.parameters()]
    with pytest.raises(TrainError, match=rf"the {how} of step 0 (are|is) not finite") as caught:
        world.train()
    assert world.suspects == {}
    assert [value.tolist() for value in world.model.parameters()] == before
    assert "lower the learning rate" in caught.value.hint


def test_a_buffer_that_begins_as_infinite_and_moves_is_refused_before_the_first_step() -> None:
    class Least(Follows):
        def forward(self, inputs: Tensor) -> Any:
            self.seen = torch.minimum(self.seen, inputs.detach().min())
            return self.net(inputs)

    world = World({})
    world.model = Least()
    world.model.seen.fill_(math.inf)
    world.advance = torch.optim.SGD(world.model.parameters(), lr=0.05)
    with pytest.raises(UsageError, match="changes the model's buffer 'seen'") as caught:
        world.train()
    assert "begin" in caught.value.message + caught.value.hint
