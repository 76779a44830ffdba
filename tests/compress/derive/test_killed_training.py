"""A search that is killed while a model is trained for it continues the training where its last checkpoint is."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from trueline.train.launch.jobs import read_job
from worlds import compressible

pytestmark = [pytest.mark.slow, pytest.mark.jobs]  # whole jobs of training
EPOCHS = 60
"""Of which a pruned model trains a third, of 16 steps each."""
TOTAL = EPOCHS // 3 * 16


def list_applied(job: Path) -> list[tuple[int, int]]:
    """Generation and step of each step that was applied, in order."""
    events = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
    return [(one["fields"]["generation"], one["fields"]["step"]) for one in events if one["name"] == "step.applied"]


def test_a_search_that_was_killed_in_a_training_continues_at_its_checkpoint(tmp_path: Path) -> None:
    recipe = compressible.BRIEF_RECIPE.replace("epochs = 1", f"epochs = {EPOCHS}")
    made = compressible.make(tmp_path, recipe=recipe)
    save_file(made.module.state_dict(), tmp_path / "weights.safetensors")
    command = [sys.executable, "-m", "trueline", "compress", str(made.bundle.path), "--checkpoint"]
    command += ["weights.safetensors", "--prune", "linear=0.5", "--quantize", "dynamic", "-o", "small.bundle", "--json"]
    job = tmp_path / "small.bundle.search" / "derived" / "0" / "job"
    search = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while search.poll() is None and not list(job.glob("checkpoints/step-*/checkpoint.json")):
        with pytest.raises(subprocess.TimeoutExpired):
            search.wait(0.02)
    search.send_signal(signal.SIGKILL)
    search.wait()
    assert not (job / "summary.json").exists(), "the training had ended before the kill"
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout)["chosen"]
    assert read_job(job).step == TOTAL
    applied = list_applied(job)
    first = next(step for generation, step in applied if generation > 1)
    assert first > 0
    assert {step for _, step in applied} == set(range(TOTAL))
