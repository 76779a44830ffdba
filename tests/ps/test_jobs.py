"""Promises of jobs with parameter servers: whatever dies, each record counts once. The model counts them itself."""

import os
import signal
from pathlib import Path

import pytest
import torch

from trueline import events
from trueline.checkpoint import checkpoint
from trueline.train.api import train
from trueline.train.job_dir import JobDir

pytestmark = pytest.mark.jobs
COUNTING = Path(__file__).parent / "recipes" / "counting.py"
RECORDS = 640


class Killer:
    """Kills processes of a job after a number of steps, each once; `master` by the job's folder."""

    def __init__(self, job_dir: Path, strikes: list[tuple[int, str]]) -> None:
        self.job, self.left, self.pids, self.steps = JobDir(job_dir), list(strikes), {}, 0
        self.killed: list[str] = []

    def __call__(self, name, fields):
        if name == "worker.running":
            self.pids[fields["worker"].partition(".")[0]] = fields["pid"]
        elif name in ("worker.lost", "worker.killed"):
            self.pids.pop(fields["worker"].partition(".")[0], None)
        elif name == "step.applied":
            self.steps += 1
        while self.left and self.steps >= self.left[0][0] and self.find(self.left[0][1]):
            _, what = self.left.pop(0)
            os.kill(self.find(what), signal.SIGKILL)
            self.pids.pop(what, None)
            self.killed.append(what)

    def find(self, what):
        return self.job.read_master().pid if what == "master" else self.pids.get(what)


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
