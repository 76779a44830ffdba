"""Loops of users' own: the examples train, each alone in one process, and draws, sums and token weights give the same
weights for any number of workers and kills. More about jobs of a script is in test_scripts.py."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trueline import errors, events
from trueline.checkpoint import checkpoint
from trueline.train import api
from worlds.jobs import TINY

pytestmark = pytest.mark.jobs

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("example", "needs", "arguments"),
    [
        ("own_loop", "sklearn", ["--epochs", "2"]),
        ("huggingface", "transformers", ["--epochs", "1", "--records", "128"]),
        ("lightning", "lightning", ["--epochs", "1"]),
    ],
)
def test_an_example_with_a_loop_of_its_own_trains_alone(example, needs, arguments):
    if importlib.util.find_spec(needs) is None:
        reason = f"examples/{example} is not tried: {needs} is not installed (pip install {needs})"
        print(reason)
        pytest.skip(reason)
    command = [sys.executable, str(EXAMPLES / example / "train.py"), *arguments]
    said = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert said.returncode == 0, said.stderr
    assert "steps, accuracy" in said.stdout


ODD = f"""
import sys
sys.path.insert(0, {str(TINY.parent)!r})
import tiny, torch, trueline
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
model, how = tiny.model(), sys.argv[1]
tokens = torch.nn.Linear(8, 8, dtype=torch.float64)
model.classify = tokens
advance = torch.optim.SGD(model.parameters(), lr=0.01)
job = trueline.Elastic(model, advance, tiny.dataset("training"), global_batch=30, epochs=4)
for batch in job:
    (inputs, ids), labels = batch.inputs, batch.labels
    if how == "draws":
        inputs = inputs + 0.1 * torch.randn_like(inputs)
    logits, seen = model(inputs, ids)
    targets = torch.where((ids[:, None] % 4 >= torch.arange(4)), labels[:, None], -100)
    counted = int((targets >= 0).sum())
    apart = (seen * (targets >= 0).sum(dim=1)).sum() / counted
    loss = cross_entropy(logits.view(-1, 2), targets.view(-1)) - 0.1 * apart
    if how == "unknown":
        job.step(loss)
    elif how == "sums":
        job.step(loss * counted)
    else:
        job.step(loss, weight=counted)
"""


@pytest.mark.parametrize("how", ["draws", "sums"])
def test_draws_sums_and_token_weights_are_those_of_one_process_though_workers_die(how, tmp_path):
    def run(workers, kills=()):
        alive, left = [], list(kills)

        def kill(event, fields):
            if event == "worker.running":
                alive.append(fields["pid"])
            if event == "step.applied" and left and fields["step"] >= left[0]:
                left.pop(0)
                os.kill(alive.pop(0), signal.SIGKILL)

        folder = tmp_path / str(workers)
        folder.mkdir()
        (folder / "loop.py").write_text(ODD)
        with events.listening(kill):
            result = api.launch(api.prepare_script(folder / "loop.py", [how], job_dir=folder / "job", workers=workers))
        assert result.summary.exactly_once
        assert not left
        return checkpoint.read(result.checkpoint).state["model"]

    alone = run(1)
    for name, value in run(3, kills=(4, 12)).items():
        torch.testing.assert_close(value, alone[name], rtol=1e-6, atol=1e-9)


def test_a_token_mean_without_its_weight_ends_the_job_before_its_first_step(tmp_path):
    (tmp_path / "loop.py").write_text(ODD)
    job = api.prepare_script(tmp_path / "loop.py", ["unknown"], job_dir=tmp_path / "job", workers=2)
    applied = []
    listener = events.listening(lambda event, fields: applied.append(event) if event == "step.applied" else None)
    with listener, pytest.raises(errors.UsageError, match="is not made of its parts"):
        api.launch(job)
    assert not applied
