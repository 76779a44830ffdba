"""What a loop may ask its job, and what it may log."""

from typing import Any

import torch

from trueline import events
from trueline.train.job_dir import JobDir, current_job
from trueline.train.step.group import WorkerGroup
from trueline.train.step.plan import JobPlan
from trueline.train.step.replica import Replica


class LoopView:
    """The part of `Elastic` that only looks, and writes what the loop measures."""

    _replica: Replica
    _plan: JobPlan
    _group: WorkerGroup

    @property
    def model(self) -> torch.nn.Module:
        return self._replica.model

    @property
    def steps(self) -> int:
        """Applied optimizer steps."""
        return self._replica.ledger.steps

    @property
    def total_steps(self) -> int:
        return self._plan.total_steps

    @property
    def certificates(self) -> list[dict[str, Any]]:
        """For each finished epoch: steps, records, digest, least and most applications of a record."""
        return self._replica.ledger.certificates

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations while training: step, records, loss, metrics, best, stop."""
        return self._replica.ledger.evaluations

    @property
    def leads(self) -> bool:
        """Whether this worker is the first of the current group: the one that prints, logs or draws. It may change at
        each death; true where the process trains alone."""
        return self._group.rank == 0

    def log(self, **values: float) -> None:
        """Logs numbers of the last applied step, for the job's events and MLflow; only the worker that
        leads does. Called after `job.step` returned True, a step is logged once, or never if that worker dies there."""
        if self.leads and self.steps:  # in the trial of the loop none is applied
            fields = {name: float(value) for name, value in values.items()}
            folder = current_job()
            if folder is None:
                events.emit("loop.logged", step=self.steps - 1, **fields)
            else:
                JobDir(folder).record("loop.logged", step=self.steps - 1, **fields)
