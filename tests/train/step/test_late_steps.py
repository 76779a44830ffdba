"""A loss that stops being made of its parts later in a job is refused before its first step, as far as later steps, a
step's number of records and values beyond bounds show it; what only looks like it trains."""

from __future__ import annotations

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
from trueline.train.step.options import Options
from trueline.train.step.parts import late_steps
from trueline.train.worker.recipe_trial import RecipeTrial
from worlds.cases import few
from worlds.recipes import untrained

pytestmark = pytest.mark.slow

RECORDS = 240
INPUTS = torch.randn(RECORDS, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
LABELS = torch.stack([INPUTS.sin().sum(dim=1), INPUTS.cos().sum(dim=1)], dim=1)
Loss = Callable[[nn.Module, Any, Any], Tensor]
"""Of the model, a batch and the job."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


@pytest.fixture(autouse=True)
def _as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_steps, "PROBE_S", 600.0)
    monkeypatch.setattr(late_steps, "WIDE_S", 600.0)
    monkeypatch.setattr(late_steps, "MANY_S", 600.0)


def train(loss: Loss, times: int = 1, global_batch: int = 24, **options: Any) -> Elastic:
    model = make_model()
    advance = torch.optim.SGD(model.parameters(), lr=0.02)
    data = TensorDataset(INPUTS.repeat(times, 1), LABELS.repeat(times, 1))
    job = Elastic(model, advance, data, global_batch=global_batch, epochs=2, options=Options(**options))
    for batch in job:
        job.step(loss(model, batch, job))
    return job


def error(model: nn.Module, batch: Any, inputs: Tensor | None = None) -> Tensor:
    out: Tensor = ((model(batch.inputs if inputs is None else inputs) - batch.labels) ** 2).mean()
    return out


def center(batch: Any, *, when: bool) -> Tensor:
    inputs: Tensor = batch.inputs
    return inputs - inputs.mean(dim=0) if when else inputs


AT_A_STEP: list[Loss] = [
    lambda model, batch, _: error(model, batch, center(batch, when=batch.step > 12)),
    lambda model, batch, _: error(model, batch, center(batch, when=5 <= batch.step < 8)),
    lambda model, batch, job: error(model, batch, center(batch, when=job.steps > 12)),
    lambda model, batch, _: error(model, batch) + (model(batch.inputs).std() if batch.step > 12 else 0.0),
    lambda model, batch, _: error(model, batch) * (len(batch.records) if batch.step > 12 else 1.0),
]


@pytest.mark.jobs
@pytest.mark.parametrize("loss", few(AT_A_STEP, 1, pytest.mark.jobs))
def test_a_loss_that_compares_records_from_a_later_step_on_is_refused_before_the_first(loss: Loss) -> None:
    with pytest.raises(UsageError, match=r"in step \d+, the loss of \d+ records .* is not made of its parts"):
        train(loss)
    job = train(loss, reduction="mean", micro_batch=6)
    assert (job.steps, job._traits.whole) == (20, True)


def test_a_loss_that_counts_more_records_than_the_first_trial_has_is_refused() -> None:
    with pytest.raises(UsageError, match=r"in step \d+, the loss of 24 records .* is not made of its parts"):
        train(lambda model, batch, _: error(model, batch) * (1.0 + max(0, len(batch.records) - 20)))


def test_a_loss_that_leaves_out_records_beyond_hundreds_is_refused_before_the_first_step() -> None:
    def leave_out(model: nn.Module, batch: Any, _: Any) -> Tensor:
        off = ((model(batch.inputs) - batch.labels) ** 2).mean(dim=1)
        out: Tensor = off.topk(min(len(off), 300)).values.sum() / len(off)
        return out

    with pytest.raises(UsageError, match=r"in step \d+, the loss of 600 records .* is not made of its parts"):
        train(leave_out, times=5, global_batch=600)


RARE = float(INPUTS[:, 5].sort().values[-4])
"""Three records are above it, and few steps have two of them."""


def test_a_term_for_records_of_which_few_steps_have_two_is_refused_before_the_first() -> None:
    def rank(model: nn.Module, batch: Any, _: Any) -> Tensor:
        score, rare = model(batch.inputs)[:, 0], batch.inputs[:, 5] > RARE
        if rare.sum() < 2:
            return error(model, batch)
        return error(model, batch) + nn.functional.softplus(score[~rare][None] - score[rare][:, None]).mean()

    with pytest.raises(UsageError, match=r"with records that few steps have together, the loss of \d+ records"):
        train(rank)


@pytest.mark.jobs
def test_a_term_that_each_of_few_records_adds_by_itself_trains() -> None:
    def add(model: nn.Module, batch: Any, _: Any) -> Tensor:
        rare = batch.inputs[:, 5] > RARE
        if not rare.any():
            return error(model, batch)
        return error(model, batch) + (model(batch.inputs).abs().sum(dim=1) * rare).sum() / len(rare)

    assert train(add).steps == 20


@pytest.mark.parametrize("part", [0, 2])
def test_parameters_that_a_later_step_freezes_are_refused_before_the_first(part: int) -> None:
    def freeze(model: Any, batch: Any, _: Any) -> Tensor:
        model[part].requires_grad_(batch.step <= 12)
        return error(model, batch)

    with pytest.raises(UsageError, match="the loop freezes parameters in a later step"):
        train(freeze)


@pytest.mark.jobs
def test_a_loop_that_draws_from_a_later_step_on_has_shards_from_the_first_step_on() -> None:
    def noisy(model: nn.Module, batch: Any, _: Any) -> Tensor:
        later = batch.step > 12
        return error(model, batch, batch.inputs + 0.1 * torch.randn_like(batch.inputs) if later else batch.inputs)

    job = train(noisy)
    assert (job.steps, job._plan.micro_batch) == (20, 4)


BOUND: list[Loss] = [
    lambda model, batch, _: error(model, batch) + model(batch.inputs).square().mean(dim=0).clamp(min=9.0).sum(),
    lambda model, batch, _: error(model, batch).clamp(max=1e4),
    lambda model, batch, _: error(model, batch) + (model(batch.inputs).mean() - 7.0).relu(),
    lambda model, batch, _: error(model, batch) + (model(batch.inputs).mean() - 7.0).abs(),
    lambda model, batch, _: torch.maximum(error(model, batch), batch.labels.new_tensor(1e-9)),
]


@pytest.mark.jobs
@pytest.mark.parametrize("loss", few(BOUND, 1, pytest.mark.jobs))
def test_a_bound_of_what_a_batch_is_reduced_to_is_found_though_no_batch_has_met_it(loss: Loss) -> None:
    with pytest.raises(UsageError, match=r"beyond a bound .* is not made of its parts"):
        train(loss)
    assert train(loss, reduction="mean", micro_batch=6)._traits.whole


UNHARMED: list[Loss] = [
    lambda model, batch, _: (model(batch.inputs).relu() - batch.labels).abs().clamp(max=3.0).mean(),
    lambda model, batch, _: error(model, batch) + (sum(p.square().sum() for p in model.parameters()) - 0.1).relu(),
    lambda model, batch, _: error(model, batch) / (1.0 + batch.step),
    lambda model, batch, job: error(model, batch) + 0.1 * model(batch.inputs).square().mean() * (job.steps > 12),
    lambda model, batch, _: error(model, batch) + 0.0 * float(batch.labels.sum().abs().clamp(min=1.0)),
]


@pytest.mark.jobs
@pytest.mark.parametrize("loss", few(UNHARMED, 1, pytest.mark.jobs))
def test_bounds_of_single_records_and_of_weights_and_curricula_of_means_train(loss: Loss) -> None:
    job = train(loss)
    assert (job.steps, job._traits.reduction, job._plan.micro_batch) == (20, "mean", 0)


@pytest.mark.jobs
def test_a_sum_that_a_clamped_count_of_a_mask_divides_trains_with_its_weight() -> None:
    model = make_model()
    job = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.02), TensorDataset(INPUTS, LABELS), global_batch=24)
    for batch in job:
        mask = (batch.inputs[:, :1] > 0).double()
        loss = ((model(batch.inputs) - batch.labels).square() * mask).sum() / mask.sum().clamp(min=1.0)
        job.step(loss, weight=mask.sum())
    assert (job.steps, job._traits.reduction) == (10, "weighted")


class Counting(nn.Module):
    """Centers its features once it has counted to twelve in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        out: Tensor = self.net(inputs - inputs.mean(dim=0) if self.count > 12 else inputs)
        return out


def test_a_model_that_compares_records_once_a_counter_in_a_buffer_says_so_is_refused_in_a_recipe() -> None:
    model = Counting()
    recipe = untrained(Counting, loss=lambda outputs, labels: (outputs - labels).square().mean())
    settings = JobSettings(name="small", recipe="", recipe_digest="", workers=1, epochs=2, global_batch=24, seed=0)
    source = DatasetSource(TensorDataset(INPUTS, LABELS), mode="training")
    with pytest.raises(UsageError, match=r"in step \d+, the loss .* is not made of its parts"):
        RecipeTrial(recipe, model, source, settings).find_traits()
    assert float(model.count) == 0
