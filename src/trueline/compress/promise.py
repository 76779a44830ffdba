"""A budget that so few records can never show to be kept is refused before any time is spent on it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trueline.compress import gate
from trueline.compress.method import Budget
from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.recipe.contract import Recipe

_TRIED = 32
"""Records whose metric tells whether it is 0 or 1 for each."""


def check_promise(budget: Budget, values: npt.NDArray[np.float64], count: int) -> None:
    """Raises UsageError where no candidate can keep `budget` on `count` records, of which some have `values` of the
    metric."""
    if not math.isfinite(budget.amount):
        return
    if not gate.counts_decisions(budget, values):
        if count < gate.LEAST_RECORDS:
            raise UsageError(
                f"{budget.text} cannot be promised with {count} evaluation records: it needs at least "
                f"{gate.LEAST_RECORDS}",
                hint="give dataset('evaluation') more records",
            )
        return
    least = gate.paired_bound(0, 0, count)
    if least <= budget.amount:
        return
    needed, enough = gate.count_records(budget.amount), _round_up(100 * least)
    raise UsageError(
        f"{budget.text} cannot be promised with {count} evaluation records: even if no decision changes, up "
        f"to {least:.4f} may be lost (95 % confidence); it needs at least {needed} records",
        hint=f"give dataset('evaluation') more records, or allow more: --budget {budget.metric}={enough}%",
    )


def check_before_training(recipe: Recipe, budget: Budget) -> None:
    """`check_promise`, by the metric of the untrained model. Columns are fitted by the training: of these it is known
    only then. Raises UsageError, RecipeError, DataError."""
    import torch

    from trueline.batch.evaluate import evaluate_records
    from trueline.compress.method import check_metric
    from trueline.recipe.eager_mode import as_trained
    from trueline.train.worker.measure import call_model

    functions = {"loss": recipe.loss, **(recipe.metrics() if recipe.metrics else {})}
    check_metric(budget, list(functions))
    if recipe.columns is not None:
        return
    source = recipe.source("evaluation")
    count = min(_TRIED, source.num_records)
    batch = source.read(np.arange(count, dtype=np.int64))
    with torch.no_grad(), as_trained():
        outputs = call_model(recipe.make_model().eval(), batch.inputs)
    values = evaluate_records(budget.metric, functions[budget.metric], outputs, batch.labels, count)
    check_promise(budget, values.astype(np.float64), source.num_records)


def _round_up(amount: float) -> str:
    """With two digits, and not less.

    >>> _round_up(0.6718), _round_up(0.27), _round_up(21.3)
    ('0.68', '0.27', '22')
    """
    unit = 10.0 ** (math.floor(math.log10(amount)) - 1)
    return f"{math.ceil(round(amount / unit, 6)) * unit:.2g}"
