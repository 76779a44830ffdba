"""Promises of hybrid jobs: whatever dies, each record counts once in the tables and once in the dense parameters."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch

from trueline import events
from trueline.checkpoint import checkpoint
from trueline.errors import JobStopped, RecipeError, UsageError
from trueline.train.api import train
from trueline.train.launch import jobs
from trueline.train.settings import Fault
from worlds.killer import Killer
from worlds.waiting import until

pytestmark = pytest.mark.jobs
RECIPE = Path(__file__).parent / "recipes" / "hybrid.py"
RECORDS = 640


def run(job_dir, *strikes, **settings):
    killer = Killer(job_dir, list(strikes))
    with events.listening(killer):
        found = train(RECIPE, job_dir=job_dir, strategy="hybrid", **settings)
    assert len(killer.killed) == len(strikes), killer.killed
    return found


def read_state(result):
    return checkpoint.read(result.checkpoint).state["model"]


def count_wrong(result, epochs=2):
    """Records that the tables do not have `epochs` times; the certificates have counted those of the dense part."""
    assert result.summary.exactly_once
    state = read_state(result)
    seen = torch.zeros(RECORDS)
    seen[state["seen.ids"]] = state["seen.rows"][:, 0]
    return int((seen != epochs).sum())


def expect_equal(actual, expected):
    actual, expected = read_state(actual), read_state(expected)
    for name in ("classify.weight", "items.ids", "items.rows"):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-5)


def test_a_step_is_the_synchronous_one_of_the_servers_for_any_number_of_workers(tmp_path):
    plain = train(RECIPE, job_dir=tmp_path / "ps", strategy="ps", staleness=0, workers=1)
    found = run(tmp_path / "hybrid", workers=3, servers=2)
    assert count_wrong(found) == 0
    expect_equal(found, plain)


def test_workers_servers_and_the_master_die_and_each_record_counts_once(tmp_path):
    strikes = [(5, "worker-0"), (15, "server-1"), (25, "master"), (40, "server-0"), (50, "worker-1"), (60, "master")]
    assert count_wrong(run(tmp_path / "job", *strikes, workers=2, servers=2)) == 0


def test_a_server_that_dies_while_the_master_is_away_is_started_by_the_next_one(tmp_path):
    strikes = [(10, "server-1"), (30, "master"), (30, "server-1")]
    assert count_wrong(run(tmp_path / "job", *strikes, workers=2, servers=2)) == 0


@pytest.mark.parametrize("phase", ["backward", "allreduced", "applied"])
def test_a_worker_dies_in_any_part_of_a_step_and_each_record_counts_once(tmp_path, phase):
    faults = [Fault(step=step, slot=slot, incarnation=-1, phase=phase) for slot, step in enumerate((9, 30))]
    assert count_wrong(run(tmp_path / "job", workers=2, servers=2, faults=faults, checkpoint_every=8)) == 0


def test_all_workers_die_and_the_tables_go_back_to_the_checkpoint_with_them(tmp_path):
    faults = [Fault(step=30, slot=0, incarnation=-1, phase="backward")]
    found = run(tmp_path / "job", workers=1, servers=2, faults=faults, checkpoint_every=12)
    assert count_wrong(found) == 0
    expect_equal(found, run(tmp_path / "undisturbed", workers=1, servers=1))


def test_a_job_that_lost_every_process_goes_on_from_its_checkpoint(tmp_path):
    job = tmp_path / "job"
    script = f"from trueline.train.api import train; train({str(RECIPE)!r}, job_dir={str(job)!r}, " \
             "strategy='hybrid', workers=2, servers=2, checkpoint_every=12)"  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        log = job / "events.jsonl"
        until(lambda: log.exists() and "checkpoint.saved" in (text := log.read_text()) and
              text.count("step.applied") >= 15, lambda: "no steps")  # fmt: skip
    finally:
        for child in [process, *psutil.Process(process.pid).children(recursive=True)]:
            os.kill(child.pid, signal.SIGKILL)
        process.wait()
    assert count_wrong(train(RECIPE, job_dir=job, resume=True, workers=1)) == 0


def test_a_model_without_tables_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="no table for the servers"):
        train(RECIPE.with_name("dense.py"), job_dir=tmp_path / "dense", strategy="hybrid", workers=1)


class Asker(Killer):
    """Calls each function after its number of steps, in a thread."""

    def __init__(self, job_dir, *asked):
        super().__init__(job_dir, [])
        self.asked = list(asked)

    def __call__(self, name, fields):
        super().__call__(name, fields)
        if self.asked and self.steps >= self.asked[0][0]:
            _, ask = self.asked.pop(0)
            threading.Thread(target=ask, daemon=True).start()


def test_workers_come_and_go_and_a_halted_job_continues_with_other_numbers_of_them(tmp_path):
    job = tmp_path / "job"
    asker = Asker(
        job, (20, lambda: jobs.scale(job, 3)), (80, lambda: jobs.scale(job, 1)), (150, lambda: jobs.halt(job))
    )
    with events.listening(asker), pytest.raises(JobStopped):
        train(RECIPE, job_dir=job, strategy="hybrid", workers=2, servers=2, epochs=8)
    assert 150 <= checkpoint.latest(job / "checkpoints").step < 320
    found = train(RECIPE, job_dir=job, resume=True, workers=3)
    assert count_wrong(found, epochs=8) == 0


def test_a_resumed_job_keeps_its_number_of_servers(tmp_path):
    job = tmp_path / "job"
    with events.listening(Asker(job, (20, lambda: jobs.halt(job)))), pytest.raises(JobStopped):
        train(RECIPE, job_dir=job, strategy="hybrid", workers=1, servers=2)
    with pytest.raises(UsageError, match="--servers is 3, and this job has 2 servers"):
        train(RECIPE, job_dir=job, resume=True, servers=3)
