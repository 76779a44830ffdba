"""`trueline.evaluate`: the loss and the recipe's metrics of a checkpoint, each record counted once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from trueline import events
from trueline.data.source import Source
from trueline.errors import RecipeError
from trueline.recipe.contract import Mode, Recipe
from trueline.recipe.load import load_recipe
from trueline.state.checkpoint import load_model
from trueline.state.place import Where, located, split
from trueline.train import devices, pool
from trueline.train.calls import call
from trueline.train.pool import Compute, Work, seeded


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Means over all `records`."""

    records: int
    loss: float
    metrics: dict[str, float]
    checkpoint: str
    """Name of the checkpoint that was measured; empty for the untrained model."""

    def as_dict(self) -> dict[str, Any]:
        return {"records": self.records, "loss": self.loss, "metrics": self.metrics, "checkpoint": self.checkpoint}

    def as_text(self) -> str:
        named = [("loss", self.loss), *self.metrics.items()]
        values = ", ".join(f"{name} {value:.4f}" for name, value in named)
        return f"{self.records} records: {values} ({self.checkpoint or 'untrained'})"


def evaluate(
    recipe: str | Path | Recipe,
    checkpoint: Where | None,
    *,
    mode: Mode = "evaluation",
    batch: int = 256,
    workers: int = 1,
    device: str = "auto",
) -> Evaluation:
    """Measures `checkpoint` (a path or URL; None: the untrained model) over all records of `mode`.

    A metric's function returns one value for each record, or the mean over the batch; either is weighted by records.
    `workers` processes of one thread each share the batches; the result is the same for any number of them, and when
    some are killed. They compute on `device` (auto, cpu, cuda, cuda:N). Raises RecipeError, CheckpointError, DataError,
    StorageError, UsageError.
    """
    found = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    where = "" if checkpoint is None else str(located(checkpoint))
    records, compute = _opened(found, where, mode, device) if workers == 1 else (found.source(mode).num_records, None)

    def advanced(done: int) -> None:
        events.emit("evaluation.advanced", done=done, total=records)

    if compute is not None:
        sums = []
        for start in range(0, records, batch):
            sums.append(compute(start, min(start + batch, records)))
            advanced(min(start + batch, records))
    else:
        work = pool.work("trueline.train.evaluate:opened", found, recipe, where, mode, records=records, batch=batch)
        work = msgspec.structs.replace(work, device=device)
        sums = pool.run(work, workers=workers, advanced=advanced)
    means = _means(sums, max(records, 1))
    metrics = {name: means.get(f"metric {name}", 0.0) for name in (found.metrics() if found.metrics else {})}
    measured = split(where)[1] if where else ""
    return Evaluation(records=records, loss=means.get("loss", 0.0), metrics=metrics, checkpoint=measured)


def _means(chunks: Sequence[Mapping[str, float]], count: int) -> dict[str, float]:
    """Sums of chunks, added in the order of the chunks so that the rounding is always the same, over `count`."""
    totals: dict[str, float] = defaultdict(float)
    for chunk in chunks:
        for name, value in chunk.items():
            totals[name] += value
    return {name: total / count for name, total in totals.items()}


def opened(work: Work) -> tuple[int, Compute]:
    """What a pool's worker does with its chunks: sums of the loss and the metrics."""
    return _opened(load_recipe(work.recipe), work.source, work.mode, work.device)


def _opened(recipe: Recipe, checkpoint: str, mode: Mode, device: str) -> tuple[int, Compute]:
    with seeded(recipe.defaults.seed):  # an untrained model is the same in every process
        model = load_model(recipe, checkpoint or None).to(devices.mine(device))
    source = recipe.source(mode)
    return source.num_records, measuring(recipe, model, source)


def measuring(recipe: Recipe, model: torch.nn.Module, source: Source) -> Callable[[int, int], dict[str, float]]:
    """A function of (start, stop): the sums over these records of `loss` and of each metric, as `metric NAME`.

    What reading draws depends on `start` alone, so the same chunks give the same sums in every process.
    """
    functions = {"loss": recipe.loss}
    functions |= {f"metric {name}": function for name, function in (recipe.metrics() if recipe.metrics else {}).items()}

    def compute(start: int, stop: int) -> dict[str, float]:
        with torch.no_grad(), seeded(start):
            records = devices.placed_batch(source.read(np.arange(start, stop, dtype=np.int64)), devices.of_model(model))
            outputs = call(model, records.inputs)
            return {
                name: _sum(name.removeprefix("metric "), function(outputs, records.labels), stop - start)
                for name, function in functions.items()
            }

    return compute


def _sum(name: str, found: Any, count: int) -> float:
    """The sum over `count` records of a value for each of them, or of their mean."""
    values = torch.as_tensor(found, dtype=torch.float64)
    if values.ndim == 0:
        return values.item() * count
    if values.shape[0] != count:
        raise RecipeError(
            f"'{name}' returned {list(values.shape)} values for {count} records; expected one for each, or their mean"
        )
    return values.reshape(count, -1).mean(dim=1).sum().item()
