"""Promises of jobs with parameter servers: whatever dies, each record counts once. The model counts them itself."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from trueline import events
from trueline.checkpoint import checkpoint
from trueline.errors import JobStopped
from trueline.train.api import train
from trueline.train.launch import jobs
from worlds.killer import Killer
from worlds.waiting import until

pytestmark = pytest.mark.jobs
COUNTING = Path(__file__).parent / "recipes" / "counting.py"
RECORDS = 640


def run(job_dir, *strikes, recipe=COUNTING, **settings):
    killer = Killer(job_dir, list(strikes))
    with events.listening(killer):
        found = train(recipe, job_dir=job_dir, strategy="ps", **settings)
    assert len(killer.killed) == len(strikes), killer.killed
    return found


def count_wrong(result, epochs=2):
    """Records that were not applied `epochs` times."""
    state = checkpoint.read(result.checkpoint).state["model"]
    seen = torch.zeros(RECORDS)
    seen[state["seen.ids"]] = state["seen.rows"][:, 0]
    return int((seen != epochs).sum())


def test_workers_servers_and_the_master_die_and_each_record_counts_once(tmp_path):
    strikes = [(5, "worker-0"), (15, "server-1"), (25, "master"), (40, "server-0"), (45, "worker-1"), (55, "master")]
    found = run(tmp_path / "job", *strikes, workers=2, servers=2)
    assert found.summary.exactly_once
    assert count_wrong(found) == 0


class LateKiller(Killer):
    """Kills a server when the last checkpoint is there, before the job ends."""

    def __call__(self, name, fields):
        super().__call__(name, fields)
        if name == "checkpoint.saved" and fields["step"] == 2 * RECORDS // 16 and not self.killed:
            os.kill(self.find("server-0"), signal.SIGKILL)
            self.killed.append("server-0")


def test_a_server_that_dies_after_the_last_checkpoint_is_counted_when_it_is_back(tmp_path):
    killer = LateKiller(tmp_path / "job", [])
    with events.listening(killer):
        found = train(COUNTING, job_dir=tmp_path / "job", strategy="ps", workers=2, servers=2)
    assert killer.killed == ["server-0"]
    assert found.summary.exactly_once


class Halter(Killer):
    """Halts the job after a number of steps, as `trueline halt` does."""

    def __init__(self, job_dir, step):
        super().__init__(job_dir, [])
        self.step = step

    def __call__(self, name, fields):
        super().__call__(name, fields)
        if self.steps >= self.step > 0:
            self.step = 0
            threading.Thread(target=jobs.halt, args=(self.job.path,), daemon=True).start()


def test_a_halted_job_goes_on_with_other_numbers_of_workers_and_servers(tmp_path):
    with events.listening(Halter(tmp_path / "job", 20)), pytest.raises(JobStopped):
        train(COUNTING, job_dir=tmp_path / "job", strategy="ps", workers=2, servers=2, epochs=4)
    halted = checkpoint.latest(tmp_path / "job" / "checkpoints")
    assert 20 <= halted.step < 160
    found = train(COUNTING, job_dir=tmp_path / "job", resume=True, workers=1, servers=3)
    assert found.summary.exactly_once
    assert count_wrong(found, epochs=4) == 0


def test_a_job_that_lost_every_process_goes_on_from_what_its_servers_wrote(tmp_path):
    job = tmp_path / "job"
    script = f"from trueline.train.api import train; train({str(COUNTING)!r}, job_dir={str(job)!r}, " \
             "strategy='ps', workers=2, servers=2)"  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        log = job / "events.jsonl"
        until(lambda: log.exists() and log.read_text().count("step.applied") >= 15, lambda: "no steps")
    finally:
        for child in [process, *psutil.Process(process.pid).children(recursive=True)]:
            os.kill(child.pid, signal.SIGKILL)
        process.wait()
    found = train(COUNTING, job_dir=job, resume=True)
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


class Scaler(Killer):
    """Asks for the next number of servers 30 steps after it got the one before; kills `victim` in the middle of each
    move: when the first of several new routings is in the journal."""

    def __init__(self, job_dir, numbers, victim=""):
        super().__init__(job_dir, [])
        self.numbers, self.victim, self.reached, self.asked, self.mark, self.struck = numbers, victim, 0, 0, 0, 0

    def __call__(self, name, fields):
        super().__call__(name, fields)
        if name == "servers.scaling" and self.victim and self.struck < self.asked:
            self.struck = self.asked
            threading.Thread(target=self.strike, args=[self.count_routings()], daemon=True).start()
        if name == "servers.scaled" and fields["servers"] == self.numbers[self.asked - 1]:
            self.reached, self.mark = self.asked, self.steps
        if self.asked == self.reached < len(self.numbers) and self.steps >= self.mark + 30:
            self.asked += 1
            ask = partial(jobs.scale, self.job.path, servers=self.numbers[self.reached])
            threading.Thread(target=ask, daemon=True).start()

    def count_routings(self):
        with contextlib.closing(sqlite3.connect(f"file:{self.job.journal}?mode=ro", uri=True)) as journal:
            return journal.execute("SELECT count(*) FROM log WHERE kind = 'PS_ROUTING'").fetchone()[0]

    def strike(self, before):
        until(lambda: self.count_routings() > before, "no new routing")
        os.kill(self.find(self.victim), signal.SIGKILL)
        self.killed.append(self.victim)


@pytest.mark.parametrize("victim", ["", "master", "server-0"])
def test_servers_are_taken_and_come_back_while_training_goes_on_whoever_dies_meanwhile(tmp_path, victim):
    scaler = Scaler(tmp_path / "job", [3, 2, 3, 2], victim)
    with events.listening(scaler):
        found = train(COUNTING, job_dir=tmp_path / "job", strategy="ps", workers=2, servers=2, epochs=24)
    assert (scaler.reached, len(scaler.killed)) == (4, 4 if victim else 0)
    assert found.summary.exactly_once
    assert count_wrong(found, epochs=24) == 0
