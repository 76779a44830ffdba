"""Tries a loss as it may become while the job trains; all of it is whole and in parts, as in `trial.py`.

beyond bounds      a clamp, a hinge or an absolute value of something that the batch was reduced to (free bits, a
                   penalty of a mean) is linear on either side of its bound, and looks as if it were made of its
                   parts until the bound lies between them; so it is bent
at later steps     a loop compares records from a step on, or a model by a counter in a buffer; and it may begin to
                   draw. The late one comes first, then steps between, as far as the time lets
many records       at the late step up to as many as a step has, which a capacity or a count may need
few records        a loss that adds a term for records of which few steps have two: a large batch has them, and shows it
                   by operators that the others did not run. Records are left out until a step could have the rest
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Unpack

import numpy as np
import torch

from trueline.data.loading.worker_pool import ReaderClient
from trueline.train.step import model_traits, reduction
from trueline.train.step.contribution import StepBatch
from trueline.train.step.parts.still import Bends, Bound
from trueline.train.step.plan import Ints, choose_late, choose_prime
from trueline.train.step.reduction import Divisors, LossSample

PROBE_S = 0.1
"""How long later steps are tried, of the processor's time (a busy host tries no fewer)."""
MOST_RECORDS, MANY_S = 4096, 0.05
"""Records of the largest batch that is tried, and how long computing and reading the one before it may take."""
MOST_WIDE, WIDE_S, READ_FIRST = 1024, 0.2, 16
"""Records of a batch that is looked at for operators that others do not run, for how long, and how many records show
how long reading takes."""


class PartsTrial(Protocol):
    """The trial that takes the losses."""

    inputs: Any
    tried: list[LossSample]
    bounds: list[list[Bound]]
    divisors: list[Divisors]
    took_s: float
    earlier: int
    """Trials before this one that a record has ended, with the worker or without."""

    @property
    def tolerance(self) -> float: ...

    def each_part(self, ids: Ints, *, step: int | None = None, cuts: int = 2, **still: Unpack[Bends]
                  ) -> Generator[StepBatch, None, None]: ...  # fmt: skip

    def is_finite(self) -> bool: ...


