"""Weights & Biases as a tracker of jobs (the extra `wandb`). Its own settings decide where runs go: WANDB_PROJECT,
WANDB_MODE=offline and others.

Source: the reference of wandb's Python SDK, 0.31: `init`, `Run.log`, `Run.define_metric`, `Run.save`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from trueline.errors import RegistryError
from trueline.extras import naming_extras
from trueline.registry.curves import Point, TrackedJob, Tracker

STEP = "trueline/step"
"""The axis of the curves. W&B's own step only grows, and a job may go back."""


class WandbTracker:
    place = "wandb"

    def __init__(self, wandb: Any) -> None:
        self._wandb = wandb
        self._run: Any = None

    def begin(self, job: TrackedJob, run: str) -> str:
        self._run = opened = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", job.group), name=str(job.settings["name"]), dir=str(job.folder),
            id=run or None, resume="allow" if run else None, config=job.plain_settings,
        )  # fmt: skip
        opened.define_metric("*", step_metric=STEP)
        return str(opened.id)

    def log(self, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        """A row for each step; times are those of the rows' arrival."""
        for step, row in groupby(points, key=lambda point: point[3]):
            self._run.log({STEP: step, **{key: value for key, value, _, _ in row}})
        self._run.summary.update(dict(tags))

    def end(self, status: str, at_ms: int | None, kept: Sequence[Path]) -> None:
        for path in kept:
            self._run.save(str(path), base_path=str(path.parent), policy="now")
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)


@contextmanager
def open_tracker(job_dir: Path) -> Iterator[Tracker]:
    """The tracker. W&B's errors become RegistryError."""
    with naming_extras():
        import wandb
    try:
        yield WandbTracker(wandb)
    except wandb.Error as error:
        raise RegistryError(f"Weights & Biases refuses: {error}", hint="check WANDB_API_KEY and WANDB_MODE") from error
