"""Which records are to blame when a part of a step fails: each is tried alone.

A record that fails alone while others pass is suspicious; the master then gives it to somebody else, and sets it aside
when it fails there too. When everything that is tried fails, the fault is the recipe's and the error stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from trueline.data.readers import ReaderLost, Readers
from trueline.data.seeded import SeededReader
from trueline.data.source import Batch
from trueline.errors import RecipeError
from trueline.train.link import Link
from trueline.train.plan import Ints, JobPlan
from trueline.train.replica import Replica

CONTROLS = 3
"""Other records of the step and its neighbour to try when all suspects fail: do they fail as well?"""


def failing(records: Iterable[int], attempt: Callable[[int], None]) -> dict[int, str]:
    """The records for which `attempt` raises, and what it raised, in words."""
    found = {}
    for record in records:
        try:
            attempt(record)
        except ReaderLost:
            raise  # nothing can be tried any more: who takes this process's place goes on with the trial
        except Exception as error:  # noqa: BLE001  whatever a user's code raises is what is looked for
            found[record] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return found


def to_blame(mine: Sequence[int], others: Iterable[int], attempt: Callable[[int], None]) -> dict[int, str]:
    """Those of `mine` that fail alone; empty when none does, or when records of `others` fail just as well."""
    found = failing(mine, attempt)
    if len(found) < len(mine):
        return found
    controls = [record for _, record in zip(range(CONTROLS), others, strict=False)]
    broken = failing(controls, attempt)
    return found if len(broken) < len(controls) else {}


class Trials:
    """Single records, read and computed apart from the step and without a trace in the replica."""

    def __init__(self, link: Link, plan: JobPlan, reader: SeededReader | Readers, replica: Replica) -> None:
        self._link, self._plan, self._reader, self._replica = link, plan, reader, replica
        self.loss_of: Callable[[Batch], torch.Tensor] | None = None
        """Computes the loss of a batch; without it only reading is tried."""

    def to_blame(self, step: int, records: Ints) -> dict[int, str]:
        """Those of this worker's `records` of `step` that fail alone, and why."""
        mine: list[int] = records.tolist()
        chosen = set(mine)
        others = [record for record in self._plan.records(step).tolist() if record not in chosen]
        others += self._plan.records(step + 1 if step + 1 < self._plan.total_steps else max(step - 1, 0)).tolist()
        return to_blame(mine, others, lambda record: self._attempt(step, record))

    def try_all(self, step: int, pieces: Sequence[Ints]) -> None:
        """In a careful view: announces and tries each record, so that whoever dies of one has named it."""
        for record in (record for records in pieces for record in records.tolist()):
            self._link.trying(step, record)
            failing([record], lambda one: self._attempt(step, one))
        self._link.trying(step, -1)

    def _attempt(self, step: int, record: int) -> None:
        """Reads `record` alone (twice in a batch: some layers refuse a batch of one) and computes its loss."""
        self._link.doing("reading")  # how long this record takes, and not all of them, tells whether it is stuck
        batch = self._reader.read(np.array([record, record], dtype=np.int64), epoch=self._plan.epoch_of(step))
        if self.loss_of is None:
            return
        self._replica.begin()
        self._replica.syncing = False
        try:
            loss = self.loss_of(batch)
            if not math.isfinite(loss.item()):
                raise RecipeError(f"its loss is {loss.item()}")
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._replica.begin()
