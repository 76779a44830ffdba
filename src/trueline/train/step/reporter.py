"""What a worker tells the master of each step that it has applied."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from trueline.train.link.contract import Reporter, StepReport
from trueline.train.step.group import Fellowship
from trueline.train.step.ledger import StepAccount
from trueline.train.step.plan import JobPlan
from trueline.train.step.timing import Pace
from trueline.wire import train_pb2 as pb


@dataclass(slots=True)
class Report:
    link: Reporter
    fellows: Fellowship
    pace: Pace
    plan: JobPlan
    redone: int = 0
    """How often the step at hand was computed again for an overflow."""
    _last_ns: int = 0
    _regrouped: bool = False
    _dealt: tuple[float, ...] = ()

    def regrouped(self) -> None:
        """The next step is the first one of a generation: it comes with the time since the one before."""
        self._regrouped, self._dealt = True, ()

    def applied(self, step: int, account: StepAccount, certificate: dict[str, Any] | None) -> None:
        """Step `step` was applied; `certificate`: of the epoch that it ends."""
        self.pace.applied()
        now = time.monotonic_ns()
        gap_ms = (now - self._last_ns) / 1e6 if self._regrouped and self._last_ns else 0.0
        self._last_ns, self._regrouped = now, False
        fellows = self.fellows
        generation = fellows.generation
        said = StepReport(
            step, generation, account.count, account.digest, account.loss, fellows.size, gap_ms, now, fellows.rates,
            self._new_shares(step), *self.pace.last_ms, self.redone,
        )  # fmt: skip
        self.redone = 0
        signed = None if certificate is None else pb.Certificate(**certificate)
        self.link.report_step(generation, step + 1, said, signed)

    def _new_shares(self, step: int) -> tuple[int, ...]:
        """By rank: how many records of such a step each has from now on; empty when that is as it was."""
        dealt = self.fellows.dealt
        if dealt is self._dealt or dealt == self._dealt:
            return ()
        self._dealt = dealt
        return tuple(self.fellows.by_rank(self.plan.share_counts(step, dealt)))
