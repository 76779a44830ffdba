"""What a worker reads: the batches of its part of a step, and the first of the next one while it waits for peers.

Between the moment when all of a step is on its way and the moment when the sums are there, a worker has nothing to do;
what it reads then costs the step no time. If the members change meanwhile, that one batch was read in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trueline.data.loading.seeding import SeededReader, seed_all
from trueline.data.loading.worker_pool import ReaderPool
from trueline.train.step.contribution import StepBatch
from trueline.train.step.group import WorkerGroup
from trueline.train.step.plan import ForwardPiece, JobPlan
from trueline.train.step.timing import StepTimer


@dataclass(slots=True)
class StepReader:
    plan: JobPlan
    reader: SeededReader | ReaderPool
    group: WorkerGroup
    timer: StepTimer
    seed: int
    draws: bool
    """Whether training draws random numbers, so that they are to be those of the shard."""
    _known: tuple[int, int, tuple[float, ...]] = (-1, -1, ())
    """Generation, step and split of `_pieces`."""
    _pieces: list[ForwardPiece] = field(default_factory=list)

    def pieces(self, step: int) -> list[ForwardPiece]:
        """This worker's part of `step`, while the members stay as they are."""
        asked = self.group.generation, step, self.group.ordered_weights
        if self._known != asked:
            self._pieces = self.plan.pieces(step, rank=self.group.position, weights=self.group.ordered_weights)
            self._known = asked
        return self._pieces

    def read(self, step: int, piece: ForwardPiece, *, last: bool) -> StepBatch:
        """The batch of a piece. Raises what reading raises."""
        found = self.reader.read(piece.records, epoch=self.plan.epoch_of(step))
        weight = len(piece.records) / len(self.plan.records(step))
        if self.draws:
            seed_all(self.seed, step, piece.shard)
        self.timer.end_reading()
        return StepBatch(
            inputs=found.inputs, labels=found.labels, records=piece.records, step=step, weight=weight, last=last
        )

    def prefetch(self, step: int, left: Sequence[ForwardPiece]) -> None:
        """Has others (threads, processes) read what comes after a piece of `step`, while that is computed."""
        ahead = self.reader.ahead
        if not ahead:
            return
        coming = [(step, piece) for piece in left[:ahead]]
        for later in range(step + 1, min(step + 1 + ahead, self.plan.total_steps)):
            if len(coming) >= ahead:
                break
            coming += [(later, piece) for piece in self.pieces(later)[: ahead - len(coming)]]
        for at, piece in coming:
            self.reader.prefetch(piece.records, epoch=self.plan.epoch_of(at))

    def read_ahead(self, step: int) -> None:
        """Reads the first batch of `step` now, if nobody else does. Raises what reading raises."""
        if step < self.plan.total_steps and not self.reader.ahead:
            for piece in self.pieces(step)[:1]:
                self.reader.read_ahead(piece.records, epoch=self.plan.epoch_of(step))
        self.timer.end_reading_ahead()
