"""Tries a loss further in forks, where a first trial leaves a doubt: small parts of it, and bounds of numbers.

**In double precision**, where single precision cannot tell a small part of a loss from rounding. A penalty of a
batch's deviation or balance with a factor of 1e-4 makes a loss that looks like a mean to four digits. So where the
gradients of whole and parts differ by more than FINE a fork computes them once more, with model and records in double
precision. Sums over images differ by as much in single precision, and convolutions take long, so the fork does a
fraction of the trial: whole and parts, without another seed or a later step.

**With other numbers**, where Python code looks at a number of its batch, such as a loss or an accuracy:

    if loss.item() > 0.5:          each worker would decide by its own part of a step, and a trial sees nothing
        loss = 2 * loss            of it, as long as a batch and its parts are on the same side of the bound

So a fork computes a batch with each such number a little larger, and then many times larger and smaller: a loss that
changes only then has a bound somewhere between. Numbers that are logged change nothing; those that a loss takes
smoothly, such as a divisor, the trial of whole and parts has seen. Whole numbers (lengths, counts) stay what they are
(`extremes.py`).

What the loop's code refuses to compute, or computes in single precision all the same, decides nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trueline.data.loading.worker_pool import ReaderClient
from trueline.data.order.permutation import Indices
from trueline.data.source import Batch
from trueline.errors import UsageError
from trueline.train import dynamo
from trueline.train.step import features, reduction
from trueline.train.step.contribution import StepBatch
from trueline.train.step.model_traits import ModelTraits
from trueline.train.step.trial import FEW, QUICK_S, LossTrial, TrialInputs

FINE = 1e-6
"""A relative difference of whole and parts that training may have."""
MOST_BYTES = 16 << 20
"""Of a model that is copied for this."""


NEAR, FAR = 1.001, (1000.0, 0.001, 30.0, 0.03)
"""What a number is multiplied with: first where nothing may change, then where a bound shows."""
MOST_NUMBERS = 8


class FurtherTrial:
    """`batches()` are for a fork; `tried`, which has tried nothing there, takes the losses."""

    def __init__(self, tried: LossTrial) -> None:
        given = tried.inputs
        chance = np.random.default_rng([given.seed % 2**32, 1])
        ids = features.choose_any(given.reader, given.num_records, given.most, chance)
        self._tried, self.inputs = tried, replace(given, chosen=ids)

    def answer(self) -> dict[str, Any]:
        return {}

    def accept(self, answer: dict[str, Any]) -> None:
        """Nothing was found."""


class DoubleTrial(FurtherTrial):
    """Of whole and parts, in double precision."""

    def batches(self) -> Generator[StepBatch, None, None]:
        tried, given = self._tried, self.inputs
        given.model.double()
        tried.inputs = replace(given, reader=_DoubleReader(given.reader))
        tried.in_double = FINE
        assert self.inputs.chosen is not None
        eager = torch.compiler.set_stance("force_eager") if dynamo.is_loaded() else nullcontext()
        with eager:
            yield from tried.each_part(self.inputs.chosen[:FEW], cuts=0)
            yield from tried.each_part(self.inputs.chosen[: None if tried.took_s < QUICK_S else FEW])
        if not tried.tried or not tried.is_finite():
            return
        whole, *parts = tried.tried
        try:
            reduction.decide(whole, [parts[:2], parts[2:]], "auto", tried.tolerance, draws=False)
        except UsageError as error:
            raise UsageError(f"in double precision, {error.message}", hint=error.hint) from error


class NumberTrial(FurtherTrial):
    """Of a batch, with other values of single numbers that code looks at, by their places."""

    def __init__(self, tried: LossTrial, numbers: Sequence[int]) -> None:
        super().__init__(tried)
        self._numbers = numbers[:MOST_NUMBERS]

    def batches(self) -> Generator[StepBatch, None, None]:
        tried, ids = self._tried, self.inputs.chosen
        assert ids is not None
        tried.inputs = self.inputs
        eager = torch.compiler.set_stance("force_eager") if dynamo.is_loaded() else nullcontext()
        with eager:
            yield from tried.each_part(ids[:FEW], cuts=0)
            ids = ids if tried.took_s < QUICK_S else ids[:FEW]
            for number in self._numbers:
                yield from self._try_number(ids, number)

    def _try_number(self, ids: Any, number: int) -> Generator[StepBatch, None, None]:
        tried, found = self._tried, []
        for factor in (1.0, NEAR, *FAR):
            yield from tried.each_part(ids, cuts=0, factors={number: factor})
            if not tried.tried or not tried.is_finite() or len(tried.numbers[0]) <= number:
                return
            value = tried.numbers[0][number]
            found.append(tried.tried[0])
            off = reduction.difference(found[0], found[-1])
            if factor == NEAR and off > tried.tolerance:
                return  # no bound; the trial of whole and parts has seen it
            if off > tried.tolerance:
                raise UsageError(
                    f"the loss of {len(ids)} records is {found[0].loss:.6g}, and it would be {found[-1].loss:.6g} if a "
                    f"number of the batch that the code looks at ({value:.6g}: a loss, an accuracy, a mean) were "
                    f"{factor:g} times as large: each worker would decide by its own part of a step",
                    hint="decide by batch.step, or record by record with torch.where; or set reduction = "
                    '"mean" and micro_batch = N, and it is decided for whole shards of N records',
                )


class _DoubleReader(ReaderClient):
    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def read(self, indices: Indices, *, epoch: int) -> Batch:
        batch = self._reader.read(indices, epoch=epoch)
        return Batch(*torch.utils._pytree.tree_map(_to_double, (batch.inputs, batch.labels)))


def _to_double(value: Any) -> Any:
    single = isinstance(value, torch.Tensor) and value.dtype == torch.float32
    return value.double() if single else value


def wants_double(given: TrialInputs, found: ModelTraits) -> bool:
    """Whether a trial in single precision that has found these traits leaves a doubt."""
    values = list(given.model.parameters())
    single = any(value.dtype == torch.float32 and value.requires_grad for value in values)
    small = sum(value.nbytes for value in values) <= MOST_BYTES
    settled = found.whole or found.half or given.options.reduction != "auto"
    return single and small and not settled and found.off > FINE


def wants_numbers(found: ModelTraits) -> bool:
    """Whether a trial that has found these traits has seen code look at numbers of the batch."""
    return bool(found.numbers) and not found.whole
