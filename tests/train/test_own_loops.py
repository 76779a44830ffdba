"""Loops of users' own: the examples train, each alone in one process, and draws, sums, token weights and learning rates
that the loop sets give the same weights for any number of workers and kills. More about jobs of a script:
test_scripts.py."""

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trueline import errors, events
from trueline.checkpoint import checkpoint
from trueline.train import api
from trueline.train.settings import Fault
from trueline.train.step.plan import JobPlan
from worlds.jobs import TINY
from worlds.recipes import TEACHES

pytestmark = pytest.mark.jobs

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("example", "needs", "arguments"),
    [
        ("own_loop", "sklearn", ["--epochs", "2"]),
        ("gan", "torch", ["--epochs", "2"]),
        ("tokens", "torch", ["--epochs", "4"]),
        ("actor_critic", "torch", ["--epochs", "4"]),
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
    assert re.search(r"steps, (accuracy|mean r|0\.9|1\.0)", said.stdout), said.stdout


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
    def run(workers, faults=()):
        folder, lost = tmp_path / str(workers), []
        folder.mkdir()
        (folder / "loop.py").write_text(ODD)
        job = api.prepare_script(folder / "loop.py", [how], job_dir=folder / "job", workers=workers, faults=faults)
        with events.listening(lambda name, _: lost.append(name) if name == "worker.lost" else None):
            result = api.launch(job)
        assert result.summary.exactly_once
        assert len(lost) == len(faults)
        return checkpoint.read(result.checkpoint).state["model"]

    alone = run(1)
    for name, value in run(3, faults=[Fault(step=4, slot=0), Fault(step=12, slot=1, phase="applied")]).items():
        torch.testing.assert_close(value, alone[name], rtol=1e-6, atol=1e-9)


HALF = """
import torch, trueline

torch.manual_seed(0)
made = torch.Generator().manual_seed(3)
inputs = torch.randn(240, 16, generator=made)
data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].sin().sum(dim=1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
advance = torch.optim.AdamW(model.parameters(), lr=0.01)
job = trueline.Elastic(model, advance, data, global_batch=30, epochs=4)
for batch in job:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(batch.inputs)
    job.step(((outputs.float() - batch.labels) ** 2).mean())
"""


def test_weights_in_half_precision_are_those_of_one_process_though_workers_die_and_the_job_says_how(tmp_path):
    """A gradient that is rounded to bfloat16 is no sum of those of the parts of its batch."""

    def run(workers, faults=()):
        folder, heard = tmp_path / str(workers), []
        folder.mkdir()
        (folder / "loop.py").write_text(HALF)
        job = api.prepare_script(folder / "loop.py", [], job_dir=folder / "job", workers=workers, faults=faults)
        with events.listening(lambda name, _: heard.append(name)):
            result = api.launch(job)
        assert result.summary.exactly_once
        assert heard.count("worker.lost") == len(faults)
        assert heard.index("sums.ordered") < heard.index("step.applied")
        return checkpoint.read(result.checkpoint).state["model"]

    alone = run(1)
    for workers, faults in ((3, [Fault(step=4, slot=0), Fault(step=12, slot=1, phase="applied")]), (5, [])):
        for name, value in run(workers, faults).items():
            torch.testing.assert_close(value, alone[name], rtol=1e-6, atol=1e-9)


NANO = """
import sys, torch, trueline

torch.manual_seed(0)
made = torch.Generator().manual_seed(3)
inputs = torch.randn(200, 6, generator=made, dtype=torch.float64)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
advance = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
data = torch.utils.data.TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))

def train(model, advance, inputs, labels, step):
    for group in advance.param_groups:
        group["lr"] = 0.1 / (1 + step)
    return ((model(inputs) - labels) ** 2).mean()

if __name__ == "__main__":
    job = trueline.Elastic(model, advance, data, global_batch=4, epochs=2)
    for batch in job:
        job.step(train(model, advance, batch.inputs, batch.labels, batch.step))
"""


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_a_rate_that_the_loop_sets_by_itself_is_that_of_a_plain_loop_though_workers_die(workers, tmp_path):
    """Of five workers one has no records in a step of four. Worker 0 is never killed and holds the state."""
    (tmp_path / "nano.py").write_text(NANO)
    faults = [Fault(step=10, slot=workers - 1), Fault(step=30, slot=workers - 2, phase="applied")]
    faults, lost = faults[: workers - 1], []
    job = api.prepare_script(tmp_path / "nano.py", [], job_dir=tmp_path / "job", workers=workers, faults=faults)
    with events.listening(lambda name, _: lost.append(name) if name == "worker.lost" else None):
        result = api.launch(job)
    assert result.summary.exactly_once
    assert len(lost) == len(faults)
    plain = runpy.run_path(str(tmp_path / "nano.py"))
    plan = JobPlan(num_records=200, global_batch=4, epochs=2, seed=0)
    for step in range(plan.total_steps):
        at = plan.records(step)
        plain["advance"].zero_grad()
        plain["train"](plain["model"], plain["advance"], *plain["data"][at], step).backward()
        plain["advance"].step()
    for name, value in checkpoint.read(result.checkpoint).state["model"].items():
        torch.testing.assert_close(value, plain["model"].state_dict()[name], rtol=1e-6, atol=1e-9)


DISTILS = """
import random, sys
import numpy as np
import torch, trueline

how = sys.argv[1]
inputs = torch.randn(200, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
words = [f"word {number}" for number in range(40)]
vocabulary = {word: number for number, word in enumerate(set(words))}
order = torch.tensor([vocabulary[word] for word in words], dtype=torch.float64) / 40
unseeded = torch.tensor([random.random(), np.random.random(), float(torch.rand(()))], dtype=torch.float64)
if how == "anew":
    torch.seed()
teacher = torch.nn.Linear(6, 1).double().requires_grad_(False)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
advance = torch.optim.SGD(model.parameters(), lr=0.1)
job = trueline.Elastic(model, advance, torch.utils.data.TensorDataset(inputs, inputs), global_batch=10)
for batch in job:
    taught = teacher(batch.inputs) + (unseeded * order[:3]).sum()
    job.step(((model(batch.inputs) - taught) ** 2).mean())
"""


@pytest.mark.parametrize(("workers", "faults", "most"), [(3, [], 0), (1, [Fault(step=4, slot=0)], 4)])
def test_a_worker_that_makes_a_teacher_of_its_own_ends_the_job_before_it_trains(workers, faults, most, tmp_path):
    (tmp_path / "loop.py").write_text(DISTILS)
    job = api.prepare_script(tmp_path / "loop.py", ["anew"], job_dir=tmp_path / "job", workers=workers, faults=faults)
    applied = []
    listener = events.listening(lambda event, fields: applied.append(event) if event == "step.applied" else None)
    with listener, pytest.raises(errors.UsageError, match="uses the loop's teacher, which is not that of the first"):
        api.launch(job)
    assert len(applied) <= most


def test_a_recipe_whose_features_each_worker_draws_ends_the_job_before_its_first_step(tmp_path):
    (tmp_path / "teaches.py").write_text(TEACHES)
    applied = []
    listener = events.listening(lambda event, fields: applied.append(event) if event == "step.applied" else None)
    with listener, pytest.raises(errors.UsageError, match="uses the recipe's FEATURES, which is not that of the first"):
        api.train(tmp_path / "teaches.py", job_dir=tmp_path / "job", workers=2)
    assert not applied


def test_what_a_script_draws_without_a_seed_and_the_order_of_its_sets_are_those_of_all_workers(tmp_path):
    def run(workers, faults=()):
        folder = tmp_path / str(workers)
        folder.mkdir()
        (folder / "loop.py").write_text(DISTILS)
        job = api.prepare_script(folder / "loop.py", ["once"], job_dir=folder / "job", workers=workers, faults=faults)
        return checkpoint.read(api.launch(job).checkpoint).state["model"]

    alone = run(1)
    for name, value in run(3, [Fault(step=4, slot=0)]).items():
        torch.testing.assert_close(value, alone[name], rtol=1e-6, atol=1e-9)


def test_a_token_mean_without_its_weight_ends_the_job_before_its_first_step(tmp_path):
    (tmp_path / "loop.py").write_text(ODD)
    job = api.prepare_script(tmp_path / "loop.py", ["unknown"], job_dir=tmp_path / "job", workers=2)
    applied = []
    listener = events.listening(lambda event, fields: applied.append(event) if event == "step.applied" else None)
    with listener, pytest.raises(errors.UsageError, match="is not made of its parts"):
        api.launch(job)
    assert not applied
