"""A model's outputs for records, and the sums of the recipe's loss and metrics over them."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from trueline import events
from trueline.data.loading.seeding import seed_generators
from trueline.data.source import Source
from trueline.errors import RecipeError
from trueline.recipe.contract import Recipe
from trueline.recipe.eager_mode import as_trained
from trueline.train import devices

TOGETHER, CHUNKS = 6, 5
"""Records that a metric is tried with at once, and how many times as many."""


def call_model(model: torch.nn.Module, inputs: Any) -> Any:
    """Calls the model: a tuple or list are positional arguments, a dict keywords, all else is one argument."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def make_measure(
    recipe: Recipe,
    model: torch.nn.Module,
    source: Source,
    outcomes: Callable[[int, int, Any, Any], dict[str, float]] | None = None,
) -> Callable[[int, int], dict[str, float]]:
    """A function of (start, stop): the sums over these records of `loss` and of each metric, as `metric NAME`.

    `outcomes` gets (start, stop, outputs, labels) and returns further sums. Random numbers drawn while reading depend
    on `start` alone, so the same chunks give the same sums in every process.
    """
    functions = {"loss": recipe.loss}
    functions |= {f"metric {name}": function for name, function in (recipe.metrics() if recipe.metrics else {}).items()}

    def measure(start: int, stop: int) -> dict[str, float]:
        with torch.no_grad(), as_trained(), seed_generators(start):
            records = devices.place_batch(source.read(np.arange(start, stop, dtype=np.int64)), devices.of_model(model))
            outputs = call_model(model, records.inputs)
            sums = {
                name: sum_values(name.removeprefix("metric "), function(outputs, records.labels), stop - start)
                for name, function in functions.items()
            }
            return sums if outcomes is None else sums | outcomes(start, stop, outputs, records.labels)

    return measure


def expect_no_memory(measure: Callable[[int, int], dict[str, float]], num_records: int) -> None:
    """Raises RecipeError if a metric of some records is another one after others were measured: each worker measures
    other records of an evaluation. What cannot be measured is left to the first evaluation."""
    chunks = [(at, min(at + TOGETHER, num_records)) for at in range(0, num_records, TOGETHER)][:CHUNKS]
    try:
        once, again = ([measure(*chunk) for chunk in chunks] for _ in range(2))
    except RecipeError:
        raise
    except Exception as error:  # noqa: BLE001  a damaged record may raise anything
        events.emit("evaluation.untried", why=f"{type(error).__name__}: {error}")
        return
    for (start, stop), sums, others in zip(chunks, once, again, strict=True):
        for name, value in sums.items():
            first, then = value / (stop - start), others[name] / (stop - start)
            if math.isfinite(first) and not math.isclose(first, then, rel_tol=1e-4, abs_tol=1e-6):
                raise RecipeError(
                    f"{name} of records {start} to {stop - 1} of the evaluation is {first:.6g}, and {then:.6g} after "
                    "others were measured: it keeps something from one batch to the next, and each worker measures "
                    "other batches",
                    hint="return one value for each record, or their mean, and keep nothing: the mean over all records "
                    "of an evaluation is taken by the job",
                )


def sum_values(name: str, values: Any, count: int) -> float:
    """The sum of what `name` returned for `count` records: one value each, or their mean. Raises RecipeError."""
    tensor = torch.as_tensor(values, dtype=torch.float64)
    if tensor.ndim == 0:
        return tensor.item() * count
    if tensor.shape[0] != count:
        raise RecipeError(
            f"'{name}' returned {list(tensor.shape)} values for {count} records; expected one for each, or their mean"
        )
    return tensor.reshape(count, -1).mean(dim=1).sum().item()
