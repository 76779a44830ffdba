"""Finds the records that make a step fail: each is tried alone.

A record that fails alone while others pass is reported to the master, which gives it to another worker and sets it
aside if it fails there too. If every record fails, the recipe is at fault and the error stands. A trial takes an id of
the plan, with its random numbers; a source that draws its records may have one of them at several ids.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trueline.data.loading.seeding import SeededReader
from trueline.data.loading.worker_pool import ReaderLost, ReaderPool
from trueline.data.source import Batch, Source
from trueline.data.sources.mixture import describe_record
from trueline.errors import MissingValues, RecipeError, TrainError, UnequalLengths
from trueline.train import devices
from trueline.train.link.contract import Link
from trueline.train.step.model_traits import explain_single
from trueline.train.step.plan import Ints, JobPlan
from trueline.train.step.replica import Replica

CONTROLS = 3  # other records, of this step and the next, that are tried when all suspects fail


@dataclass(frozen=True, slots=True)
class Blamed:
    """A record of the source that failed alone."""

    record: int
    why: str
    where: str


def find_failing(records: Iterable[int], attempt: Callable[[int], None]) -> dict[int, str]:
    """The records for which `attempt` raises, each with the error as text."""
    failing = {}
    for record in records:
        try:
            attempt(record)
        except ReaderLost:
            raise  # this process can try nothing more; its replacement continues the trial
        except Exception as error:  # noqa: BLE001  the user's code may raise anything
            failing[record] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return failing


def find_blamed(mine: Sequence[int], others: Iterable[int], attempt: Callable[[int], None]) -> dict[int, str]:
    """Those of `mine` that fail alone; empty if none does, or if the first few of `others` fail as well."""
    failing = find_failing(mine, attempt)
    if len(failing) < len(mine):
        return failing
    controls = [record for _, record in zip(range(CONTROLS), others, strict=False)]
    return failing if len(find_failing(controls, attempt)) < len(controls) else {}


class Trials:
    """Reads and computes single records apart from the step, without a trace in the replica."""

    def __init__(
        self, link: Link, plan: JobPlan, source: Source, reader: SeededReader | ReaderPool, replica: Replica
    ) -> None:
        self._link, self._plan, self._source, self._reader, self._replica = link, plan, source, reader, replica
        self.loss_of: Callable[[Batch], torch.Tensor] | None = None
        """Computes the loss of a batch; without it only reading is tried."""

    def accuse(self, error: Exception, step: int, ids: Ints, *, sure: bool = True) -> list[int]:
        """Reports the records among this worker's `ids` of `step` that made it raise `error`; returns them.

        Raises `error` again if no record did and it is `sure` that this worker's share did, TrainError if they are too
        many for the device.
        """
        if isinstance(error, (MissingValues, UnequalLengths)):
            raise error  # of the columns, not of these records
        if devices.is_lost(error):
            raise error  # nothing can be tried here; the replacement of this process tries
        if isinstance(error, torch.OutOfMemoryError):
            raise TrainError(
                f"the device's memory does not hold what {len(ids)} records take at once: {error}",
                hint="set micro_batch to fewer records, or have more workers with a device of their own",
            ) from error
        blamed = self.find_blamed(step, ids)
        if not blamed and sure:
            raise explain_single(error, len(ids)) or error
        return self._report(step, blamed)

    def report(self, step: int, ids: Ints, found: dict[int, str]) -> list[int]:
        """Reports the records of those of `ids` that were `found` to fail, with what was found; returns them."""
        failing = [(record, found[id]) for record, id in self._by_record(step, ids).items() if id in found]
        blamed = [Blamed(record, why, describe_record(self._source, record)) for record, why in failing]
        return self._report(step, blamed)

    def _report(self, step: int, blamed: Sequence[Blamed]) -> list[int]:
        for suspect in blamed:
            self._link.suspect(step, suspect.record, suspect.why, suspect.where)
        return sorted(suspect.record for suspect in blamed)

    def find_blamed(self, step: int, ids: Ints) -> list[Blamed]:
        """The records among this worker's `ids` of `step` that fail alone."""
        beside = step + 1 if step + 1 < self._plan.total_steps else max(step - 1, 0)
        near = np.concatenate([self._plan.records(step), self._plan.records(beside)])
        mine, others = self._by_record(step, ids), self._by_record(step, near)
        controls = [id for record, id in others.items() if record not in mine and record not in self._plan.set_aside]
        failing = find_blamed(list(mine.values()), controls, lambda id: self._attempt(step, id))
        bad = {record: failing[id] for record, id in mine.items() if id in failing}
        return [Blamed(record, why, describe_record(self._source, record)) for record, why in bad.items()]

    def _by_record(self, step: int, ids: Ints) -> dict[int, int]:
        """The records of the source at `ids`, each with its first id."""
        first: dict[int, int] = {}
        origins = self._plan.origins(ids, epoch=self._plan.epoch_of(step))
        for record, id in zip(origins.tolist(), ids.tolist(), strict=True):
            first.setdefault(record, id)
        return first

    def try_all(self, step: int, pieces: Sequence[Ints]) -> None:
        """In a careful view: announces each record before trying it, so that a worker that dies of one has named it."""
        for ids in pieces:
            for record, id in self._by_record(step, ids).items():
                self._link.announce_trial(step, record, describe_record(self._source, record))
                find_failing([id], lambda id: self._attempt(step, id))
        self._link.announce_trial(step, -1, "")

    def _attempt(self, step: int, id: int) -> None:
        """Reads the record at `id` alone, twice in a batch since some layers refuse a batch of one, and its loss."""
        self._link.report_phase("reading")  # restarts the clock that detects a stuck worker, for each record
        batch = self._reader.read(np.array([id, id], dtype=np.int64), epoch=self._plan.epoch_of(step))
        if self.loss_of is None:
            return
        self._replica.begin()
        self._replica.exchange.syncing = False
        try:
            loss = self.loss_of(batch)
            if not math.isfinite(loss.item()):
                raise RecipeError(f"its loss is {loss.item()}")
            loss.backward()  # type: ignore[no-untyped-call]
            if why := self._replica.describe_infinite():
                raise RecipeError(why)
        finally:
            self._replica.begin()
