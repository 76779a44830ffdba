"""`Elastic`: a training loop that survives joins, leaves and deaths of its peers.

    job = trueline.Elastic(model, optimizer, dataset, global_batch=256)
    for batch in job:
        job.step(loss(model(batch.inputs), batch.labels))

The loop of a worker is a dance with two figures. **Step**: forward, backward with a StepAccount in the same
allreduce, comparison of the sums with the plan, optimizer. **Regroup**, when a peer died or a new view was agreed:
leave the group, enter the new view with the number of steps applied, form the new group, take the state of whoever
is furthest ahead, and go on with the step that nobody applied. A batch whose step failed is simply given out again,
cut anew. See docs/concepts/generation.md for the protocol and its failure cases.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from trueline import events
from trueline.data.loading.worker_pool import make_reader
from trueline.data.open import as_source
from trueline.data.source import Batch, Source
from trueline.data.sources.mixture import record_lookup
from trueline.errors import TrainError, UsageError
from trueline.parallel.backend import connector
from trueline.parallel.exchange import Shares, is_collective
from trueline.parallel.gloo import GlooGroup, start_store
from trueline.train import devices, job_context
from trueline.train.faults import Faults
from trueline.train.link.grpc_client import connect
from trueline.train.regroup.recovery import Recovery
from trueline.train.settings import Fault
from trueline.train.step import model_traits
from trueline.train.step.blame import Trials
from trueline.train.step.checkpointer import Checkpointer
from trueline.train.step.commit import Commit
from trueline.train.step.contribution import Contribution, StepBatch
from trueline.train.step.evaluation_loop import Evaluations
from trueline.train.step.group import WorkerGroup
from trueline.train.step.ledger import StepAccount
from trueline.train.step.optimizer_step import OptimizerStep, check_optimizer
from trueline.train.step.options import Options
from trueline.train.step.plan import ForwardPiece, Ints, JobPlan
from trueline.train.step.reader import StepReader
from trueline.train.step.replica import Replica
from trueline.train.step.reporter import StepReporter
from trueline.train.step.timing import StepTimer
from trueline.train.step.validation import Validation
from trueline.wire import train_pb2 as pb


class Elastic:
    """Trains `model` together with whoever else is in the job; alone when this process was not started by a master.

    `dataset` is a map-style Dataset or a Source. `loss` in `step(loss)` is the mean over the batch's records.
    The model, the optimizer and the arguments must be the same in all workers; batches come on the model's device.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        *,
        global_batch: int,
        epochs: int = 1,
        seed: int = 0,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        options: Options | None = None,
        validation: Validation | None = None,
        checkpointer: Checkpointer | None = None,
        faults: tuple[Fault, ...] = (),
        kind: model_traits.ModelTraits | None = None,
    ) -> None:
        source = (
            dataset if isinstance(dataset, Source) else as_source(dataset, mode="training", feed=None, recipe="job")
        )
        if source.num_records < 1:
            raise UsageError("the data set has no records", hint="check dataset('training')")
        options = options or Options()
        model_traits.replace_sync_batchnorm(model)
        kind = kind or model_traits.read_traits(model)
        shard = options.shard_records(global_batch, needed=kind.needs_shards)
        self._plan = JobPlan(
            num_records=source.num_records,
            global_batch=global_batch,
            epochs=epochs,
            seed=seed,
            micro_batch=shard,
            blocks=options.blocks(source),
            drawn=record_lookup(source),
        )
        place = functools.partial(devices.place_batch, device=devices.of_model(model))
        self._source, self._reader = source, make_reader(source, seed, place, readers=options.readers)
        self._tried_rate = kind.rate
        check_optimizer(model, optimizer)
        advance = OptimizerStep(model, optimizer, scheduler, options)
        backend = "gloo" if options.bitwise else options.backend  # bit for bit, rows are summed in host memory
        process_group = GlooGroup(connector(backend, devices.of_model(model)))
        self._replica = Replica(model, advance, process_group, source.num_records, options, sharded=shard > 0)
        self._timer = StepTimer()
        exchange = self._replica.exchange
        exchange.on_computed, exchange.on_sent = self._timer.end_computing, self._read_ahead
        link = connect(process_group.cut_until_left)
        if checkpointer is None:
            checkpointer, faults = job_context.of_script(self._plan, source)
        self._faults = Faults(faults, link.ref)
        self._group = WorkerGroup(link, process_group, self._faults)
        self._link = link
        self._step_reader = StepReader(
            self._plan, self._reader, self._group, self._timer, seed, kind.draws or shard > 0
        )
        self._recovery = Recovery(self._replica, self._group, self._faults)
        self._checkpointer = checkpointer
        self._evaluations = Evaluations(validation, self._plan, self._replica, self._group, link, checkpointer)
        self._commit = Commit(self._plan, self._replica, self._group, self._evaluations)
        self._trials = Trials(link, self._plan, source, self._reader, self._replica)
        self._host_waits = devices.of_model(model).type == "cpu"
        """A device computes on when all is on its way, and the hook that says so is not in the main thread."""
        self._batch: StepBatch | None = None
        self._failed = False
        self._contribution = Contribution()
        self._reporter = StepReporter(link, self._group, self._timer, self._plan)
        self._wishes = 0

    # What users see. -------------------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        return self._replica.model

    @property
    def steps(self) -> int:
        """Optimizer steps applied so far."""
        return self._replica.ledger.steps

    @property
    def total_steps(self) -> int:
        return self._plan.total_steps

    @property
    def certificates(self) -> list[dict[str, Any]]:
        """One account for each finished epoch: steps, records, digest, least and most applications of a record."""
        return self._replica.ledger.certificates

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """What was measured while training: step, records, loss, metrics, best, stop."""
        return self._replica.ledger.evaluations

    def __iter__(self) -> Iterator[StepBatch]:
        store, address = start_store()
        plan = self._plan
        self._link.join(
            pb.Hello(
                store=address,
                state=self._recovery.address,
                num_records=plan.num_records,
                total_steps=plan.total_steps,
                shard_records=plan.micro_batch,
                blocks=plan.blocks,
            )
        )
        self._regroup()
        while True:
            at = self._at
            if self._wishes:
                self._regroup()
            elif self._evaluations.due(at):
                self._validate()
            elif at >= plan.total_steps or self._replica.ledger.stopped:
                if self._finished():
                    break
            else:
                yield from self._one_step()
        self._group.process_group.close()
        self._recovery.close()
        self._link.close()
        self._reader.close()
        del store

    def step(self, loss: torch.Tensor) -> bool:
        """Takes this worker's `loss` of a batch; True when that completed a step and it was applied.

        False after a batch that is not the last of its step, and when the step failed: its records are given out again.
        """
        batch = self._batch
        if batch is None:
            raise UsageError("job.step(loss) was called without a batch", hint="call it once for every batch")
        self._batch = None
        self._contribution.add(batch.records, loss.item())
        if batch.last:
            return self._reduce(batch.step, (loss, batch.weight, batch.records))
        self._replica.add(loss, batch.weight, batch.records)
        return False

    def try_with(self, loss_of: Callable[[Batch], torch.Tensor]) -> None:
        """How the loss of a batch is computed when single records are tried; without it only reading is tried."""
        self._trials.loss_of = loss_of

    def leave(self) -> None:
        """Announces a departure; it takes effect between two steps."""
        self._link.leave()

    def fail(self, what: str, detail: str) -> None:
        """Ends the job for everybody: an error that every worker would meet."""
        self._link.fail(what, detail)

    # Step. -----------------------------------------------------------------------------------------------------

    @property
    def _at(self) -> int:
        """The step that the group is at: steps applied, by the others if this worker is still taking the state."""
        return self.steps if self._recovery.holds else self._recovery.observed

    def _one_step(self) -> Iterator[StepBatch]:
        step, holds, group = self._at, self._recovery.holds, self._group
        self._faults.at("before" if holds else "observing", step)
        self._link.report_phase("reading")
        self._timer.begin()
        self._replica.begin()
        self._contribution, self._failed = Contribution(), False
        pieces = self._step_reader.pieces(step)
        if group.view.careful:
            self._trials.try_all(step, [piece.records for piece in pieces])
        if not pieces or not holds:
            self._reduce(step, None)
            return
        for number, piece in enumerate(pieces, 1):
            if group.is_overtaken():
                self._abandon("a newer view")
                return
            self._batch = self._read(step, piece, last=number == len(pieces))
            if self._batch is None:
                return
            self._contribution.digest += piece.digest
            self._step_reader.prefetch(step, pieces[number:])
            yield self._batch
            if self._batch is not None:
                raise UsageError("the loop did not call job.step(loss)", hint="call it once for every batch")
            if self._failed:
                return

    def _read(self, step: int, piece: ForwardPiece, *, last: bool) -> StepBatch | None:
        """The batch of a piece; None when a record in it cannot be read and the group has regrouped without it."""
        try:
            found = self._step_reader.read(step, piece, last=last)
        except Exception as error:  # noqa: BLE001  reading runs the user's code
            self.blame(error, piece.records)
            return None
        self._replica.exchange.syncing = last
        if last:
            self._link.report_phase("computing")
        return found

    def _read_ahead(self) -> None:
        """All of a step is on its way: the next one's first batch is read, as if that step had come already."""
        if self._group.view.careful or not self._recovery.holds or not self._host_waits:
            return
        self._link.report_phase("reading")
        try:
            self._step_reader.read_ahead(self.steps + 1)
        except Exception as error:  # noqa: BLE001  it will be read again when its time comes, and then looked into
            events.emit("read.ahead_failed", step=self.steps + 1, why=f"{type(error).__name__}: {error}")
        self._link.report_phase("waiting")

    def _account(self, step: int, *, holds: bool) -> StepAccount:
        """What this worker brings to the sum beside its gradients."""
        group = self._group
        rates = [0.0] * group.size
        if not holds:
            return StepAccount(wishes=int(group.wants_regroup()), rates=rates)
        rates[group.rank] = group.rate_to_report(self._timer.rate)
        return self._contribution.account(group.generation, step, wish=group.wants_regroup(), rates=rates)

    def _reduce(self, step: int, piece: tuple[torch.Tensor, float, Ints] | None) -> bool:
        """The allreduce of `step` and what follows from it; True when the step was applied."""
        if self._replica.exchange.broken is not None:
            return self._abandon(str(self._replica.exchange.broken))
        self._faults.arm_backward(step, self.model)
        holds = self._recovery.holds
        try:
            mine = self._account(step, holds=holds)
            self._link.report_phase("waiting")
            account = self._replica.reduce(piece, mine, Shares(self._shards(step), self._group.order))
        except RuntimeError as error:
            if not is_collective(error):
                self.blame(error, self._contribution.records)
                return False
            return self._abandon(str(error))
        self._link.report_phase("committing")
        self._faults.at("allreduced", step)
        self._timer.end_waiting(self._contribution.count)
        self._wishes = account.wishes
        self._group.update_rates(account.rates, account.count)
        self._recovery.count_holders(account.holders)
        if not holds:
            self._observe(account)
            return False
        return self._apply(step, account)

    def _shards(self, step: int) -> list[int]:
        """How many shards of `step` each rank has."""
        if not self._plan.micro_batch:
            return []
        return self._group.by_rank(self._plan.shard_counts(step, self._group.ordered_weights))

    def _apply(self, step: int, account: StepAccount) -> bool:
        self._commit.check(account)
        if not math.isfinite(account.loss):
            self._blame_loss(step)
            return False
        if not self._commit.apply(account):
            self._reporter.redone += 1
            events.emit("step.overflowed", step=step, scale=self._replica.optimizer_step.scaler.get_scale())
            return False
        certificate = self._commit.certificate()
        self._faults.at("applied", step)
        self._reporter.report(step, account, certificate)
        if self._checkpointer is not None and self._group.rank == 0:
            self._checkpointer.after_step(self._replica, self._link, ends_epoch=certificate is not None)
        return True

    def _observe(self, account: StepAccount) -> None:
        """This worker took part without a state: keep the sums, and apply them once the state is there."""
        self._recovery.keep(account)
        if self._recovery.crowded:
            self._recovery.wait()
        if self._recovery.has_arrived():
            self._catch_up()

    def _catch_up(self) -> bool:
        """Takes the state that was fetched and what came after it; False when it did not come, after a regroup."""
        try:
            missed = self._recovery.take()
        except RuntimeError as error:
            return self._abandon(str(error))
        self._commit.catch_up(missed)
        events.emit("worker.caught_up", step=self.steps, missed=len(missed))
        return True

    def _validate(self) -> None:
        at, holds = self._at, self._recovery.holds
        self._link.report_phase("evaluating")
        self._faults.at("evaluating", at)
        try:
            totals = self._evaluations.measure(at, holds=holds)
        except RuntimeError as error:
            if not is_collective(error):
                raise
            self._abandon(str(error))
            return
        if holds:
            self._evaluations.enter(totals)
            return
        self._recovery.keep_evaluation(totals)
        self._recovery.wait()  # whether this was the last one follows from the state
        self._catch_up()

    # Regroup. --------------------------------------------------------------------------------------------------

    def _abandon(self, why: str) -> bool:
        """The step failed under us: nobody can have applied more than it. Regroup and do it again."""
        self._failed = True
        self._group.failure, self._group.failed = why.partition("\n")[0], True
        events.emit("step.failed", step=self._at, generation=self._group.generation, why=self._group.failure)
        self._regroup()
        return False

    def _regroup(self) -> None:
        self._replica.detach()
        self._recovery.forget()
        steps = self.steps if self._recovery.has_state else -1
        self._group.regroup(steps=steps, rate=self._timer.rate or -self._tried_rate, heal=self._heal)
        self._reporter.note_regroup()
        self._evaluations.forget()
        self._wishes = 0

    def _heal(self) -> None:
        self._plan.leave_out(list(self._group.view.set_aside))
        self._recovery.heal()
        self._replica.attach(self._group.size)

    def _finished(self) -> bool:
        """True when every member has applied the last step; False after a regroup for one that has not."""
        if not self._recovery.holds:
            self._recovery.wait()
            self._catch_up()
            return False
        self._link.report_phase("finishing")
        self._faults.at("finishing", self.steps)
        stopped_within = self._commit.certify_part()
        if stopped_within and self._checkpointer is not None and self._group.rank == 0:
            self._checkpointer.after_step(self._replica, self._link, ends_epoch=False, due=True)
        if self._checkpointer is not None and self._group.rank == 0:
            self._checkpointer.complete(self._replica, self._link)
        certificates = [pb.Certificate(**certificate) for certificate in self.certificates]
        if self._link.finish(self._group.generation, self.steps, certificates).finished:
            return True
        self._regroup()
        return False

    # Records that fail. ----------------------------------------------------------------------------------------

    def blame(self, error: Exception, records: Ints | None = None) -> None:
        """Finds out which records made this worker's part of the step raise `error`, and has them given to others.

        Raises `error` again when it was not some of the records.
        """
        if records is None:
            records = self._batch.records if self._batch is not None else np.empty(0, np.int64)
        self._batch = None
        accused = self._trials.accuse(error, self._at, records)
        self._abandon(f"records {accused} failed")

    def _blame_loss(self, step: int) -> None:
        """The step's loss is not finite: whoever contributed that looks for the records; nobody applies the step."""
        if self._contribution.finite:
            self._abandon("the loss of the step is not finite")
            return
        error = TrainError(
            f"the loss of step {step} is not finite", hint="the training diverged: lower the learning rate, or clip"
        )
        self.blame(error, self._contribution.records)
