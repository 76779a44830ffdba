"""A worker's contribution to a step: which records it reads, and what it reports about them to the others.

While a worker waits for the sums of a step it reads the first batch of the next one, which costs the step no time. If
the membership changes meanwhile, that batch was read for nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trueline.data.loading.random_state import generator_state
from trueline.data.loading.seeding import SeededReader, seed_all
from trueline.data.loading.worker_pool import ReaderPool
from trueline.data.source import Batch
from trueline.errors import UsageError
from trueline.train.step.group import WorkerGroup
from trueline.train.step.ledger import StepAccount
from trueline.train.step.load_balance import StepTimer
from trueline.train.step.plan import ForwardPiece, Ints, JobPlan
from trueline.train.step.reduction import Share

MOST_LOSS = 2.0**127 / 4096
"""From this size on a worker's sum of losses may have no finite float32 sum over the workers; the worker is blamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Records of one forward: this worker's share of a step, or a shard of it."""

    inputs: Any
    labels: Any
    records: Ints
    step: int
    weight: float
    """Records here / records of the step."""
    last: bool = True
    """Whether `step(loss)` completes the step."""
    trial: bool = False
    """Whether the loss is only looked at: nothing is trained with it."""


@dataclass(slots=True)
class Contribution:
    done: list[Ints] = field(default_factory=list)  # records of the batches whose loss is known
    count: int = 0
    digest: int = 0  # of the batches that were handed to the loop
    loss_sum: float = 0.0
    weight: float = 0.0
    finite: bool = True  # whether the losses can be summed over the workers

    @property
    def records(self) -> Ints:
        return np.concatenate(self.done) if self.done else np.empty(0, np.int64)

    def add(self, records: Ints, loss: float, share: Share | None = None) -> None:
        """Enters a batch and its `loss`, by default the mean of its records."""
        share = share or Share(1.0, len(records), len(records))
        self.done.append(records)
        self.count += len(records)
        self.loss_sum += share.loss * loss
        self.weight += share.weight
        self.finite = self.finite and abs(self.loss_sum) < MOST_LOSS

    def account(self, generation: int, step: int, *, wish: bool, rates: Sequence[float]) -> StepAccount:
        return StepAccount.of_holder(
            count=self.count, digest=self.digest, generation=generation, step=step, wish=wish,
            loss_sum=self.loss_sum, weight=self.weight, rates=rates,
        )  # fmt: skip


@dataclass(slots=True)
class StepReader:
    plan: JobPlan
    reader: SeededReader | ReaderPool
    group: WorkerGroup
    timer: StepTimer
    seed: int
    _known: tuple[int, int, tuple[float, ...]] = (-1, -1, ())  # generation, step, split of `_pieces`
    _pieces: list[ForwardPiece] = field(default_factory=list)
    _before: tuple[Any, ...] = ()  # the generators when the batch was handed out

    def pieces(self, step: int) -> list[ForwardPiece]:
        """This worker's share of `step` in the current membership."""
        key = self.group.generation, step, self.group.ordered_weights
        if self._known != key:
            self._pieces = self.plan.pieces(step, rank=self.group.position, weights=self.group.ordered_weights)
            self._known = key
        return self._pieces

    def read(self, step: int, piece: ForwardPiece, *, last: bool) -> StepBatch:
        """The batch of a piece. Raises what the data set's code raises."""
        batch = self.reader.read(piece.records, epoch=self.plan.epoch_of(step))
        weight = len(piece.records) / len(self.plan.records(step))
        if self.plan.micro_batch:
            seed_all(self.seed, step, piece.shard)
        else:
            self._before = generator_state()
        self.timer.end_reading()
        return StepBatch(
            inputs=batch.inputs, labels=batch.labels, records=piece.records, step=step, weight=weight, last=last
        )

    def expect_no_draws(self, step: int) -> None:
        """Raises UsageError if the loop has drawn random numbers and the job has no shards to seed: the trial before
        the first step saw none."""
        if not self.plan.micro_batch and generator_state() != self._before:
            raise UsageError(
                f"step {step} draws random numbers, and the batches that were tried before the first step drew none",
                hint="set micro_batch: each shard of a step then has a seed of its own, on whichever worker",
            )

    def prefetch(self, step: int, left: Sequence[ForwardPiece]) -> None:
        """Has reader threads or processes read the pieces `left` of `step`, and those of later steps."""
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

    def read_ahead(self, step: int) -> tuple[Batch | None, int]:
        """Reads the first batch of `step` now, unless a reader process does; returns it and its number of records.
        Raises what the data set's code raises."""
        batch, count = None, 0
        if step < self.plan.total_steps and not self.reader.ahead:
            for piece in self.pieces(step)[:1]:
                count = len(piece.records)
                batch = self.reader.read_ahead(piece.records, epoch=self.plan.epoch_of(step))
        self.timer.end_reading_ahead()
        return batch, count
