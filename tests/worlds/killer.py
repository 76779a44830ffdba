"""Kills processes of a running job, as its events tell."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from trueline.train.job_dir import JobDir


class Killer:
    """Kills processes of a job after a number of steps, each once; `master` by the job's folder."""

    def __init__(self, job_dir: Path, strikes: list[tuple[int, str]]) -> None:
        self.job, self.left, self.steps = JobDir(job_dir), list(strikes), 0
        self.pids: dict[str, int] = {}
        self.killed: list[str] = []

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
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

    def find(self, what: str) -> int | None:
        return self.job.read_master().pid if what == "master" else self.pids.get(what)
