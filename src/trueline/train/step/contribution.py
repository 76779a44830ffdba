"""One worker's part of a step: which records it put in, and what it says of them to the others."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trueline.train.step import ledger as books
from trueline.train.step.plan import Ints

_LARGEST = float(np.finfo(np.float32).max)
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
class Part:
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

    def words(self, generation: int, step: int, *, wish: bool) -> list[float]:
        """The ledger's words (see ledger.py)."""
        found = books.words(self.count, self.digest & books.MASK, generation, step, wish=wish)
        # one that float32 has no room for is infinite for everybody, and looked into
        found.append(self.loss_sum if not abs(self.loss_sum) > _LARGEST else math.copysign(math.inf, self.loss_sum))
        return found
