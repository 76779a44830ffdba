"""Commits a step: compares the sums with the plan, applies them, enters them in the ledger, reports, certifies.

A member that holds the state commits right after the all-reduce. An observer does it once the state has arrived, with
the sums that it kept. Nothing changes before the comparison.
"""

import math
import time
from dataclasses import dataclass, field
from typing import Any

from trueline import events
from trueline.train.faults import Faults
from trueline.train.link.contract import ProgressReporter, StepReport
from trueline.train.step.checkpointer import Checkpointer
from trueline.train.step.group import WorkerGroup
from trueline.train.step.ledger import StepAccount
from trueline.train.step.load_balance import StepTimer
from trueline.train.step.plan import JobPlan
from trueline.train.step.replica import Reduced, Replica
from trueline.train.step.validation import Evaluations
from trueline.wire import train_pb2 as pb


@dataclass(slots=True)
class StepReporter:
    link: ProgressReporter
    group: WorkerGroup
    timer: StepTimer
    plan: JobPlan
    redone: int = 0  # how often the current step was computed again after an overflow
    _last_ns: int = 0
    _regrouped: bool = False
    _reported_weights: tuple[float, ...] = ()

    def note_regroup(self) -> None:
        """Marks the next step as the first of a generation: its report has the time since the step before."""
        self._regrouped, self._reported_weights = True, ()

    def report(
        self, step: int, account: StepAccount, certificate: dict[str, Any] | None, measured: tuple[float, float]
    ) -> None:
        """Reports the applied step `step`; `certificate`: of the epoch that it ends; `measured`: by the optimizer."""
        self.timer.end_committing()
        now = time.monotonic_ns()
        gap_ms = (now - self._last_ns) / 1e6 if self._regrouped and self._last_ns else 0.0
        self._last_ns, self._regrouped = now, False
        group, generation = self.group, self.group.generation
        report = StepReport(
            step, generation, account.count, account.digest, account.loss, group.size, gap_ms, now, group.rates,
            self._new_shares(step), *self.timer.last_ms, self.redone, *measured,
        )  # fmt: skip
        self.redone = 0
        signed = None if certificate is None else pb.Certificate(**certificate)
        self.link.report_step(generation, step + 1, report, signed)

    def _new_shares(self, step: int) -> tuple[int, ...]:
        """By rank: records of such a step from now on; empty if unchanged since the last report."""
        ordered_weights = self.group.ordered_weights
        if ordered_weights is self._reported_weights or ordered_weights == self._reported_weights:
            return ()
        self._reported_weights = ordered_weights
        return tuple(self.group.by_rank(self.plan.share_counts(step, ordered_weights)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    plan: JobPlan
    replica: Replica
    group: WorkerGroup
    evaluations: Evaluations
    reporter: StepReporter
    checkpointer: Checkpointer | None = None
    faults: Faults = field(default_factory=lambda: Faults((), ""))

    def check(self, account: StepAccount) -> None:
        """Compares the account of the current step with its plan. Raises RecordsMiscounted, RecipeError."""
        step = self.replica.ledger.steps
        account.check(
            records=len(self.plan.records(step)), plan_digest=self.plan.digest(step),
            generation=self.group.generation, step=step,
        )  # fmt: skip
        self.replica.check_all_used()

    def apply(self, account: StepAccount) -> bool:
        """Applies the checked step; False if its gradients overflowed, so that only their scale has changed."""
        step = self.replica.ledger.steps
        return self.replica.apply(account, self.evaluations.value(), left_out=self.plan.left_out(step))

    def commit(self, account: StepAccount) -> bool:
        """Applies the checked step, reports it, and writes a checkpoint if one is due. False after an overflow."""
        step = self.replica.ledger.steps
        if not self.apply(account):
            self.reporter.redone += 1
            events.emit("step.overflowed", step=step, scale=self.replica.optimizer_step.scaler.get_scale())
            return False
        certificate = self.certificate()
        self.faults.at("applied", step)
        self.reporter.report(step, account, certificate, self.replica.optimizer_step.measured)
        self._after_step(ends_epoch=certificate is not None)
        return True

    def _after_step(self, *, ends_epoch: bool, due: bool = False) -> None:
        if self.checkpointer is not None and self.group.rank == 0:
            self.checkpointer.after_step(self.replica, self.reporter.link, ends_epoch=ends_epoch, due=due)

    def halt(self) -> None:
        """Writes the checkpoint of a job that halts while a group forms: no member takes another step."""
        if self.reporter.link.halting and self.reporter.link.save_from <= self.replica.ledger.steps:
            self._after_step(ends_epoch=False, due=True)

    def certificate(self) -> dict[str, Any] | None:
        """Closes the epoch that the last applied step ends, if it ends one."""
        step = self.replica.ledger.steps - 1
        return self.replica.ledger.close_epoch(self.plan.epoch_of(step)) if self.plan.ends_epoch(step) else None

    def finish(self) -> None:
        """Certifies the epoch in which an evaluation stopped the job, and waits for the last checkpoint."""
        if self.certify_part():
            self._after_step(ends_epoch=False, due=True)
        if self.checkpointer is not None and self.group.rank == 0:
            self.checkpointer.complete(self.replica, self.reporter.link)

    def certify_part(self) -> bool:
        """Certifies the part of an epoch in which an evaluation stopped the job; False if there is none."""
        ledger = self.replica.ledger
        if not ledger.stopped or not ledger.epoch_steps:
            return False
        ledger.close_epoch(self.plan.epoch_of(ledger.steps), partial=True)
        return True

    def catch_up(self, missed: list[Reduced | list[float]]) -> None:
        """Applies the steps and evaluations since the state was copied, oldest first."""
        for entry in missed:
            if isinstance(entry, list):
                self.evaluations.enter(entry)
                continue
            self.replica.begin()
            self.replica.recall(entry)
            self.check(entry.account)
            if not math.isfinite(entry.account.loss) or not self.replica.is_finite():
                continue  # no member applied it
            if self.apply(entry.account):
                self.certificate()
