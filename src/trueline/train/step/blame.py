"""Which records are to blame when a part of a step fails: each is tried alone.

A record that fails alone while others pass is suspicious; the master then gives it to somebody else, and sets it aside
when it fails there too. When everything that is tried fails, the fault is the recipe's and the error stands.

What is tried is an id of the plan, with the random numbers of that id; what is accused is the record of the source that
stands there. A source that draws its records may hold one of them at several ids of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trueline.data.loading.seeding import SeededReader
from trueline.data.loading.worker_pool import ReaderLost, ReaderPool
from trueline.data.source import Batch, Source
from trueline.data.sources.mixture import describe_record
from trueline.errors import RecipeError, TrainError
from trueline.train import devices
from trueline.train.link.contract import Link
from trueline.train.step.plan import Ints, JobPlan
from trueline.train.step.replica import Replica

CONTROLS = 3
"""Other records of the step and its neighbour to try when all suspects fail: do they fail as well?"""


@dataclass(frozen=True, slots=True)
class Blamed:
    """A record of the source that failed alone."""

    record: int
    why: str
    where: str


def find_failing(records: Iterable[int], attempt: Callable[[int], None]) -> dict[int, str]:
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


def find_blamed(mine: Sequence[int], others: Iterable[int], attempt: Callable[[int], None]) -> dict[int, str]:
    """Those of `mine` that fail alone; empty when none does, or when records of `others` fail just as well."""
    found = find_failing(mine, attempt)
    if len(found) < len(mine):
        return found
    controls = [record for _, record in zip(range(CONTROLS), others, strict=False)]
    broken = find_failing(controls, attempt)
    return found if len(broken) < len(controls) else {}


class Trials:
    """Single records, read and computed apart from the step and without a trace in the replica."""

    def __init__(
        self, link: Link, plan: JobPlan, source: Source, reader: SeededReader | ReaderPool, replica: Replica
    ) -> None:
        self._link, self._plan, self._source, self._reader, self._replica = link, plan, source, reader, replica
        self.loss_of: Callable[[Batch], torch.Tensor] | None = None
        """Computes the loss of a batch; without it only reading is tried."""

    def accuse(self, error: Exception, step: int, ids: Ints) -> list[int]:
        """Tells the master which records among this worker's `ids` of `step` have made it raise `error`; returns them.

        Raises `error` again when it was not some of the records, TrainError when they are too many for the device.
        """
        if devices.is_lost(error):
            raise error  # nothing can be tried here; the master has it tried by who takes this place
        if isinstance(error, torch.OutOfMemoryError):
            raise TrainError(
                f"the device's memory does not hold what {len(ids)} records take at once: {error}",
                hint="set micro_batch to fewer records, or have more workers with a device of their own",
            ) from error
        found = self.find_blamed(step, ids)
        if not found:
            raise error
        for one in found:
            self._link.suspect(step, one.record, one.why, one.where)
        return sorted(one.record for one in found)

    def find_blamed(self, step: int, ids: Ints) -> list[Blamed]:
        """The records among this worker's `ids` of `step` that fail alone."""
        beside = step + 1 if step + 1 < self._plan.total_steps else max(step - 1, 0)
        near = np.concatenate([self._plan.records(step), self._plan.records(beside)])
        mine, about = self._by_record(step, ids), self._by_record(step, near)
        others = [one for record, one in about.items() if record not in mine and record not in self._plan.set_aside]
        found = find_blamed(list(mine.values()), others, lambda one: self._attempt(step, one))
        return [Blamed(record, found[one], self._where(record)) for record, one in mine.items() if one in found]

    def _by_record(self, step: int, ids: Ints) -> dict[int, int]:
        """The records of the source that stand at `ids`, each with the first of these."""
        found: dict[int, int] = {}
        origins = self._plan.origins(ids, epoch=self._plan.epoch_of(step))
        for record, one in zip(origins.tolist(), ids.tolist(), strict=True):
            found.setdefault(record, one)
        return found

    def _where(self, record: int) -> str:
        return describe_record(self._source, record)

    def try_all(self, step: int, pieces: Sequence[Ints]) -> None:
        """In a careful view: announces and tries each record, so that whoever dies of one has named it."""
        for ids in pieces:
            for record, one in self._by_record(step, ids).items():
                self._link.announce_trial(step, record, self._where(record))
                find_failing([one], lambda one: self._attempt(step, one))
        self._link.announce_trial(step, -1, "")

    def _attempt(self, step: int, one: int) -> None:
        """Reads what stands at `one` alone (twice in a batch: some layers refuse a batch of one), computes its loss."""
        self._link.report_phase("reading")  # how long this record takes, and not all of them, tells whether it is stuck
        batch = self._reader.read(np.array([one, one], dtype=np.int64), epoch=self._plan.epoch_of(step))
        if self.loss_of is None:
            return
        self._replica.begin()
        self._replica.exchange.syncing = False
        try:
            loss = self.loss_of(batch)
            if not math.isfinite(loss.item()):
                raise RecipeError(f"its loss is {loss.item()}")
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._replica.begin()
