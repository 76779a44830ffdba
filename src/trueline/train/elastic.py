"""`Elastic`: a training loop that survives joins, leaves and deaths of its peers.

    job = trueline.Elastic(model, optimizer, dataset, global_batch=256)
    for batch in job:
        job.step(loss(model(batch.inputs), batch.labels))

A worker takes steps, and regroups when a peer died or a view was agreed. docs/concepts/generation.md: the protocol.
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import torch

from trueline import events
from trueline.data.loading.worker_pool import make_reader
from trueline.data.open import open_training
from trueline.data.source import Batch
from trueline.data.sources.mixture import record_lookup
from trueline.errors import UsageError
from trueline.parallel.backend import connector
from trueline.parallel.exchange import Overtaken, Shares, is_collective
from trueline.parallel.gloo import GlooGroup
from trueline.parallel.store import StoreServer
from trueline.train import devices
from trueline.train.faults import Faults
from trueline.train.link.grpc_client import connect, is_replacement
from trueline.train.loop_view import LoopView
from trueline.train.profiler import StepProfiler
from trueline.train.regroup.recovery import Recovery
from trueline.train.rehearsal.doubts import Doubts
from trueline.train.rehearsal.infinite import InfiniteSteps
from trueline.train.step import model_traits
from trueline.train.step.blame import Trials
from trueline.train.step.checkpointer import Checkpointer
from trueline.train.step.commit import Commit, StepReporter
from trueline.train.step.contribution import Contribution, StepBatch, StepReader
from trueline.train.step.group import WorkerGroup
from trueline.train.step.ledger import StepAccount
from trueline.train.step.load_balance import StepTimer
from trueline.train.step.optimizer_step import OptimizerStep, check_length, check_optimizer
from trueline.train.step.options import Options
from trueline.train.step.plan import ForwardPiece, Ints, JobPlan
from trueline.train.step.reduction import Share, as_weight, count_loss
from trueline.train.step.replica import Replica
from trueline.train.step.trial import LossTrial, TrialInputs
from trueline.train.step.validation import Evaluations, LoopExtras, keep_exchange
from trueline.wire import train_pb2 as pb


class Elastic(LoopView):
    """Trains `model` together with the other workers of the job, or alone if no master started this process.

    `dataset` is a map-style Dataset or a Source. A fork first tries the loop, to see what it draws and how its loss
    reduces: docs/guides/own-loop.md. The model, the optimizer and the arguments must be the same in all workers;
    batches come on the model's device. `validation`: evaluations while training.
    """

    _batch: StepBatch | None = None

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
        **extras: Unpack[LoopExtras],
    ) -> None:
        if unknown := extras.keys() - LoopExtras.__annotations__:
            raise TypeError(f"Elastic() got an unexpected keyword argument '{min(unknown)}'")
        source, options, device = open_training(dataset), options or Options(), devices.of_model(model)
        check_optimizer(model, optimizer, scheduler, evaluates=extras.get("validation") is not None)
        model_traits.replace_sync_batchnorm(model)
        self._traits, self._options = extras.get("traits") or model_traits.read_traits(model), options
        plan = self._plan = JobPlan(
            num_records=source.num_records, global_batch=global_batch, epochs=epochs, seed=seed,
            micro_batch=options.shard_records(global_batch, needed=self._traits.needs_shards),
            blocks=options.blocks(source), drawn=record_lookup(source),
        )  # fmt: skip
        check_length(scheduler, plan.total_steps)
        place = functools.partial(devices.place_batch, device=device)
        self._reader = make_reader(source, seed, place, readers=options.readers)
        self._tried = TrialInputs(model, self._reader, source.num_records, global_batch, seed, options)
        self._trial = None if extras.get("traits") else LossTrial(self._tried)
        advance = OptimizerStep(model, optimizer, scheduler, options, owned=extras.get("owned", False), seed=seed)
        process_group = GlooGroup(connector("gloo" if options.bitwise else options.backend, device))
        replica = self._replica = Replica(model, advance, process_group, source.num_records, options)
        self._settings, timer = advance.settings, StepTimer()
        replica.exchange.on_computed, replica.exchange.on_sent = timer.end_computing, self._read_ahead
        link = self._link = connect(process_group.cut_until_left)
        checkpointer, faults = extras.get("checkpointer"), extras.get("faults", ())
        if checkpointer is None:
            checkpointer, faults = Checkpointer.of_script(plan, source)
        self._timer, self._faults = timer, Faults(faults, link.ref)
        group = self._group = WorkerGroup(link, process_group, self._faults)
        replica.exchange = extras.get("exchange", keep_exchange)(replica.exchange, group, lambda: self._at)
        self._step_reader = StepReader(plan, self._reader, group, timer, seed)
        self._recovery = Recovery(replica, group, self._faults, global_batch=global_batch)
        self._evaluations = Evaluations(extras.get("validation"), plan, replica, group, link, checkpointer)
        self._reporter = StepReporter(link, group, timer, plan)
        self._commit = Commit(plan=plan, replica=replica, group=group, evaluations=self._evaluations,
                              reporter=self._reporter, checkpointer=checkpointer, faults=self._faults)  # fmt: skip
        self._trials = Trials(link, plan, source, self._reader, replica)
        self._profiler, self._host_waits = StepProfiler.of_job(), device.type == "cpu"
        self._failed, self._contribution, self._wishes, self._infinite = False, Contribution(), 0, InfiniteSteps()

    def __iter__(self) -> Iterator[StepBatch]:
        if isinstance(self._trial, LossTrial):
            yield from self._try_loop(self._trial)
        self._replica.take_traits(self._traits)
        self._doubts = Doubts(self._traits, None if self._replica.owned else self.model)
        self._watch_generators()
        store = StoreServer()
        plan = self._plan
        hello = pb.Hello(
            store=store.address, state=self._recovery.address, num_records=plan.num_records,
            total_steps=plan.total_steps, shard_records=plan.micro_batch, blocks=plan.blocks,
        )  # fmt: skip
        self._link.join(hello)
        if is_replacement():
            self._recovery.make_room()
        self._regroup()
        while True:
            at = self._at
            if self._wishes or (self._group.size == 1 and self._group.wants_regroup()):  # alone: no one to agree with
                self._regroup()
            elif self._evaluations.due(at):
                self._validate()
            elif at >= plan.total_steps or self._replica.ledger.stopped:
                if self._try_finish():
                    break
            else:
                yield from self._one_step()
        self._replica.detach()  # else the hooks on the parameters hold the group
        for ended in (self._profiler, self._group.process_group, self._recovery, self._link, self._reader, store):
            ended.close()

    def step(self, loss: torch.Tensor, *, weight: float | torch.Tensor | None = None) -> bool:
        """Takes this worker's `loss` of a batch; True if it completed a step that was applied.

        The loss is a mean or a sum over the records, or one value for each. `weight`: what it divides by, if that is
        not the number of records (tokens that count, class weights). False if the step has further batches, or failed:
        its records are then handed out again. Raises UsageError, and RecipeError for a loss of another shape.
        """
        batch = self._batch
        if batch is None:
            raise UsageError("job.step(loss) was called without a batch", hint="call it once for every batch")
        self._batch, count = None, len(batch.records)
        divisor = None if weight is None else as_weight(weight, count)
        if self._trial is not None:
            return self._count_tried(applied=self._trial.take(loss, divisor, count))
        self._step_reader.expect_no_draws(batch.step)
        self._generators.expect_still(batch.step)
        self._settings.expect_one_rule(batch.step, first=not self._contribution.count)
        value, share = count_loss(self._traits.reduction, loss, divisor, records=count, of_step=batch.weight,
                                  step=batch.step, even=self._traits.even)  # fmt: skip
        if self._doubts.rise(value, count):
            return False
        self._contribution.add(batch.records, value.item() if share.weight else 0.0, share)
        if batch.last:
            return self._reduce(batch.step, (value, batch.weight, batch.records, share))
        self._replica.add(value, batch.weight, batch.records, share)
        return False

    def _state_loss(self) -> None:
        """Enters in the ledger, and so in certificates and checkpoints, how the loss of a step is made."""
        shards = {"shard_records": self._plan.micro_batch} if self._traits.whole and self._plan.micro_batch else {}
        self._replica.ledger.loss = {"reduction": self._traits.reduction, **shards}

    def try_with(self, loss_of: Callable[[Batch], torch.Tensor]) -> None:
        """Sets the function that computes the loss when single records are tried; without it only reading is tried."""
        self._trials.loss_of = loss_of

    def forward(self) -> AbstractContextManager[None]:
        """Around the forward of the built-in loop: raises Overtaken, for `blame`, once a death made it futile. A large
        model computes for seconds, in which the survivors of a death could take the step again."""
        watched = self._recovery.large and not self._replica.options.compile
        return self._group.watch_forward() if watched else nullcontext()

    def leave(self) -> None:
        """Announces a departure, which takes effect between two steps."""
        self._link.leave()

    def fail(self, what: str, detail: str) -> None:
        """Ends the job for all workers, with an error that each of them would meet."""
        self._link.fail(what, detail)

    @property
    def _at(self) -> int:
        """The group's current step: applied steps, of the other members while this worker receives the state."""
        return self.steps if self._recovery.holds else self._recovery.observed

    def _one_step(self) -> Iterator[StepBatch]:
        step, holds, group = self._at, self._recovery.holds, self._group
        self._profiler.begin(step, leads=self.leads)
        self._faults.at("before" if holds else "observing", step)
        self._link.report_phase("reading")
        self._timer.begin()
        self._replica.begin()
        self._settings.mark()
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
            read = functools.partial(self._read, step, piece, last=number == len(pieces))
            yield from self._hand_out(self._batch, read)
            if self._batch is not None:
                raise UsageError("the loop did not call job.step(loss)", hint="call it once for every batch")
            if self._infinite.error is not None:
                yield from self._find_infinite(step)
            if self._failed:
                return
            self._replica.expect_own_changes()

    def _read(self, step: int, piece: ForwardPiece, *, last: bool) -> StepBatch | None:
        """The batch of a piece; None if a record cannot be read: the group has then regrouped without it."""
        try:
            batch = self._step_reader.read(step, piece, last=last)
        except Exception as error:  # noqa: BLE001  reading runs the user's code
            self.blame(error, piece.records)
            return None
        self._replica.exchange.syncing = last
        if last:
            self._link.report_phase("computing")
        return batch

    def _read_ahead(self) -> None:
        """Reads the first batch of the next step while the sums of this one are on their way. Not where a GPU computes
        on, and the hook runs outside of the main thread."""
        if self._group.view.careful or not self._recovery.holds or not self._host_waits:
            return
        self._link.report_phase("reading")
        try:
            self._doubts.look_ahead(*self._step_reader.read_ahead(self.steps + 1))
        except Exception as error:  # noqa: BLE001  the step reads it again and handles the error
            events.emit("read.ahead_failed", step=self.steps + 1, why=f"{type(error).__name__}: {error}")
        self._replica.optimizer_step.seed(self.steps)
        self._link.report_phase("waiting")

    def _account(self, step: int, *, holds: bool) -> StepAccount:
        group = self._group
        rates, wish = [0.0] * group.size, group.wants_regroup()
        settings = self._settings.pack(own=holds and self._contribution.count > 0)
        if not holds:
            return StepAccount(wishes=int(wish), rates=rates, settings=settings)
        rates[group.rank] = group.rate_to_report(self._timer.rate)
        account = self._contribution.account(group.generation, step, wish=wish, rates=rates)
        return replace(account, settings=settings) if settings else account

    def _reduce(self, step: int, piece: tuple[torch.Tensor, float, Ints, Share] | None) -> bool:
        """Runs the all-reduce of `step` and commits it; True if the step was applied."""
        if self._replica.exchange.broken is not None:
            return self._abandon(str(self._replica.exchange.broken))
        if self._group.is_overtaken():
            return self._abandon("a newer view")
        self._faults.arm_backward(step, self.model)
        holds = self._recovery.holds
        try:
            mine = self._account(step, holds=holds)
            self._link.report_phase("waiting")
            group, shards = self._group, list[int]()
            if self._plan.micro_batch:
                shards = group.by_rank(self._plan.shard_counts(step, group.ordered_weights))
            account = self._replica.reduce(piece, mine, Shares(shards, group.order))
        except RuntimeError as error:
            if not is_collective(error):
                self.blame(error, self._contribution.records)
                return False
            return self._abandon(str(error))
        self._link.report_phase("committing")
        self._faults.at("allreduced", step)
        self._timer.end_waiting(self._contribution.count)
        self._wishes = account.wishes if group.size > 1 else int(group.wants_regroup())
        group.update_rates(account.rates, account.count)
        self._recovery.count_holders(account.holders)
        if not holds:
            self._observe(account)
            return False
        self._commit.check(account)
        if math.isfinite(account.loss) and self._replica.is_finite():
            return self._commit.commit(account)
        return self._refuse(step, "gradients" if math.isfinite(account.loss) else "loss")

    def _observe(self, account: StepAccount) -> None:
        """Keeps the sums of a step in which this worker had no state, and applies them once it has arrived."""
        self._recovery.keep(account)
        if self._recovery.crowded:
            self._recovery.wait()
        if self._recovery.has_arrived():
            self._catch_up()

    def _catch_up(self) -> bool:
        """Takes the fetched state and the steps since then; False, after a regroup, if the transfer failed."""
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
        self._recovery.wait()  # the state tells whether this was the last one
        self._catch_up()

    def _abandon(self, why: str) -> bool:
        """Gives up the failed step, which no member can have gone beyond, and regroups to repeat it."""
        self._failed = True
        self._settings.rewind()
        self._group.failure, self._group.failed = why.partition("\n")[0], True
        events.emit("step.failed", step=self._at, generation=self._group.generation, why=self._group.failure)
        self._regroup()
        return False

    def _regroup(self) -> None:
        self._replica.detach()
        self._recovery.forget()
        steps = self.steps if self._recovery.has_state else -1
        self._group.regroup(steps=steps, rate=self._timer.rate or -self._traits.rate, heal=self._heal)
        self._reporter.note_regroup()
        self._evaluations.forget()
        self._wishes = 0
        if self._recovery.holds:
            self._commit.halt()

    def _heal(self) -> None:
        self._plan.leave_out(list(self._group.view.set_aside))
        self._recovery.heal()
        self._state_loss()
        self._replica.attach(self._group.size)

    def _try_finish(self) -> bool:
        """True if every member has applied the last step; False after a regroup for one that has not."""
        if not self._recovery.holds:
            self._recovery.wait()
            self._catch_up()
            return False
        self._link.report_phase("finishing")
        self._faults.at("finishing", self.steps)
        self._commit.finish()
        certificates = [pb.Certificate(**certificate) for certificate in self.certificates]
        if self._link.finish(self._group.generation, self.steps, certificates).finished:
            return True
        self._regroup()
        return False

    def blame(self, error: Exception, records: Ints | None = None, *, sure: bool = True) -> None:
        """Reports the records that made this worker's share raise `error`. Raises `error` again if none is to blame
        and it is `sure` that it is this worker's."""
        if isinstance(error, Overtaken):
            self._batch = None
            self._abandon(str(error))
            return
        if self._trial is not None and not isinstance(error, torch.OutOfMemoryError):
            if self._trial.inputs.chosen is None:
                raise error
            self._trial.failed, self._batch = True, None  # its step blames the record
            return
        if records is None:
            records = self._batch.records if self._batch is not None else np.empty(0, np.int64)
        self._batch = None
        self._replica.exchange.detach()  # its hooks wait for the backward of the forward that failed
        accused = self._trials.accuse(error, self._at, records, sure=sure)
        self._abandon(f"records {accused} failed" if accused else str(error))
