"""Tries a loss as it may become while the job trains; all of it is whole and in parts, as in `trial.py`.

beyond bounds      a clamp, a hinge or an absolute value of something that the batch was reduced to (free bits, a
                   penalty of a mean) is linear on either side of its bound, and looks as if it were made of its
                   parts until the bound lies between them; so it is bent
at later steps     a loop compares records from a step on, or a model by a counter in a buffer; and it may begin to
                   draw. The late one comes first, then steps between, as far as the time lets
many records       at the late step as many as a step has, which a capacity or a count may need
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from trueline.data.loading.worker_pool import ReaderClient
from trueline.train.step import model_traits, reduction
from trueline.train.step.contribution import StepBatch
from trueline.train.step.parts.still import Bound
from trueline.train.step.plan import Ints, choose_late, choose_prime
from trueline.train.step.reduction import LossSample

PROBE_S, MOST_RECORDS = 0.1, 256
"""How long later steps are tried, and most records of a batch."""


class PartsTrial(Protocol):
    """The trial that takes the losses."""

    inputs: Any
    tried: list[LossSample]
    bounds: list[list[Bound]]
    took_s: float
    earlier: int
    """Trials before this one that a record has ended, with the worker or without."""

    @property
    def tolerance(self) -> float: ...

    def each_part(self, ids: Ints, *, step: int | None = None, bend: Sequence[int] = (), cuts: int = 2
                  ) -> Generator[StepBatch, None, None]: ...  # fmt: skip

    def is_finite(self) -> bool: ...


class LateTrial:
    """Of a loss that reduces as `how` says. `ids`: some records that were tried just now."""

    def __init__(self, trial: PartsTrial, how: str, ids: Ints) -> None:
        self._trial, self._how, self._ids = trial, how, ids
        self._counters: dict[str, torch.Tensor] = {}
        self._bounds = list(trial.bounds)

    def batches(self, counters: dict[str, torch.Tensor]) -> Generator[StepBatch, None, bool]:
        """Returns whether the loss reduces so in all of them. Raises UsageError if it does not, and no reduction is
        named. `counters`: what each forward adds to buffers, whatever its records."""
        self._counters = counters
        given, trial, began = self._trial.inputs, self._trial, time.monotonic()
        same = True
        if bend := find_reduced(self._bounds):
            yield from trial.each_part(self._ids, bend=bend, cuts=1)
            same = self._confirm("beyond a bound (a clamp, a hinge, an absolute value) of what a batch is reduced to")
        blind = given.hidden_steps > 0 and not self._counters
        for number, step in enumerate(list_steps(max(given.total_steps, given.hidden_steps))):
            if number and (blind or time.monotonic() > began + PROBE_S):
                break
            with self._count_to(step):
                yield from trial.each_part(self._choose() if not number else self._ids, step=step, cuts=1)
            same = self._confirm(f"in step {step}") and same
        return same

    def _confirm(self, where: str) -> bool:
        """Numbers that are not finite say nothing."""
        trial, named = self._trial, self._trial.inputs.options.reduction
        if not trial.is_finite():
            return True
        return reduction.confirm(trial.tried, self._how, named, trial.tolerance, where)

    def _choose(self) -> Ints:
        """As many records as a step has, if that takes little time; one of them may be damaged, so only where code of
        the loop may raise: in a fork, and in a recipe's first attempt."""
        given, ids = self._trial.inputs, self._ids
        count = min(given.most, MOST_RECORDS)
        spared = isinstance(given.reader, ReaderClient) or (given.hidden_steps and not self._trial.earlier)
        if not spared or count <= len(ids) or self._trial.took_s / len(ids) * count > PROBE_S / 2:
            return ids
        others = np.setdiff1d(np.arange(min(given.num_records, 4 * count)), ids)
        more = np.random.default_rng(0).permutation(others)[: count - len(ids)]
        try:
            given.reader.read(more, epoch=0)
        except Exception:  # noqa: BLE001  a damaged record may raise anything; its step finds it
            return ids
        return np.concatenate([ids, more])

    @contextmanager
    def _count_to(self, step: int) -> Iterator[None]:
        model = self._trial.inputs.model
        with model_traits.restore_buffers(model), torch.no_grad():
            for kind in (True, False):
                for slot in model_traits.buffer_slots(model, persistent=kind):
                    if slot.name in self._counters:
                        slot.set(slot.value, slot.value.clone(), step * self._counters[slot.name].double())
            with torch.enable_grad():
                yield


def find_reduced(bounds: Sequence[Sequence[Bound]]) -> list[int]:
    """The numbers of those operators that have the same shape whatever the number of records: of what a batch was
    reduced to, or of parameters alone. None, unless the batches ran the same operators.

    >>> find_reduced([[("relu", (13, 8)), ("clamp", ())], [("relu", (4, 8)), ("clamp", ())]])
    [1]
    >>> find_reduced([[("relu", ())], [("relu", ()), ("relu", ())]])
    []
    """
    if len({len(one) for one in bounds}) != 1 or len(bounds) < 2:
        return []
    return [at for at, same in enumerate(zip(*bounds, strict=True)) if len(set(same)) == 1]


def list_steps(total: int) -> Iterator[int]:
    """The late step of a job, then others, which halve what lies between them; prime ones, as `choose_late`.

    >>> list(list_steps(12)), list(list_steps(10_000))[:4], list(list_steps(1))
    ([7, 5, 3, 1, 2, 11], [9973, 4999, 2477, 7499], [])
    """
    halves = (total * odd >> power for power in range(1, 9) for odd in range(1, 2**power, 2))
    wanted = dict.fromkeys((choose_late(total), *map(choose_prime, halves)))
    return (step for step in wanted if 0 < step < total)
