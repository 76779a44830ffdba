"""What the models of tests/ps/recipes have counted: how often each record was applied."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from trueline.checkpoint import checkpoint
from worlds.waiting import until

RECORDS, BATCH = 640, 16
STEPS = RECORDS // BATCH
"""Of an epoch."""
ENDLESS = 10**6
"""Epochs of a job that a test halts: it cannot end before, whatever the machine's speed."""


def read_seen(state: dict[str, torch.Tensor]) -> torch.Tensor:
    seen = torch.zeros(RECORDS)
    seen[state["seen.ids"]] = state["seen.rows"][:, 0]
    return seen


def count_wrong(result: Any, epochs: int = 2) -> int:
    """Records that the tables of a finished job do not have `epochs` times."""
    return int((read_seen(checkpoint.read(result.checkpoint).state["model"]) != epochs).sum())


def count_uneven(saved: checkpoint.Checkpoint) -> int:
    """Records that a checkpoint within an epoch has neither as often as there were epochs before, nor once more; all
    records if their uses are not those of its steps."""
    epochs, seen = saved.step // STEPS, read_seen(saved.state["model"])
    uneven = int(((seen != epochs) & (seen != epochs + 1)).sum())
    return uneven if int(seen.sum()) == saved.step * BATCH else RECORDS


class LaunchedJob:
    """A job whose launcher is a process of its own, so that all of its processes can be killed."""

    def __init__(self, recipe: Path, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self._script = (
            f"from trueline.train.api import train; train({str(recipe)!r}, job_dir={str(folder)!r}, **{settings!r})"
        )
        self._launcher: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Starts it; returns when it has ended."""
        self._launcher = subprocess.Popen(
            [sys.executable, "-c", self._script], start_new_session=True, stderr=subprocess.DEVNULL
        )
        try:
            self._launcher.wait()
        finally:
            self._launcher.kill()

    def wait_for(self, event: str) -> None:
        log = self.folder / "events.jsonl"
        until(lambda: log.exists() and event in log.read_text(), event)

    def kill_all(self) -> None:
        launcher = until(lambda: self._launcher, "the launcher")
        for child in [*psutil.Process(launcher.pid).children(recursive=True), launcher]:
            os.kill(child.pid, signal.SIGKILL)