class LateTrial:
    """Of a loss that reduces as `how` says. `ids`: some records that were tried just now."""

    def __init__(self, trial: PartsTrial, how: str, ids: Ints) -> None:
        self._trial, self._how, self._ids = trial, how, ids
        self._counters: dict[str, torch.Tensor] = {}
        self._bounds = list(trial.bounds)
        self._forms = {one.form for one in trial.divisors}

    def batches(self, counters: dict[str, torch.Tensor]) -> Generator[StepBatch, None, bool]:
        """Returns whether the loss reduces so in all of them. Raises UsageError if it does not, and no reduction is
        named. `counters`: what each forward adds to buffers, whatever its records."""
        self._counters = counters
        given, trial = self._trial.inputs, self._trial
        until, latest = time.thread_time() + PROBE_S, time.monotonic() + 10 * PROBE_S
        same = True
        if bend := find_reduced(self._bounds):
            yield from trial.each_part(self._ids, bend=bend, cuts=1)
            same = self._confirm("beyond a bound (a clamp, a hinge, an absolute value) of what a batch is reduced to")
        blind = given.hidden_steps > 0 and not self._counters
        for number, step in enumerate(list_steps(max(given.total_steps, given.hidden_steps))):
            if number and (blind or time.thread_time() > until or time.monotonic() > latest):
                break
            began = time.thread_time()
            with self._count_to(step):
                yield from trial.each_part(self._ids, step=step, cuts=1)
            same = self._confirm(f"in step {step}") and same
            if not number:
                same = (yield from self._try_many(step, time.thread_time() - began)) and same
                until += time.thread_time() - began
        odd = yield from self._find_other_form()
        if odd is not None:
            yield from trial.each_part(odd, cuts=2)
            same = self._confirm("with records that few steps have together") and same
        return same

    def _find_other_form(self) -> Generator[StepBatch, None, Ints | None]:
        """Records of one step whose loss runs other operators than those that were tried."""
        given = self._trial.inputs
        until = time.process_time() + WIDE_S
        if len(self._forms) != 1 or not self._spares() or given.num_records <= len(self._ids):
            return None
        ids = np.random.default_rng(1).permutation(given.num_records)[:MOST_WIDE]
        began = time.monotonic()
        if not self._reads(ids[:READ_FIRST]) or (time.monotonic() - began) / READ_FIRST * len(ids) > 2 * PROBE_S:
            return None
        count = READ_FIRST
        while count < len(ids):
            began, count = time.process_time(), 2 * count
            if not self._reads(ids[:count]):
                return None
            if (yield from self._is_odd(ids[:count])):
                return (yield from self._leave_out(ids[:count], until))
            if time.process_time() - began > WIDE_S / 8:  # the next one takes twice as long
                return None
        return None

    def _is_odd(self, ids: Ints) -> Generator[StepBatch, None, bool]:
        yield from self._trial.each_part(ids, cuts=0)
        return self._trial.is_finite() and self._trial.divisors[-1].form not in self._forms

    def _leave_out(self, ids: Ints, until: float) -> Generator[StepBatch, None, Ints | None]:
        """As many of `ids` as a step has at most, whose loss is still odd; None: there are none, or no time.
        Source: A. Zeller, Simplifying and isolating failure-inducing input (2002)."""
        most, pieces = self._trial.inputs.most, 2
        while len(ids) > most:
            for piece in np.array_split(np.arange(len(ids)), pieces):
                if time.process_time() > until:
                    return None
                rest = np.delete(ids, piece)
                if len(rest) > 1 and (yield from self._is_odd(rest)):
                    ids, pieces = rest, max(pieces - 1, 2)
                    break
            else:
                if pieces >= len(ids):
                    return None
                pieces = min(2 * pieces, len(ids))
        return ids

    def _spares(self) -> bool:
        """Whether code of the loop may raise for a damaged record: in a fork, and in a recipe's first attempt."""
        given = self._trial.inputs
        return isinstance(given.reader, ReaderClient) or bool(given.hidden_steps and not self._trial.earlier)

    def _reads(self, ids: Ints) -> bool:
        try:
            self._trial.inputs.reader.read(ids, epoch=0)
        except Exception:  # noqa: BLE001  a damaged record may raise anything; its step finds it
            return False
        return True

    def _confirm(self, where: str) -> bool:
        """Numbers that are not finite say nothing."""
        trial, named = self._trial, self._trial.inputs.options.reduction
        if not trial.is_finite():
            return True
        return reduction.confirm(trial.tried, self._how, named, trial.tolerance, where)

    def _try_many(self, step: int, took_s: float) -> Generator[StepBatch, None, bool]:
        """Four times as many records, and again, up to those of a step, as long as that takes little time; a batch of
        the last ones took `took_s` seconds."""
        given, ids, same, read_s = self._trial.inputs, self._ids, True, 0.0
        most = min(given.most, MOST_RECORDS)
        while self._spares() and len(ids) < most:
            if max(took_s, read_s) > MANY_S:
                break
            count = min(4 * len(ids), most)
            began = time.monotonic()
            others = np.setdiff1d(np.arange(min(given.num_records, 4 * count)), ids)
            more = np.random.default_rng(0).permutation(others)[: count - len(ids)]
            if not len(more) or not self._reads(more):  # one of them may be damaged
                break
            ids, read_s = np.concatenate([ids, more]), (time.monotonic() - began) / len(more) * count
            began = time.thread_time()
            with self._count_to(step):
                yield from self._trial.each_part(ids, step=step, cuts=1)
            took_s = time.thread_time() - began
            same = self._confirm(f"in step {step}") and same
        return same

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


def find_decisive(numbers: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The places of the single numbers that batches looked at, of the same number each, which follow from the records.

    >>> find_decisive([[0.5, 2.0], [0.4, 2.0], [0.7, 2.0]]), find_decisive([[0.5], [0.4, 0.4]])
    ((0,), ())
    """
    if len({len(one) for one in numbers}) != 1:
        return ()
    return tuple(
        at for at, same in enumerate(zip(*numbers, strict=True)) if max(same) - min(same) > 1e-6 * abs(max(same))
    )


def list_steps(total: int) -> Iterator[int]:
    """The late step of a job, then others, which halve what lies between them; prime ones, as `choose_late`.

    >>> list(list_steps(12)), list(list_steps(10_000))[:4], list(list_steps(1))
    ([7, 5, 3, 1, 2, 11], [9973, 4999, 2477, 7499], [])
    """
    halves = (total * odd >> power for power in range(1, 9) for odd in range(1, 2**power, 2))
    wanted = dict.fromkeys((choose_late(total), *map(choose_prime, halves)))
    return (step for step in wanted if 0 < step < total)
