"""Promises of checkpoints that take a whole job to see."""

import dataclasses
from pathlib import Path

import pytest
import safetensors.torch
import torch

from trueline import events
from trueline.checkpoint import checkpoint
from trueline.recipe.load import load_recipe
from trueline.train.api import train
from trueline.train.settings import Fault
from worlds.jobs import TINY, JobGate, plain_loop, seen_counts

pytestmark = pytest.mark.jobs

EPOCHS = 150


def test_a_job_whose_last_worker_died_goes_on_from_before_a_torn_checkpoint_and_counts_right(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "torn_disk"), prepend=":")
    gate = JobGate(tmp_path, monkeypatch, first=60)
    with events.listening(gate.open_at(("worker.joined", "worker-0.1"))):
        result = train(TINY, job_dir=tmp_path / "job", workers=1, epochs=EPOCHS, checkpoint_every=20)
    assert result.summary.facts["workers_started"] == 2
    assert seen_counts(result.checkpoint) == [EPOCHS]
    found, expected = checkpoint.read(result.checkpoint).state["model"], plain_loop(load_recipe(TINY), EPOCHS * 8)
    torch.testing.assert_close(found["classify.weight"], expected["classify.weight"], rtol=1e-9, atol=1e-12)
    log = "".join(path.read_text() for path in (tmp_path / "job" / "logs").glob("worker-0.1*"))
    assert "checkpoint.refused" in log
    assert "state.safetensors was changed or torn" in log


def test_a_job_starts_from_given_weights_through_a_kill_and_leaves_its_model_under_its_own_names(tmp_path):
    recipe = load_recipe(TINY)
    torch.manual_seed(7)
    first = recipe.model().state_dict()
    torch.save({"state_dict": {f"module.{name}": value for name, value in first.items()}}, tmp_path / "w.pt")
    result = train(
        TINY, job_dir=tmp_path / "job", workers=2, epochs=2, weights=str(tmp_path / "w.pt"),
        faults=[Fault(step=5, slot=1)],
    )  # fmt: skip

    def model():
        made = recipe.model()
        made.load_state_dict(first)
        return made

    expected = plain_loop(dataclasses.replace(recipe, model=model), 2 * 8)
    found = safetensors.torch.load_file(tmp_path / "job" / "checkpoints" / "model" / "model.safetensors")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
    assert checkpoint.read_manifest(result.checkpoint)["weights"]["file"] == "w.pt"
