"""A GradScaler that the user's code calls is refused before the first step; one that is off changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional
from torch.utils.data import TensorDataset

from trueline.data.sources.map_style import DatasetSource
from trueline.errors import RecipeError, UsageError
from trueline.train.elastic import Elastic
from trueline.train.settings import JobSettings
from trueline.train.step.options import Options
from trueline.train.worker.recipe_trial import RecipeTrial
from worlds.recipes import untrained

pytestmark = pytest.mark.slow

INPUTS = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, (INPUTS.sum(dim=1) > 0).long())
PLAIN = {name: vars(GradScaler)[name] for name in ("scale", "unscale_", "step", "update")}
Body = Callable[[Elastic, GradScaler, Tensor, torch.optim.Optimizer], Any]


class Sharded(GradScaler):
    """Scales by code of its own."""

    def scale(self, outputs: Any) -> Any:
        return outputs * self.get_scale()


def train(body: Body, scaler: GradScaler, *, precision: Any = "fp32") -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    advance = torch.optim.SGD(model.parameters(), lr=0.05)
    job = Elastic(model, advance, DATA, global_batch=24, options=Options(precision=precision))
    for batch in job:
        body(job, scaler, functional.cross_entropy(model(batch.inputs), batch.labels), advance)
    assert job.steps == 4
    return list(model.parameters())


def step_scaled(job: Elastic, scaler: GradScaler, loss: Tensor, _: Any) -> bool:
    return job.step(scaler.scale(loss))


def step_then_update(job: Elastic, scaler: GradScaler, loss: Tensor, advance: Any) -> None:
    if job.step(loss):
        scaler.step(advance)
        scaler.update()


def unscale_first(job: Elastic, scaler: GradScaler, loss: Tensor, advance: Any) -> None:
    scaler.unscale_(advance)
    job.step(loss)


def train_as_amp_does(_: Elastic, scaler: GradScaler, loss: Tensor, advance: Any) -> None:
    scaler.scale(loss).backward()
    scaler.step(advance)
    scaler.update()


CASES = {
    "scaled": (step_scaled, "scale"),
    "as amp does": (train_as_amp_does, "scale"),
    "after a step": (step_then_update, "step"),
    "unscaled": (unscale_first, "unscale_"),
    "updated": (lambda job, scaler, loss, _: (job.step(loss), scaler.update()), "update"),
    "updated after a step": (lambda job, scaler, loss, _: job.step(loss) and scaler.update(1.0), "update"),
}


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("case", "kind", "precision"),
    [*((case, GradScaler, "fp32") for case in CASES), ("scaled", GradScaler, "fp16"), ("scaled", Sharded, "fp32")],
)
def test_a_scaler_that_the_loop_calls_is_refused_before_the_first_step(case, kind, precision):
    body, name = CASES[case]
    with pytest.raises(UsageError, match=rf"the loop calls {name}\(\) of a torch.amp.GradScaler") as refused:
        train(body, kind("cpu"), precision=precision)
    assert 'Options(precision="fp16")' in refused.value.hint
    assert {name: vars(GradScaler)[name] for name in PLAIN} == PLAIN


@pytest.mark.jobs
def test_a_scaler_that_is_off_or_one_that_no_line_of_the_loop_calls_trains_as_without_it():
    plain = train(lambda job, scaler, loss, _: job.step(loss), GradScaler("cpu"))
    off = GradScaler("cpu", enabled=False)
    for body in (step_scaled, lambda job, scaler, loss, _: (job.step(scaler.scale(loss)), scaler.update())):
        torch.testing.assert_close(train(body, off), plain, rtol=0, atol=0)
    train(lambda job, scaler, loss, _: job.step(loss), GradScaler("cpu"), precision="fp16")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_in_the_loss_of_a_recipe_is_refused_in_the_words_of_recipes(enabled):
    model, scaler = nn.Linear(4, 2), GradScaler("cpu", enabled=enabled)
    recipe = untrained(
        lambda: model, loss=lambda outputs, labels: scaler.scale(functional.cross_entropy(outputs, labels))
    )
    settings = JobSettings(name="small", recipe="", recipe_digest="", workers=1, epochs=1, global_batch=24, seed=0)
    tried = RecipeTrial(recipe, model, DatasetSource(DATA, mode="training"), settings)
    if not enabled:
        assert tried.find_traits().reduction == "mean"
        return
    with pytest.raises(RecipeError, match=r"the recipe's loss calls scale\(\)") as refused:
        tried.find_traits()
    assert 'precision = "fp16"' in refused.value.hint
