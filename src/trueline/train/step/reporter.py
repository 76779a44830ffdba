"""Reports each applied step of a worker to the master."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from trueline.train.link.contract import ProgressReporter, StepReport
from trueline.train.step.group import WorkerGroup
from trueline.train.step.ledger import StepAccount
from trueline.train.step.plan import JobPlan
from trueline.train.step.timing import StepTimer
from trueline.wire import train_pb2 as pb


@dataclass(slots=True)
class StepReporter:
    link: ProgressReporter
    group: WorkerGroup
    timer: StepTimer
    plan: JobPlan
    redone: int = 0
    """How often the step at hand was computed again after an overflow."""
    _last_ns: int = 0
    _regrouped: bool = False
    _reported_weights: tuple[float, ...] = ()

    def note_regroup(self) -> None:
        """Marks the next step as the first of a generation: its report has the time since the step before."""
        self._regrouped, self._reported_weights = True, ()

    def report(self, step: int, account: StepAccount, certificate: dict[str, Any] | None) -> None:
        """Reports the applied step `step`; `certificate`: of the epoch that it ends."""
        self.timer.end_committing()
        now = time.monotonic_ns()
        gap_ms = (now - self._last_ns) / 1e6 if self._regrouped and self._last_ns else 0.0
        self._last_ns, self._regrouped = now, False
        group = self.group
        generation = group.generation
        report = StepReport(
            step, generation, account.count, account.digest, account.loss, group.size, gap_ms, now, group.rates,
            self._new_shares(step), *self.timer.last_ms, self.redone,
        )  # fmt: skip
        self.redone = 0
        signed = None if certificate is None else pb.Certificate(**certificate)
        self.link.report_step(generation, step + 1, report, signed)

    def _new_shares(self, step: int) -> tuple[int, ...]:
        """By rank: records of such a step from now on; empty when they are those of the report before."""
        ordered_weights = self.group.ordered_weights
        if ordered_weights is self._reported_weights or ordered_weights == self._reported_weights:
            return ()
        self._reported_weights = ordered_weights
        return tuple(self.group.by_rank(self.plan.share_counts(step, ordered_weights)))
