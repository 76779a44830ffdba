"""From the sums of a step to the next state: compared with the plan, applied, entered in the ledger, certified.

Who holds the state does this right after the allreduce; who observed does it when the state is there, with the sums
that it kept. Nothing is changed before the comparison.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trueline.errors import RecordsMiscounted
from trueline.train.step.evaluation_loop import Evaluations
from trueline.train.step.group import WorkerGroup
from trueline.train.step.ledger import StepAccount
from trueline.train.step.plan import JobPlan
from trueline.train.step.replica import Reduced, Replica


@dataclass(frozen=True, slots=True)
class Commit:
    plan: JobPlan
    replica: Replica
    group: WorkerGroup
    evaluations: Evaluations

    def check(self, account: StepAccount) -> None:
        """Compares the account of the step at hand with its plan. Raises RecordsMiscounted, RecipeError."""
        step = self.replica.ledger.steps
        try:
            account.check(
                records=len(self.plan.records(step)),
                plan_digest=self.plan.digest(step),
                generation=self.group.generation,
                step=step,
            )
        except RecordsMiscounted:
            self.replica.check_all_used()  # DDP never reduces a bucket that holds an unused parameter
            raise

    def apply(self, account: StepAccount) -> bool:
        """Applies the step at hand; False when its gradients overflowed and nothing but their scale has changed."""
        step = self.replica.ledger.steps
        return self.replica.apply(account, self.evaluations.value(), left_out=self.plan.left_out(step))

    def certificate(self) -> dict[str, Any] | None:
        """Of the epoch that the last applied step ends, if it ends one."""
        step = self.replica.ledger.steps - 1
        return self.replica.ledger.close_epoch(self.plan.epoch_of(step)) if self.plan.ends_epoch(step) else None

    def certify_part(self) -> bool:
        """Certifies the part of an epoch in which an evaluation stopped the job; False when there is none."""
        ledger = self.replica.ledger
        if not ledger.stopped or not ledger.epoch_steps:
            return False
        ledger.close_epoch(self.plan.epoch_of(ledger.steps), partial=True)
        return True

    def catch_up(self, missed: list[Reduced | list[float]]) -> None:
        """Applies what the others have applied since the state was copied: steps and evaluations, oldest first."""
        for one in missed:
            if isinstance(one, list):
                self.evaluations.enter(one)
                continue
            self.replica.begin()
            self.replica.recall(one)
            self.check(one.account)
            if not math.isfinite(one.account.loss):
                continue  # nobody applied it
            if self.apply(one.account):
                self.certificate()
