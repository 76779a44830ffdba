"""A loss that is 0 without a gradient for all records that were tried shows nothing: it is a mean and a sum, and a job
that trains nothing would end as one that was proven. So more records are tried, up to those of a step, and at a late
step, until a loss trains something; and of a loss that is computed over whole shards some shard has to.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, Protocol, Unpack

import numpy as np

from trueline.errors import UsageError
from trueline.train.step.contribution import StepBatch
from trueline.train.step.parts.late_steps import MOST_RECORDS
from trueline.train.step.parts.still import Bends
from trueline.train.step.plan import Ints, choose_late
from trueline.train.step.reduction import Divisors, LossSample

OTHERS, MOST_S = 3, 4.0
"""Other records that are tried once a batch is as large as one of the job's, and how long batches are made larger."""
SHARDS = 8


class SilentLoss(Protocol):
    """The trial that takes the losses."""

    inputs: Any
    tried: list[LossSample]
    divisors: list[Divisors]

    def each_part(self, ids: Ints, *, step: int | None = None, cuts: int = 2, **still: Unpack[Bends]
                  ) -> Generator[StepBatch, None, None]: ...  # fmt: skip


def is_silent(trial: SilentLoss) -> bool:
    """Whether the last batches had a loss of 0, and no gradient."""
    return bool(trial.tried) and not any(one.loss or bool(one.gradient.any()) for one in trial.tried)


def try_more(trial: SilentLoss, ids: Ints) -> Generator[StepBatch, None, Ints]:
    """Returns records whose losses, whole and in parts, were tried last and show something: `ids`, just tried, or
    others. Raises UsageError if none do."""
    given = trial.inputs
    if given.chosen is not None or not is_silent(trial):
        return ids
    late = choose_late(max(given.total_steps, given.hidden_steps))
    most, until, large, rng = min(given.most, MOST_RECORDS), time.monotonic() + MOST_S, 0, np.random.default_rng(0)
    tried = [len(ids)]
    while large < OTHERS:
        for step in dict.fromkeys((None, late)):
            yield from trial.each_part(ids, step=step, cuts=0)
            if not is_silent(trial):
                trial.divisors.clear()  # of losses that are 0
                yield from trial.each_part(ids, step=step)
                return ids
        tried.append(len(ids))
        if time.monotonic() > until:
            break
        ids = rng.permutation(given.num_records)[: max(2, min(2 * len(ids), most))]
        large += len(ids) >= most
    limit = f" (micro_batch = {given.options.micro_batch})" if given.options.micro_batch else ""
    raise UsageError(
        f"the loss is 0 and has no gradient for all records that were tried, up to {max(tried)} in one batch{limit}, "
        f"at the first step and at step {late}: a job would train nothing, and whether the loss is a mean or a sum "
        "cannot be seen",
        hint="find what makes it 0: a hinge or a mask that all records meet, labels that are missing or ignored, or a "
        "least number of records, which a batch of the job has to have (global_batch; micro_batch, if it is set)",
    )


def expect_shards(trial: SilentLoss, ids: Ints, shard: int) -> Generator[StepBatch, None, None]:
    """Raises UsageError if the loss of `ids` shows something, and that of each of their shards is 0, without a
    gradient."""
    if trial.inputs.chosen is not None or not shard or len(ids) <= shard or not trial.tried or is_silent(trial):
        return
    whole = trial.tried[0]
    late = choose_late(max(trial.inputs.total_steps, trial.inputs.hidden_steps))
    for start in range(0, min(len(ids), SHARDS * shard), shard):
        for step in dict.fromkeys((None, late)):
            yield from trial.each_part(ids[start : start + shard], step=step, cuts=0)
            if not is_silent(trial):
                return
    raise UsageError(
        f"the loss of {whole.records} records is {whole.loss:.6g}, and that of each of their shards of {shard} is 0 "
        "without a gradient: it is computed over whole shards, so a job would train nothing",
        hint=f'set micro_batch = {whole.records} or more, with reduction = "mean" (in a loop: Options(reduction=..., '
        "micro_batch=...)), or write the loss so that each record counts",
    )
