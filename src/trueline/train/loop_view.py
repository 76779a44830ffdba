"""What a loop may ask its job, and what it may log."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from trueline import events
from trueline.train.job_dir import JobDir, current_job
from trueline.train.rehearsal import fork
from trueline.train.rehearsal.doubts import Doubts
from trueline.train.step.contribution import StepBatch
from trueline.train.step.group import WorkerGroup
from trueline.train.step.model_traits import ModelTraits
from trueline.train.step.optimizer_settings import OptimizerSettings
from trueline.train.step.options import Options
from trueline.train.step.plan import JobPlan
from trueline.train.step.replica import Replica
from trueline.train.step.trial import LossTrial, TrialInputs


class LoopView:
    """The part of `Elastic` that trains nothing: what a loop may ask, what it writes, and trials of its loss."""

    _replica: Replica
    _plan: JobPlan
    _group: WorkerGroup
    _options: Options
    _traits: ModelTraits
    _settings: OptimizerSettings
    _tried: TrialInputs
    _trial: LossTrial | None
    _batch: StepBatch | None
    _doubts: Doubts

    def _try_loop(self, trial: LossTrial) -> Iterator[StepBatch]:
        self._settings.mark()
        for batch in fork.try_loop(trial, self._traits, self._replica.optimizer_step):
            self._batch = batch
            yield batch
        self._settings.rewind()
        self._traits, self._trial = trial.traits, None
        self._plan.cut_into(self._options.shard_records(self._plan.global_batch, needed=self._traits.needs_shards))

    def _hand_out(self, batch: StepBatch, read: Callable[[], StepBatch | None]) -> Iterator[StepBatch]:
        """Yields `batch`. If it is unlike those that were tried, it is tried first; if its loss is, it is tried then,
        and comes again: `read` reads it again, and returns None if the step has failed."""
        waits = True
        while waits or self._doubts.why:
            if waits and not self._doubts.look(batch):
                self._batch, waits = batch, False
                yield batch
                continue
            self._replica.exchange.syncing, waits = False, True
            for trial, tried in self._doubts.try_again(self._tried, batch, self._settings):
                self._trial, self._batch = trial, tried
                yield tried
            self._trial = None
            if (again := read()) is None:
                return
            batch = again

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
