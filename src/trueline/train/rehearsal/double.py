"""Tries a loss in double precision, where single precision cannot tell a small part of it from rounding.

A penalty of a batch's deviation or balance with a factor of 1e-4 makes a loss that looks like a mean to four digits.
So where the gradients of whole and parts differ by more than FINE a fork computes them once more, with model and
records in double precision. Sums over images differ by as much in single precision, and convolutions take long, so the
fork does a fraction of the trial: whole and parts, without another seed or a later step. What the loop's code then
refuses to compute, or computes in single precision all the same, decides nothing.
"""

from __future__ import annotations

from collections.abc import Generator
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


class DoubleTrial:
    """`batches()` are for a fork; `tried`, which has tried nothing there, takes the losses."""

    def __init__(self, tried: LossTrial) -> None:
        given = tried.inputs
        chance = np.random.default_rng([given.seed % 2**32, 1])
        ids = features.choose_any(given.reader, given.num_records, given.most, chance)
        self._tried, self.inputs = tried, replace(given, chosen=ids)

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

    def answer(self) -> dict[str, Any]:
        return {}

    def accept(self, answer: dict[str, Any]) -> None:
        """Nothing was found."""


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
