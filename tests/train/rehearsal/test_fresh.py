"""What a loss remembers of earlier batches, wherever that is, is refused before the first step, since a worker that
joins remembers nothing. What it only keeps trains."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trueline.data.sources.map_style import DatasetSource
from trueline.errors import UsageError
from trueline.train.elastic import Elastic
from trueline.train.settings import JobSettings
from trueline.train.worker.recipe_trial import RecipeTrial
from worlds.cases import few
from worlds.recipes import untrained

INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, torch.arange(40)[:, None])
Loss = Callable[[nn.Module, Any, Tensor], Tensor]
"""Of the model, the inputs and the numbers of the records."""


def targets_of_the_first_visit() -> Loss:
    model: list[nn.Module] = []

    @functools.cache
    def target(record: int) -> Tensor:
        found: Tensor = model[0](INPUTS[record]).detach()
        return found

    def loss(trained: nn.Module, inputs: Tensor, records: Tensor) -> Tensor:
        model[:] = [trained]
        return (trained(inputs) + 1 - torch.stack([target(int(one)) for one in records.flatten()])).square().mean()

    return loss


def history_of_each_record() -> Loss:
    history: dict[int, float] = {}

    def loss(model: nn.Module, inputs: Tensor, records: Tensor) -> Tensor:
        losses = (model(inputs) - 1).square().flatten()
        for record, now in zip(records.flatten().tolist(), losses.detach().tolist(), strict=True):
            history[record] = 0.7 * history.get(record, now) + 0.3 * now
        return (losses * torch.tensor([history[one] for one in records.flatten().tolist()])).mean()

    return loss


def mean_of_the_first_batch() -> Loss:
    class Scaler:
        mean: Tensor | None = None

    def loss(model: nn.Module, inputs: Tensor, records: Tensor) -> Tensor:
        if Scaler.mean is None:
            Scaler.mean = inputs.mean(dim=0)
        out: Tensor = (model(inputs - Scaler.mean) - 1).square().mean()
        return out

    return loss


def noise_that_is_drawn_once_for_each_record() -> Loss:
    @functools.cache
    def noise(_: int) -> Tensor:
        return torch.randn(4)

    def loss(model: nn.Module, inputs: Tensor, records: Tensor) -> Tensor:
        noisy = inputs + torch.stack([noise(int(one)) for one in records.flatten()])
        out: Tensor = (model(noisy) - 1).square().mean()
        return out

    return loss


def weights_of_the_first_forward() -> Loss:
    class Frozen:
        weight: Tensor

    def loss(model: nn.Module, inputs: Tensor, records: Tensor) -> Tensor:
        if not hasattr(Frozen, "weight"):
            Frozen.weight = next(model.parameters()).detach().clone()
        return (model(inputs) - (inputs @ Frozen.weight.T).sum(dim=1, keepdim=True)).square().mean()

    return loss


def what_follows_from_the_record_alone() -> Loss:
    seen: list[float] = []

    @functools.cache
    def target(record: int) -> Tensor:
        return INPUTS[record].sin().sum(dim=0, keepdim=True)

    @functools.cache
    def project() -> Tensor:
        return torch.randn(4, 4, generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module, inputs: Tensor, records: Tensor) -> Tensor:
        targets = torch.stack([target(int(one)) for one in records.flatten()])
        out: Tensor = (model(inputs @ project()) - targets).square().mean()
        seen.append(float(out.detach()))
        return out

    return loss


REMEMBERING = [
    targets_of_the_first_visit, history_of_each_record, mean_of_the_first_batch,
    noise_that_is_drawn_once_for_each_record, weights_of_the_first_forward,
]  # fmt: skip


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def train(loss: Loss) -> None:
    model = make_model()
    job = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01), DATA, global_batch=8, epochs=3)
    for batch in job:
        job.step(loss(model, batch.inputs, batch.labels))


def try_recipe(loss: Loss) -> None:
    model = make_model()
    recipe = dataclasses.replace(
        untrained(make_model), loss=lambda _, labels: loss(model, INPUTS[labels[:, 0]], labels)
    )
    settings = JobSettings(name="small", recipe="", recipe_digest="", workers=1, epochs=1, global_batch=8, seed=0)
    RecipeTrial(recipe, model, DatasetSource(DATA, mode="training"), settings).find_traits()


@pytest.mark.parametrize("run", [train, try_recipe])
@pytest.mark.parametrize("make", few(REMEMBERING, 3, pytest.mark.jobs))
def test_what_a_loss_remembers_of_earlier_batches_is_refused_though_it_has_no_name(make, run):
    with pytest.raises(UsageError, match="once other batches were computed"):
        run(make())


def slowed_by_the_last_gradients(model: nn.Module, inputs: Tensor, records: Tensor) -> Tensor:
    norms = [value.grad.norm() for value in model.parameters() if value.grad is not None]
    out: Tensor = (model(inputs) - 1).square().mean() / (1.0 + sum(norms))
    return out


def test_a_loss_that_uses_the_gradients_of_the_last_step_is_refused_since_a_loop_finds_none():
    with pytest.raises(UsageError, match=r"the loss uses the gradients of the parameters \(\.grad\)"):
        train(slowed_by_the_last_gradients)


@pytest.mark.jobs
@pytest.mark.parametrize("run", [train, try_recipe])
def test_caches_of_what_follows_from_a_record_and_histories_that_no_loss_reads_train(run):
    run(what_follows_from_the_record_alone())


def by_share(job: Elastic, batch: Any) -> float:
    return float(batch.weight)


def by_last(job: Elastic, batch: Any) -> float:
    return 1.0 + batch.last


def by_leader(job: Elastic, batch: Any) -> float:
    return 1.0 + job.leads


@pytest.mark.jobs
@pytest.mark.parametrize("scale", [by_share, by_last, by_leader])
def test_a_loss_that_uses_how_the_step_is_shared_is_refused(scale):
    def run() -> None:
        model = make_model()
        job = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01), DATA, global_batch=8)
        for batch in job:
            job.step((model(batch.inputs) - 1).square().mean() * scale(job, batch))

    with pytest.raises(UsageError, match=r"uses batch\.weight, batch\.last or job\.leads"):
        run()


@pytest.mark.jobs
def test_who_leads_may_print_and_log():
    model = make_model()
    job = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01), DATA, global_batch=8)
    for batch in job:
        loss = (model(batch.inputs) - 1).square().mean()
        if job.leads:
            print(f"{batch.weight:.2f} {float(loss.detach()):.3f}")
        job.step(loss)
    assert job.steps == 5
