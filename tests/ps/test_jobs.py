"""Promises of jobs with parameter servers: whatever dies, each record counts once. The model counts them itself."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from trueline import events
from trueline.checkpoint import checkpoint
from trueline.engine.contract import make_ref
from trueline.errors import JobStopped, TrainError
from trueline.train.api import train
from trueline.train.launch import jobs
from worlds.counted import ENDLESS, STEPS, LaunchedJob, count_uneven, count_wrong
from worlds.gates import StepGate
from worlds.scaler import Scaler

pytestmark = pytest.mark.jobs
COUNTING = Path(__file__).parent / "recipes" / "counting.py"


def run(job_dir, *strikes, recipe=COUNTING, **settings):
    with StepGate(job_dir, *strikes):
        return train(recipe, job_dir=job_dir, strategy="ps", **settings)


def test_workers_servers_and_the_master_die_and_each_record_counts_once(tmp_path):
    strikes = [(5, "worker-0"), (15, "server-1"), (25, "master"), (40, "server-0"), (45, "worker-1"), (55, "master")]
    found = run(tmp_path / "job", *strikes, workers=2, servers=2)
    assert found.summary.exactly_once
    assert count_wrong(found) == 0


def test_a_server_that_dies_after_the_last_checkpoint_is_counted_when_it_is_back(tmp_path):
    """After its part of it: while the process that joins the parts begins, and once more when that has ended."""
    last = 2 * STEPS

    class LateGate(StepGate):
        def __call__(self, name, fields):
            super().__call__(name, fields)
            if name == "checkpoint.saved" and fields["step"] == last and self.find("server-0"):
                self.kill("server-0")

    with LateGate(tmp_path / "job", (last, "server-0"), slack=0):
        found = train(COUNTING, job_dir=tmp_path / "job", strategy="ps", workers=2, servers=2)
    assert found.summary.exactly_once


@pytest.mark.parametrize("also", [False, True])
def test_a_master_that_dies_while_a_process_writes_the_checkpoint_leaves_a_job_that_ends(tmp_path, also):
    """The last checkpoint: its step is the next master's too. `also`: that process dies as well."""
    last = make_ref("saver", 0, 1000 * 2 * STEPS)

    class SaverGate(StepGate):
        def __call__(self, name, fields):
            super().__call__(name, fields)
            if name == "worker.running" and fields["worker"] == last and not self.killed:
                self.kill("master")
                if also:
                    os.kill(fields["pid"], signal.SIGKILL)

    with SaverGate(tmp_path / "job", (2 * STEPS, lambda: None)) as gate:
        found = train(COUNTING, job_dir=tmp_path / "job", strategy="ps", workers=2, servers=2)
    assert gate.killed == ["master"]
    assert found.summary.exactly_once
    assert count_wrong(found) == 0
    assert checkpoint.latest(tmp_path / "job" / "checkpoints").step == 2 * STEPS


def test_a_halted_job_goes_on_with_other_numbers_of_workers_and_servers(tmp_path):
    job = tmp_path / "job"

    def halt():
        threading.Thread(target=jobs.halt, args=(job,), daemon=True).start()

    with StepGate(job, (20, halt), (20, "job.halting")), pytest.raises(JobStopped):
        train(COUNTING, job_dir=job, strategy="ps", workers=2, servers=2, epochs=4)
    halted = checkpoint.latest(job / "checkpoints")
    assert 20 <= halted.step < 4 * STEPS
    found = train(COUNTING, job_dir=job, resume=True, workers=1, servers=3)
    assert found.summary.exactly_once
    assert count_wrong(found, epochs=4) == 0


def test_a_job_that_lost_every_process_goes_on_from_what_its_servers_wrote(tmp_path):
    launched = LaunchedJob(COUNTING, tmp_path / "job", strategy="ps", workers=2, servers=2)
    with StepGate(launched.folder, (15, launched.kill_all)):
        launched.run()
    found = train(COUNTING, job_dir=launched.folder, resume=True)
    assert found.summary.exactly_once
    assert count_wrong(found) == 0


def test_synchronous_steps_are_those_of_the_allreduce_strategy(tmp_path):
    """Of a model without tables; its sums are in another order."""
    recipe = COUNTING.with_name("dense.py")
    plain = train(recipe, job_dir=tmp_path / "allreduce", workers=2)
    found = run(tmp_path / "ps", (7, "worker-1"), (20, "server-0"), recipe=recipe, workers=3, servers=2, staleness=0)
    expected = checkpoint.read(plain.checkpoint).state["model"]
    actual = checkpoint.read(found.checkpoint).state["model"]
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("victim", ["", "master", "server-0"])
def test_servers_are_taken_and_come_back_while_training_goes_on_whoever_dies_meanwhile(tmp_path, victim):
    job = tmp_path / "job"
    scaler = Scaler(job, [3, 2, 3, 2], victim)
    with events.listening(scaler), pytest.raises(JobStopped):
        train(COUNTING, job_dir=job, strategy="ps", workers=2, servers=2, epochs=ENDLESS, checkpoint_every=500)
    assert (scaler.reached, len(scaler.killed)) == (4, 4 if victim else 0)
    assert count_uneven(checkpoint.latest(job / "checkpoints")) == 0


def test_a_table_that_admits_and_evicts_keeps_its_bound_while_servers_come_and_go(tmp_path):
    """Its 80 ids are used all the time, and half of them have a row; a server rounds its share of the bound up."""
    job = tmp_path / "job"
    scaler = Scaler(job, [3, 2], "server-0")
    with events.listening(scaler), pytest.raises(JobStopped):
        train(COUNTING.with_name("bounded.py"), job_dir=job, strategy="ps", workers=2, servers=2, epochs=ENDLESS,
              checkpoint_every=500)  # fmt: skip
    saved = checkpoint.latest(job / "checkpoints")
    assert (scaler.reached, len(scaler.killed), count_uneven(saved)) == (2, 2, 0)
    assert 30 < len(saved.state["model"]["items.ids"]) <= 42


def test_copies_of_hot_rows_lose_and_repeat_no_record_whatever_dies(tmp_path):
    strikes = [(10, "worker-0"), (20, "server-1"), (35, "master")]
    found = run(tmp_path / "job", *strikes, workers=2, servers=2, staleness=3, hot_rows=50)
    assert found.summary.exactly_once
    assert count_wrong(found) == 0


def test_a_gradient_that_is_refused_is_named_with_the_records_that_it_is_of(tmp_path):
    recipe = COUNTING.with_name("rooted.py")
    with pytest.raises(TrainError, match=r"the gradients of \d+ ids are NaN or Inf") as caught:
        train(recipe, job_dir=tmp_path / "job", strategy="ps", workers=1, servers=1)
    assert "in minibatch 0 of epoch 0, records [" in caught.value.hint
