"""Evaluations in the loop of a worker: when one is due, what it says, its entry in the ledger, its report.

After a regroup the one of the step at hand is made again: not all members need have entered it.
"""

from __future__ import annotations

from typing import Any

from trueline.train.link.contract import ProgressReporter
from trueline.train.step.checkpointer import Checkpointer
from trueline.train.step.group import WorkerGroup
from trueline.train.step.plan import JobPlan
from trueline.train.step.replica import Replica
from trueline.train.step.validation import Validation, as_message


class Evaluations:
    """What a `Validation` asks for, if the job has one."""

    def __init__(
        self,
        validation: Validation | None,
        plan: JobPlan,
        replica: Replica,
        group: WorkerGroup,
        link: ProgressReporter,
        checkpointer: Checkpointer | None,
    ) -> None:
        self._validation, self._plan, self._replica = validation, plan, replica
        self._group, self._link, self._checkpointer = group, link, checkpointer
        self._measured_at = -1

    def due(self, at: int) -> bool:
        """True when an evaluation belongs here, after `at` applied steps."""
        if self._validation is None or self._measured_at == at:
            return False
        return self._validation.rule.due(at, self._plan.epoch_steps, self._plan.total_steps)

    def forget(self) -> None:
        """The members have changed."""
        self._measured_at = -1

    def measure(self, at: int, *, holds: bool) -> list[float]:
        """The sums of all members; who does not hold the state adds zeros. Raises RuntimeError when a peer fails."""
        assert self._validation is not None
        found = self._validation.measure_all(self._group, self._replica if holds else None)
        self._measured_at = at
        return found

    def enter(self, totals: list[float]) -> None:
        """Enters what the sums say of the state at hand, tells it, and has the best state written."""
        assert self._validation is not None
        evaluation: dict[str, Any] = self._validation.enter(self._replica, totals)
        self._link.report_evaluation(as_message(evaluation))
        if self._checkpointer is not None and self._group.rank == 0 and evaluation["best"]:
            self._checkpointer.after_step(self._replica, self._link, ends_epoch=False, best=True)

    def value(self) -> float | None:
        """What the evaluation of the state at hand gave, smaller is better; None: there was none."""
        ledger = self._replica.ledger
        if self._validation is None or not ledger.evaluations or ledger.evaluations[-1]["step"] != ledger.steps:
            return None
        return self._validation.rule.value(ledger.evaluations[-1])
