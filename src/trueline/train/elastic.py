"""`Elastic`: a training loop that survives joins, leaves and deaths of its peers.

    job = trueline.Elastic(model, optimizer, dataset, global_batch=256)
    for batch in job:
        job.step(loss(model(batch.inputs), batch.labels))

The loop of a worker is a dance with two figures. **Step**: forward, backward with the ledger's words in the same
allreduce, comparison of the sums with the plan, optimizer. **Regroup**, when a peer died or a new view was agreed:
leave the group, enter the new view with the number of steps applied, form the new group, take the state of whoever
is furthest ahead, and go on with the step that nobody applied. A batch whose step failed is simply given out again,
cut anew. See docs/concepts/generation.md for the protocol and its failure cases.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trueline import events
from trueline.data.source import Source, as_source
from trueline.errors import CheckpointError, RecordsMiscounted, TrainError, UsageError
from trueline.state import checkpoint
from trueline.train import ledger as books
from trueline.train.group import GlooGroup, start_store
from trueline.train.keeper import Keeper
from trueline.train.link import Link, MasterLink, Solo
from trueline.train.plan import Ints, JobPlan
from trueline.train.replica import Replica, is_collective
from trueline.train.settings import Fault
from trueline.wire import train_pb2 as pb

PATIENCE_S = 1.0
"""After a failed collective, how long to wait for the master's word before asking for a new view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """This worker's records of one step."""

    inputs: Any
    labels: Any
    records: Ints
    step: int
    weight: float
    """Records here / records of the step: what the mean loss of this batch counts in the step."""


class Elastic:
    """Trains `model` together with whoever else is in the job; alone when this process was not started by a master.

    `dataset` is a map-style Dataset or a Source. `loss` in `step(loss)` is the mean over the batch's records.
    The model, the optimizer and the arguments must be the same in all workers.
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
        find_unused_parameters: bool = False,
        keeper: Keeper | None = None,
        faults: tuple[Fault, ...] = (),
    ) -> None:
        source = (
            dataset if isinstance(dataset, Source) else as_source(dataset, mode="training", feed=None, recipe="job")
        )
        if source.num_records < 1:
            raise UsageError("the data set has no records", hint="check dataset('training')")
        self._source = source
        self._plan = JobPlan(num_records=source.num_records, global_batch=global_batch, epochs=epochs, seed=seed)
        self._replica = Replica(
            model, optimizer, scheduler, source.num_records, find_unused_parameters=find_unused_parameters
        )
        self._group = GlooGroup()
        self._link = connect(self._group.cut_until_left)
        self._keeper = keeper
        self._faults = [fault for fault in faults if f"worker-{fault.slot}.{fault.incarnation}" == self._link.ref]
        self._view = pb.View(generation=-1)
        self._holds_state = False
        self._batch: StepBatch | None = None
        self._wishes = 0
        self._last_applied_ns = 0
        self._regrouped = False
        self._trouble = ""

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
    def certificates(self) -> list[dict[str, int]]:
        """One account for each finished epoch: steps, records, digest, least and most applications of a record."""
        return self._replica.ledger.certificates

    def __iter__(self) -> Iterator[StepBatch]:
        store, address = start_store()
        self._link.ready(address, num_records=self._plan.num_records, total_steps=self.total_steps)
        self._regroup()
        while True:
            if self.steps >= self.total_steps:
                if self._finished():
                    break
                continue
            if self._wishes:
                self._regroup()
                continue
            self._batch = self._read()
            yield self._batch
            if self._batch is not None:
                raise UsageError("the loop did not call job.step(loss)", hint="call it once for every batch")
        self._group.close()
        self._link.close()
        del store

    def step(self, loss: torch.Tensor) -> bool:
        """Applies the step with this worker's `loss`; False when it failed and its records are given out again."""
        batch = self._batch
        if batch is None:
            raise UsageError("job.step(loss) was called without a batch", hint="call it once for every batch")
        self._batch = None
        if self._replica.broken is not None:
            return self._abandon(self._replica.broken)
        try:
            summed = self._replica.backward(loss, self._words(batch, loss), batch.weight)
        except RuntimeError as error:
            if not is_collective(error):
                raise
            return self._abandon(error)
        self._fault("allreduced")
        self._apply(batch, summed)
        return True

    # Step. -----------------------------------------------------------------------------------------------------

    def _read(self) -> StepBatch:
        step, rank, workers = self.steps, self._rank, len(self._view.members)
        self._fault("before")
        records = self._plan.records(step)
        mine = self._plan.share(step, rank=rank, workers=workers)
        weight = len(mine) / len(records)
        torch.manual_seed(hash((self._plan.seed, step, rank)) & 0x7FFFFFFF)
        # A worker without a record still takes part in the allreduce: with one record that counts nothing.
        batch = self._source.read(mine if len(mine) else records[:1])
        self._replica.zero_grad()
        return StepBatch(inputs=batch.inputs, labels=batch.labels, records=mine, step=step, weight=weight)

    @property
    def _rank(self) -> int:
        return list(self._view.members).index(self._link.ref)

    def _words(self, batch: StepBatch, loss: torch.Tensor) -> torch.Tensor:
        newest = self._link.newest()
        wish = newest is not None and newest.generation > self._view.generation
        head = books.words(
            len(batch.records), books.digest(batch.records), self._view.generation, batch.step, wish=wish
        )
        tally = self._replica.ledger.tally
        words = torch.tensor([*head, len(batch.records) * loss.item()])
        if tally is not None:
            words = torch.cat([words, torch.zeros(len(tally))])
            words[books.WORDS + torch.from_numpy(batch.records)] += 1.0
        self._arm("backward")
        return words

    def _apply(self, batch: StepBatch, summed: list[float]) -> None:
        workers = len(self._view.members)
        plan = self._plan.records(batch.step)
        try:
            sums = books.check(
                summed,
                workers=workers,
                plan=plan,
                plan_digest=books.digest(plan),
                generation=self._view.generation,
                step=batch.step,
            )
        except RecordsMiscounted:
            self._replica.check_all_used()  # DDP never reduces a bucket that holds an unused parameter
            raise
        self._replica.apply()
        ledger = self._replica.ledger
        ledger.apply(sums, self._replica.tally())
        certificate = ledger.close_epoch(self._plan.epoch_of(batch.step)) if self._plan.ends_epoch(batch.step) else None
        self._fault("applied")
        self._wishes = sums.wishes
        self._tell(batch.step, sums, certificate)
        if self._keeper is not None and self._rank == 0:
            self._keeper.after_step(self._replica, self._link, ends_epoch=certificate is not None)

    def _tell(self, step: int, sums: books.Sums, certificate: dict[str, int] | None) -> None:
        now = time.monotonic_ns()
        gap_ms = (now - self._last_applied_ns) / 1e6 if self._regrouped and self._last_applied_ns else 0.0
        self._last_applied_ns, self._regrouped = now, False
        applied = pb.Applied(
            step=step,
            generation=self._view.generation,
            records=sums.count,
            digest=sums.digest,
            loss=sums.loss,
            workers=len(self._view.members),
            gap_ms=gap_ms,
            at_ns=now,
        )
        signed = None if certificate is None else pb.Certificate(**certificate)
        self._link.progress(self._view.generation, self.steps, applied, signed)

    # Regroup. --------------------------------------------------------------------------------------------------

    def _abandon(self, error: RuntimeError) -> bool:
        """The step failed under us: nobody can have applied more than it. Regroup and do it again."""
        self._trouble = str(error).partition("\n")[0]
        events.emit("step.failed", step=self.steps, generation=self._view.generation, why=self._trouble)
        self._regroup()
        return False

    def _regroup(self) -> None:
        after = self._view.generation
        while True:
            self._replica.detach()
            self._group.close()
            view = self._next_view(after)
            if self._link.ref not in view.members:
                if self._view.generation >= 0:
                    raise SystemExit(0)  # a planned departure: the others go on without this worker
                after = view.generation  # a newcomer whom this view does not hold yet
                continue
            self._link.flush()
            plan = self._link.enter(view.generation, self.steps if self._holds_state else -1)
            after = view.generation
            if not plan.superseded and self._formed(view, plan):
                break
        self._view, self._wishes, self._regrouped = view, 0, True
        self._link.leads = self._rank == 0

    def _next_view(self, after: int) -> pb.View:
        while True:
            view = self._link.wait_view(after, PATIENCE_S)
            if view is not None:
                return view
            if self._view.generation >= 0:
                self._link.broken(after, self._trouble)

    def _formed(self, view: pb.View, plan: pb.Plan) -> bool:
        rank = list(view.members).index(self._link.ref)
        try:
            self._group.form(view.generation, rank=rank, size=len(view.members), store=plan.store)
            self._heal(rank, plan)
            self._replica.attach()
        except RuntimeError as error:
            if not is_collective(error):
                raise
            self._trouble = str(error).partition("\n")[0]
            events.emit("group.failed", generation=view.generation, why=self._trouble)
            return False
        return True

    def _heal(self, rank: int, plan: pb.Plan) -> None:
        """Brings whoever is behind to the state of the member that is furthest ahead."""
        if plan.checkpoint and rank == plan.source:
            self._replica.restore(_newest(Path(plan.checkpoint)).state)
        behind = [step < plan.steps[plan.source] or step < 0 for step in plan.steps]
        if any(flag for other, flag in enumerate(behind) if other != plan.source):
            self._replica.exchange(source=plan.source, take=behind[rank])
        self._holds_state = True

    def _finished(self) -> bool:
        """True when every member has applied the last step; False after a regroup for one that has not."""
        self._link.certify([pb.Certificate(**certificate) for certificate in self.certificates])
        self._link.flush()
        if self._keeper is not None and self._rank == 0:
            self._keeper.complete(self._replica, self._link)
        if self._link.finish(self._view.generation, self.steps).finished:
            return True
        self._regroup()
        return False

    # Injected faults. ------------------------------------------------------------------------------------------

    def _due(self, phase: str) -> bool:
        return any(fault.phase == phase and self.steps >= fault.step for fault in self._faults)

    def _fault(self, phase: str) -> None:
        if self._faults and self._due(phase):
            os.kill(os.getpid(), 9)

    def _arm(self, phase: str) -> None:
        """Kills in the middle of backward: when the gradient that is ready last is, others are on their way."""
        if self._faults and self._due(phase):
            first = next(iter(self._replica.model.parameters()))
            first.register_post_accumulate_grad_hook(lambda _: os.kill(os.getpid(), 9))  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Announces a departure; it takes effect between two steps."""
        self._link.leave()

    def fail(self, what: str, detail: str) -> None:
        """Ends the job for everybody: an error that every worker would meet."""
        self._link.fail(what, detail)


def _newest(path: Path) -> checkpoint.Checkpoint:
    """The checkpoint at `path`, or the newest older one when it is torn. Raises CheckpointError."""
    try:
        return checkpoint.read(path)
    except CheckpointError:
        older = checkpoint.latest(path.parent)
        if older is None:
            raise
        return older


def connect(cut: Callable[[int], None]) -> Link:
    """The line to the master that started this process, or `Solo` when none did."""
    address = os.environ.get("TRUELINE_MASTER")
    if address is None:
        return Solo()
    try:
        return MasterLink(address, os.environ["TRUELINE_SECRET"], os.environ["TRUELINE_REF"], cut)
    except KeyError as error:
        raise TrainError(
            f"TRUELINE_MASTER is set but {error} is not", hint="start workers through an engine"
        ) from error
