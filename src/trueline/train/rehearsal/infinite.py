"""Finds the records that make the gradients, or the loss, of a step in a user's loop infinite.

    all records of this worker in the step ─▶ not finite ─▶ others ─▶ all not finite: training has diverged
                                                              │
                                                              └──▶ halves ─▶ halves of those ─▶ single records

The loop computes these batches in a fork, as those of the trial before the first step; a single record comes twice,
since some layers refuse a batch of one.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trueline.data.loading import seeding
from trueline.errors import TrainError, UsageError
from trueline.parallel.finite import describe_infinite, find_infinite
from trueline.train.rehearsal import fork
from trueline.train.step import model_traits, reduction
from trueline.train.step.contribution import StepBatch
from trueline.train.step.optimizer_settings import OptimizerSettings
from trueline.train.step.plan import Ints
from trueline.train.step.trial import TrialInputs

MOST_TRIES, MOST_FOUND, CONTROLS = 64, 16, 3
"""Batches of a trial, records that it names, and other records that are tried before they are looked for."""
ROUNDS = 8
"""How often a step with sums that are not finite may be computed: two workers try a record before it is left out."""


class RecordTrial:
    """Stands in for a `LossTrial`: `batches()` are for the loop, each followed by a call of `take`."""

    failed = False

    def __init__(self, tried: TrialInputs, records: Ints, others: Ints, *, step: int, epoch: int) -> None:
        self.inputs = replace(tried, chosen=records, step=step)
        self.found: dict[int, str] = {}
        """What is not finite of each record that was found."""
        self.infinite = False
        """Whether all records together are not finite here."""
        self._others, self._epoch, self._why, self._tries = others[:CONTROLS], epoch, "", 0

    def batches(self) -> Generator[StepBatch, None, None]:
        assert self.inputs.chosen is not None
        yield from self._one(self.inputs.chosen)
        self.infinite = bool(self._why)
        if not self.infinite:
            return
        finite = 0
        for record in self._others:
            yield from self._one(np.array([record, record]))
            finite += not self._why
        if len(self._others) and not finite:
            return
        left = [self.inputs.chosen]
        while left and self._tries < MOST_TRIES and len(self.found) < MOST_FOUND:
            part = left.pop(0)
            yield from self._one(part if len(part) > 1 else part.repeat(2))
            if self._why and len(part) == 1:
                self.found[int(part[0])] = self._why
            elif self._why:
                left += [part[: len(part) // 2], part[len(part) // 2 :]]

    def _one(self, ids: Ints) -> Generator[StepBatch, None, None]:
        trial, self._why = self.inputs, ""
        self._tries += 1
        batch = trial.reader.read(ids, epoch=self._epoch)
        with model_traits.restore_buffers(trial.model), seeding.preserve_generators():
            seeding.seed_all(trial.seed, trial.step, 0)
            before = {name for name, value in trial.model.named_buffers() if find_infinite([(name, value)])}
            yield StepBatch(inputs=batch.inputs, labels=batch.labels, records=ids, step=trial.step, weight=1.0,
                            trial=True)  # fmt: skip
            changed = find_infinite(pair for pair in trial.model.named_buffers() if pair[0] not in before)
            self._why = self._why or (f"it makes the buffer {changed} infinite" if changed else "")

    def take(self, loss: torch.Tensor, weight: float | None, records: int) -> bool:
        """Takes the loss of the last batch; returns what `job.step` does."""
        value = reduction.as_scalar(loss, records, self.inputs.options.reduction)
        if weight == 0:
            return False
        if not math.isfinite(value.item()):
            self._why = f"its loss is {value.item()}"
            return False
        of = [value for value in self.inputs.model.parameters() if value.requires_grad]
        self._why = describe_infinite(self.inputs.model, reduction.compute_gradients(value, of, self.inputs.model))
        return False

    def answer(self) -> dict[str, Any]:
        """What a fork that has tried the records sends to its parent."""
        return {"infinite": self.infinite, "found": list(self.found.items())}

    def accept(self, answer: dict[str, Any]) -> None:
        """Takes the answer of such a fork."""
        self.infinite, self.found = answer["infinite"], dict(answer["found"])


class InfiniteSteps:
    """Steps whose sums are not finite: no member applies them."""

    def __init__(self) -> None:
        self._step, self._rounds = -1, 0
        self.error: TrainError | None = None
        """Of the step that this worker's records are tried for."""

    def note(self, step: int, what: str) -> TrainError:
        """Enters that the `what` of a step is not finite; the error if it is for good. Raises it after ROUNDS."""
        self._step, self._rounds = step, 1 + (self._rounds if step == self._step else 0)
        if what == "loss":
            hint = "the training diverged: lower the learning rate, or clip"
            return TrainError(f"the loss of step {step} is not finite", hint=hint)
        error = TrainError(
            f"the gradients of step {step} are not finite, though its loss is; the step was not applied",
            hint="look for square roots, logarithms and divisions near zero in the model and the loss, and for records "
            "with infinite numbers; or lower the learning rate",
        )
        if self._rounds > ROUNDS:
            raise error
        return error


def find_records(trial: RecordTrial, settings: OptimizerSettings) -> Generator[StepBatch, None, None]:
    """The batches of `trial`, in a fork where there can be one; afterwards it has `found` what it could."""
    try:
        yield from fork.try_again(trial, settings)
    except UsageError:  # the loop's code does not take them
        trial.found.clear()
