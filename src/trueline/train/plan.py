"""The plan of a job: which records form step k, and which of them are whose.

A pure function of (seed, step, global_batch, number of workers, rank); who computes it, and how often, changes nothing.
Plans of neighbouring steps are computed together because numpy's cost is per call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from trueline.data import order
from trueline.train import ledger

Ints = npt.NDArray[np.int64]
_TOGETHER = 64


@lru_cache(maxsize=256)
def _equal_shares(count: int, workers: int) -> list[tuple[int, int]]:
    return order.split(count, [1.0] * workers)


@dataclass(slots=True, kw_only=True)
class JobPlan:
    num_records: int
    global_batch: int
    epochs: int
    seed: int
    _first: int = -1
    _records: list[Ints] = field(default_factory=list)

    @property
    def epoch_steps(self) -> int:
        return order.steps_per_epoch(self.num_records, self.global_batch)

    @property
    def total_steps(self) -> int:
        return self.epochs * self.epoch_steps

    def epoch_of(self, step: int) -> int:
        return step // self.epoch_steps

    def ends_epoch(self, step: int) -> bool:
        return (step + 1) % self.epoch_steps == 0

    def records(self, step: int) -> Ints:
        """The ids of the records of `step` (0-based over the whole job), in the order of the epoch's permutation."""
        if not 0 <= step - self._first < len(self._records) or self._first < 0:
            self._compute(step)
        return self._records[step - self._first]

    def _compute(self, step: int) -> None:
        epoch, start, _ = order.locate(step, num_records=self.num_records, global_batch=self.global_batch)
        stop = min(start + _TOGETHER * self.global_batch, self.num_records)
        ids = order.record_at(
            np.arange(start, stop, dtype=np.int64), seed=self.seed, epoch=epoch, num_records=self.num_records
        )
        self._first = step
        self._records = [ids[i : i + self.global_batch] for i in range(0, len(ids), self.global_batch)]

    def share(self, step: int, *, rank: int, workers: int) -> Ints:
        """The part of `records(step)` that `rank` of `workers` trains on; it may be empty in a short last step."""
        records = self.records(step)
        start, stop = _equal_shares(len(records), workers)[rank]
        return records[start:stop]

    def digest(self, step: int) -> int:
        return ledger.digest(self.records(step))
