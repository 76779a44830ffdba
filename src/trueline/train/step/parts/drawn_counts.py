"""A loss over what is drawn, such as the masked tokens of a language model.

    mask = torch.rand(tokens.shape) < 0.15
    loss = cross_entropy(logits[mask], tokens[mask])      divides by another count for each seed

Its parts count by these counts, which only `weight` gives. Where operators that draw return a constant, such a mask has
everything or nothing: of nothing the loss is 0 or no number, and other constants are tried.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any, Protocol, Unpack

from trueline.errors import UsageError
from trueline.train.step.contribution import StepBatch
from trueline.train.step.parts.still import CONSTANT, Bends
from trueline.train.step.plan import Ints
from trueline.train.step.reduction import Divisors, LossSample

CONSTANTS = (0.01, 0.99)
"""What an operator draws where the usual constant shows nothing: `rand < 0.15`, `rand > 0.85`."""
SEEDS = (1, 2, 3)
Batches = Generator[StepBatch, None, None]


class DrawingTrial(Protocol):
    """The trial that takes the losses."""

    inputs: Any
    tried: list[LossSample]
    divisors: list[Divisors]
    constant: float

    def is_finite(self) -> bool: ...

    def one_as_it_is(self, ids: Ints, *, step: int | None = None, seed: int = 0) -> Batches: ...

    def each_part(self, ids: Ints, *, step: int | None = None, cuts: int = 2, **still: Unpack[Bends]) -> Batches: ...


def each_part(trial: DrawingTrial, ids: Ints, *, draws: bool) -> Batches:
    """The batches `ids` whole and in parts; if it `draws`, with the first constant for which their losses show
    something, which `trial` has from then on."""
    for constant in (CONSTANT, *(CONSTANTS if draws else ()), CONSTANT):
        trial.constant = constant
        trial.divisors.clear()
        yield from trial.each_part(ids)
        if not draws or (trial.is_finite() and any(one.loss or bool(one.gradient.any()) for one in trial.tried)):
            return


def expect_no_count(trial: DrawingTrial, ids: Ints) -> Batches:
    """Raises UsageError if the loss divides by a count that is drawn, and has no weight."""
    found = list[Divisors]()
    for seed in SEEDS if trial.inputs.options.reduction == "auto" and len(ids) > 1 else ():
        yield from trial.one_as_it_is(ids, seed=seed)
        if trial.tried[-1].weight is not None:
            return
        found.append(trial.divisors[-1])
    for values in zip(*(one.values for one in found), strict=False) if len({one.form for one in found}) == 1 else ():
        if _are_counts(values, len(ids)):
            counts = ", ".join(f"{value:.0f}" for value in values)
            raise UsageError(
                f"with other random numbers the loss of the same {len(ids)} records divides by other counts "
                f"({counts}): parts of a step do not count by their records",
                hint="give the divisor, in a loop as job.step(loss, weight=mask.sum()), in a recipe as weight(labels); "
                'or set reduction = "mean", which averages the means of shards by their records',
            )


def _are_counts(values: Sequence[float], records: int) -> bool:
    """Whether they differ, and are no multiples of `records`, as those of images are whose size is drawn.

    >>> _are_counts((7.0, 4.0, 6.0), 5), _are_counts((45.0, 20.0, 45.0), 5), _are_counts((5.0, 5.0, 5.0), 5)
    (True, False, False)
    """
    whole = all(math.isfinite(one) and math.isclose(one, round(one), rel_tol=1e-6) for one in values)
    return whole and len(set(map(round, values))) > 1 and any(round(one) % records for one in values)
