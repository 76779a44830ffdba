"""Recipes whose loss is a sum, or a mean by tokens, train as plain torch does with whole batches; workers may die."""

import importlib.util

import pytest
import torch

from trueline import events
from trueline.checkpoint import checkpoint
from trueline.train.api import train
from trueline.train.settings import Fault
from trueline.train.step.plan import JobPlan
from worlds import TESTS

pytestmark = pytest.mark.jobs

REDUCED = TESTS / "train" / "recipes" / "reduced.py"


def plain(seed):
    """The weights of a plain loop over the same steps."""
    spec = importlib.util.spec_from_file_location("reduced", REDUCED)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    torch.manual_seed(seed)
    model = recipe.model()
    advance, data = recipe.optimizer(model.parameters()), recipe.dataset("training")
    plan = JobPlan(num_records=recipe.RECORDS, global_batch=recipe.global_batch, epochs=recipe.epochs, seed=seed)
    for step in range(plan.total_steps):
        inputs, labels = data[plan.records(step)]
        advance.zero_grad()
        recipe.loss(model(inputs), labels).backward()
        advance.step()
    return model.state_dict()


@pytest.mark.parametrize(("how", "workers"), [("sum", 2), ("weighted", 2), ("weighted", 5)])
def test_a_sum_and_a_mean_by_tokens_are_those_of_a_plain_loop_though_a_worker_dies(how, workers, tmp_path, monkeypatch):
    monkeypatch.setenv("REDUCED", how)
    lost = []
    with events.listening(lambda name, fields: lost.append(fields["worker"]) if name == "worker.lost" else None):
        result = train(REDUCED, workers=workers, job_dir=tmp_path / "job", seed=7, faults=[Fault(step=3, slot=1)])
    assert lost == ["worker-1.0"]
    assert result.summary.exactly_once
    assert {certificate["reduction"] for certificate in result.summary.facts["certificates"]} == {how}
    assert checkpoint.read_manifest(result.checkpoint)["loss"] == {"reduction": how}
    assert f"the loss of a step is the {'sum over its records' if how == 'sum' else 'mean by the weights'}" in (
        result.summary.as_text()
    )
    expected = plain(seed=7)
    for name, value in checkpoint.read(result.checkpoint).state["model"].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-9)
