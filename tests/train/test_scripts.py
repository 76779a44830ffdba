"""Promises to people with a loop of their own: their script is a job like any other."""

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch

from trueline import errors, events
from trueline.checkpoint import checkpoint
from trueline.train import api
from trueline.train import settings as job_settings
from trueline.train.launch import jobs, shutdown
from trueline.train.settings import Fault
from trueline.train.step.ledger import Ledger
from worlds.jobs import TINY, seen_counts

pytestmark = pytest.mark.jobs

LOOP = f"""
import os, sys
sys.path.insert(0, {str(TINY.parent)!r})
import tiny, torch, trueline

def main():
    epochs = int(sys.argv[1])
    torch.manual_seed(0)
    model = tiny.model()
    job = trueline.Elastic(model, tiny.optimizer(model.parameters()), tiny.dataset("training"), global_batch=30, epochs=epochs)
    for batch in job:
        if len(sys.argv) > 2 and sys.argv[2] == "stop" and job.steps == 4:
            return
        if len(sys.argv) > 2 and sys.argv[2] == "raise" and job.steps == 4:
            raise ValueError("the labels look odd")
        job.step(tiny.loss(model(*batch.inputs), batch.labels))
    if len(sys.argv) > 2 and sys.argv[2] == "again":
        list(job)
    if len(sys.argv) > 2 and sys.argv[2] == "spoil":
        raise OSError("nowhere to write to")
    if os.path.exists("{{after}}"):
        open("{{after}}").close()  # something that takes its time after the last step
    with open(os.path.join(os.environ["TRUELINE_JOB"], "done"), "a") as file:
        file.write(f"{{job.steps}} ")

if __name__ == "__main__":
    main()
"""  # noqa: E501


MORE = f"""
import sys
sys.path.insert(0, {str(TINY.parent)!r})
import tiny, torch
from trueline import Elastic, Options, Rule, Validation

torch.manual_seed(0)
model = tiny.model()
optimizer = tiny.optimizer(model.parameters())
held_out = tiny.dataset("evaluation")

def measure(start, stop):
    inputs, labels = held_out.inputs[start:stop], held_out.labels[start:stop]
    with torch.no_grad():
        outputs = model.eval().classify(inputs)
    model.train()
    right = (outputs.argmax(dim=1) == labels).sum()
    return [torch.nn.functional.cross_entropy(outputs, labels, reduction="sum").item(), right.item()]

job = Elastic(
    model, optimizer, tiny.dataset("training"), global_batch=30, epochs=200,
    scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000),
    options=Options(clip_norm=50.0, ema=0.9, micro_batch=5),
    validation=Validation(rule=Rule(every=10, monitor="-accuracy", patience=4), num_records=len(held_out),
                          names=("accuracy",), measure=measure),
)
for batch in job:
    job.step(tiny.loss(model(*batch.inputs), batch.labels))
"""


def script(tmp_path, *arguments, code=LOOP, **options):
    path = tmp_path / "loop.py"
    path.write_text(code)
    return api.prepare_script(path, arguments, job_dir=tmp_path / "job", **options)


def test_a_script_is_a_job_whose_workers_may_be_killed_and_may_finish_what_follows_its_loop(tmp_path, monkeypatch):
    after = tmp_path / "after"
    os.mkfifo(after)

    def let_go(_):
        """Once the launcher waits: lets the scripts go on that wait for somebody to open the pipe."""
        with contextlib.suppress(OSError):  # none waits yet, or any more
            os.close(os.open(after, os.O_WRONLY | os.O_NONBLOCK))

    monkeypatch.setattr(shutdown, "time", SimpleNamespace(sleep=let_go))
    code, faults = LOOP.replace("{after}", str(after)), [Fault(step=20, slot=1)]
    job = script(tmp_path, "30", code=code, workers=2, checkpoint_every=50, faults=faults)
    lost = []
    with events.listening(lambda name, _: lost.append(name) if name == "worker.lost" else None):
        result = api.launch(job)
    assert lost == ["worker.lost"]
    settled = job_settings.load(job)
    assert (settled.epochs, settled.global_batch, settled.seed) == (30, 30, 0)
    assert seen_counts(result.checkpoint) == [30.0]
    assert result.summary.exactly_once
    assert set((job / "done").read_text().split()) == {"240"}
    assert checkpoint.read(result.checkpoint).manifest["recipe"]["name"] == "loop"


def test_a_loop_of_ones_own_is_evaluated_averaged_and_stopped_early_though_workers_die(tmp_path):
    def run(name, workers, faults=()):
        lost = []
        (tmp_path / name).mkdir()
        job = script(tmp_path / name, code=MORE, workers=workers, checkpoint_every=25, faults=faults)
        with events.listening(lambda name, _: lost.append(name) if name == "worker.lost" else None):
            result = api.launch(job)
        assert len(lost) == len(faults)
        assert result.summary.exactly_once
        return result, checkpoint.read(result.checkpoint)

    calm, left = run("calm", 1)
    stormy, arrived = run("stormy", 3, faults=[Fault(step=5, slot=2), Fault(step=12, slot=1, phase="applied")])
    evaluations = Ledger.from_tree(left.state["ledger"]).evaluations
    assert [one["step"] for one in evaluations] == list(range(10, 10 * len(evaluations) + 1, 10))
    assert evaluations[-1]["stop"]
    assert calm.summary.facts["stopped_early"]
    assert stormy.summary.facts["steps"] == calm.summary.facts["steps"] == left.step == arrived.step
    assert stormy.summary.facts["best"]["step"] == calm.summary.facts["best"]["step"]
    assert checkpoint.read(stormy.best).step == calm.summary.facts["best"]["step"]
    for part in ("model", "ema"):
        for name, value in left.state[part].items():
            torch.testing.assert_close(arrived.state[part][name], value, rtol=1e-9, atol=1e-12)
    assert not torch.equal(left.state["ema"]["classify.weight"], left.state["model"]["classify.weight"])


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("raise", "the job failed: worker-0.0: ValueError: the labels look odd"),
        ("stop", "loop.py ended before its loop over trueline.Elastic did"),
        ("spoil", "all steps are trained, but then worker-0.0 ended: exit code 1"),
        ("again", "a second loop over Elastic batches began in one process"),
    ],
)
def test_a_script_that_ends_badly_is_one_clear_error(tmp_path, does, words):
    job = script(tmp_path, "2", does, workers=1)
    with pytest.raises(errors.TruelineError) as caught:
        api.launch(job)
    assert words in str(caught.value)
    assert (jobs.read_job(job).state == "failed") == (does not in ("spoil", "again"))


def test_a_script_that_says_something_else_after_a_resume_is_refused(tmp_path):
    job = script(tmp_path, "2")
    job_settings.save(job_settings.load(job), job)
    from trueline.train.settings import settle

    settle(job, epochs=2, global_batch=30, seed=0)
    with pytest.raises(errors.UsageError, match="global_batch=40, and the job began with 30"):
        settle(job, epochs=2, global_batch=40, seed=0)
