"""One worker's part of a step: which records it put in, and what it says of them to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trueline.train.step.ledger import StepAccount
from trueline.train.step.plan import Ints

MOST_LOSS = 2.0**127 / 4096
"""A worker's sum of losses that is as large may have no finite sum over the workers, in float32: that is its fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Records of one forward: this worker's part of a step, or a shard of it."""

    inputs: Any
    labels: Any
    records: Ints
    step: int
    weight: float
    """Records here / records of the step: what the mean loss of this batch counts in the step."""
    last: bool = True
    """Whether `step(loss)` completes the step."""


@dataclass(slots=True)
class Contribution:
    done: list[Ints] = field(default_factory=list)
    """Records of the batches whose loss is known,"""
    count: int = 0
    """and how many they are."""
    digest: int = 0
    """Of the batches that were given out."""
    loss_sum: float = 0.0
    finite: bool = True
    """Whether the losses of this part can be summed over the workers."""

    @property
    def records(self) -> Ints:
        return np.concatenate(self.done) if self.done else np.empty(0, np.int64)

    def add(self, records: Ints, loss: float) -> None:
        """Enters a batch with the mean `loss` of its records."""
        self.done.append(records)
        self.count += len(records)
        self.loss_sum += len(records) * loss
        self.finite = self.finite and abs(self.loss_sum) < MOST_LOSS

    def account(self, generation: int, step: int, *, wish: bool, rates: Sequence[float]) -> StepAccount:
        """What this worker says of its part in the allreduce."""
        return StepAccount.of_holder(
            count=self.count, digest=self.digest, generation=generation, step=step, wish=wish,
            loss_sum=self.loss_sum, rates=rates,
        )  # fmt: skip
