"""Promises of checkpoints that take a whole job to see."""

from pathlib import Path

import pytest
import torch

from trueline.checkpoint import checkpoint
from trueline.recipe.load import load_recipe
from trueline.train.api import train
from worlds.jobs import TINY, plain_loop, seen_counts

pytestmark = pytest.mark.jobs

EPOCHS = 150


def test_a_job_whose_last_worker_died_goes_on_from_before_a_torn_checkpoint_and_counts_right(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "torn_disk"), prepend=":")
    result = train(TINY, job_dir=tmp_path / "job", workers=1, epochs=EPOCHS, checkpoint_every=20)
    assert result.summary.facts["workers_started"] == 2
    assert seen_counts(result.checkpoint) == [EPOCHS]
    found, expected = checkpoint.read(result.checkpoint).state["model"], plain_loop(load_recipe(TINY), EPOCHS * 8)
    torch.testing.assert_close(found["classify.weight"], expected["classify.weight"], rtol=1e-9, atol=1e-12)
    log = "".join(path.read_text() for path in (tmp_path / "job" / "logs").glob("worker-0.1*"))
    assert "checkpoint.refused" in log
    assert "state.safetensors was changed or torn" in log
