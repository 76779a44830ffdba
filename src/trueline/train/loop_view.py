"""What a loop may ask its job, and what it may log."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trueline import events
from trueline.data.loading.seeding import SeededReader
from trueline.data.loading.worker_pool import ReaderPool
from trueline.errors import UsageError
from trueline.train.job_dir import JobDir, current_job
from trueline.train.link.contract import Link
from trueline.train.link.grpc_client import is_replacement
from trueline.train.rehearsal import fork, places
from trueline.train.rehearsal.doubts import Doubts
from trueline.train.rehearsal.generators import OwnGenerators, list_generators
from trueline.train.rehearsal.infinite import InfiniteSteps, RecordTrial, find_records
from trueline.train.step.blame import Trials
from trueline.train.step.contribution import Contribution, StepBatch
from trueline.train.step.group import WorkerGroup
from trueline.train.step.model_traits import ModelTraits
from trueline.train.step.optimizer_settings import OptimizerSettings
from trueline.train.step.options import Options
from trueline.train.step.parts.scalers import refuse_scalers
from trueline.train.step.parts.seeded_generators import NotedSeeds
from trueline.train.step.plan import JobPlan
from trueline.train.step.replica import Replica
from trueline.train.step.trial import LossTrial, TrialInputs
from trueline.train.step.validation import Evaluations


class LoopView:
    """The part of `Elastic` that trains nothing: what a loop may ask, what it writes, and trials of its loss."""

    _replica: Replica
    _plan: JobPlan
    _group: WorkerGroup
    _options: Options
    _reader: SeededReader | ReaderPool
    _traits: ModelTraits
    _settings: OptimizerSettings
    _tried: TrialInputs
    _trial: LossTrial | RecordTrial | None = None
    _infinite: InfiniteSteps
    _contribution: Contribution
    _link: Link
    _trials: Trials
    _abandon: Callable[[str], bool]
    blame: Callable[..., None]
    _batch: StepBatch | None
    _doubts: Doubts
    _evaluations: Evaluations
    _generators: OwnGenerators
    _tried_step: int | None = None

    def _try_loop(self, trial: LossTrial) -> Iterator[StepBatch]:
        self._settings.mark()
        if (validation := self._evaluations.validation) is not None and not is_replacement():
            fork.expect_sums(validation, self._replica.model)
        trial.inputs = replace(trial.inputs, total_steps=self._plan.total_steps)
        trial.noted = NotedSeeds(list_generators(self._replica.model, places.list_caller_spaces).values())
        batches = fork.try_loop(trial, self._traits, self._replica.optimizer_step)
        for batch in batches:
            self._batch, self._tried_step = batch, batch.step
            with refuse_scalers(UsageError, "the loop", 'Options(precision="fp16")') as refused:
                yield batch
            if refused:
                batches.throw(refused[0])
        self._settings.rewind()
        self._traits, self._trial, self._tried_step = trial.traits, None, None
        self._plan.cut_into(self._options.shard_records(self._plan.global_batch, needed=self._traits.needs_shards))

    def _count_tried(self, *, applied: bool) -> bool:
        """Makes `steps` what it is after a batch of a trial whose step counts as applied."""
        if applied and self._tried_step is not None:
            self._tried_step += 1
        return applied

    def _watch_generators(self) -> None:
        found = {} if self._replica.owned else list_generators(self._replica.model, places.list_caller_spaces)
        self._generators = OwnGenerators(found, moves=self._traits.reads.get("moved", ()))
        if found and isinstance(self._reader, SeededReader):  # else processes read
            self._reader.around = self._generators.watch_reading

    def _refuse(self, step: int, what: str) -> bool:
        """No member applies the step; one whose own part is not finite, or may be not, blames records."""
        error, ids = self._infinite.note(step, what), self._contribution.records
        if not len(ids) or (what == "loss" and self._contribution.finite):
            return self._abandon(f"the {what} of the step {'is' if what == 'loss' else 'are'} not finite")
        if self._replica.owned:
            self.blame(error, ids, sure=what == "loss")
        else:
            self._infinite.error = error  # the loop's body is at work: its next batches try the records
        return False

    def _find_infinite(self, step: int) -> Iterator[StepBatch]:
        """Hands out parts of this worker's records of a step that is not finite, to find and report those that make it
        so. Raises its error if none does, and it is this worker's."""
        error, ids = self._infinite.error, self._contribution.records
        assert error is not None
        self._replica.exchange.detach()
        later = self._plan.records(step + 1 if step + 1 < self._plan.total_steps else max(step - 1, 0))
        tried = replace(self._tried, on_read=functools.partial(self._link.report_phase, "reading"))
        trial = RecordTrial(tried, ids, np.setdiff1d(later, ids), step=step, epoch=self._plan.epoch_of(step))
        self._trial = trial
        for batch in find_records(trial, self._settings):
            self._batch = batch
            yield batch
        self._trial = self._infinite.error = None
        accused = self._trials.report(step, ids, trial.found)
        if not accused and (trial.infinite or not self._contribution.finite):
            raise error
        self._abandon(f"records {accused} failed" if accused else str(error))

    def _hand_out(self, batch: StepBatch, read: Callable[[], StepBatch | None]) -> Iterator[StepBatch]:
        """Yields `batch`. If it is unlike those that were tried, it is tried first; if its loss is, it is tried then,
        and comes again: `read` reads it again, and returns None if the step has failed."""
        waits = True
        while waits or self._doubts.why:
            if waits and not self._doubts.look(batch):
                self._batch, waits = batch, False
                self._generators.mark()
                yield batch
                continue
            self._replica.exchange.syncing, waits = False, True
            inputs = replace(self._tried, on_read=functools.partial(self._link.report_phase, "reading"))
            for trial, tried in self._doubts.try_again(inputs, batch, self._settings):
                self._trial, self._batch = trial, tried
                yield tried
            self._trial = None
            self._replica.reset_buffers()
            if (again := read()) is None:
                return
            batch = again

    @property
    def model(self) -> torch.nn.Module:
        return self._replica.model

    @property
    def steps(self) -> int:
        """Applied optimizer steps; in a trial of the loop, as many as there would be at its batch."""
        return self._replica.ledger.steps if self._tried_step is None else self._tried_step

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
        return self._trial.leads if isinstance(self._trial, LossTrial) else self._group.rank == 0

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
