"""`trueline.evaluate`: the loss and the recipe's metrics of a checkpoint, each record counted once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trueline import events
from trueline.errors import RecipeError
from trueline.recipe.contract import Mode, Recipe
from trueline.recipe.load import load_recipe
from trueline.state.checkpoint import load_model
from trueline.train.calls import call


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
    recipe: str | Path | Recipe, checkpoint: str | Path | None, *, mode: Mode = "evaluation", batch: int = 256
) -> Evaluation:
    """Measures `checkpoint` (None: the untrained model) over all records of `mode`.

    A metric's function returns one value for each record, or the mean over the batch; either is weighted by records.
    Raises RecipeError, CheckpointError, DataError.
    """
    found = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    model = load_model(found, None if checkpoint is None else Path(checkpoint))
    source = found.source(mode)
    functions = dict(found.metrics()) if found.metrics is not None else {}
    sums: dict[str, float] = defaultdict(float)
    for start in range(0, source.num_records, batch):
        indices = np.arange(start, min(start + batch, source.num_records), dtype=np.int64)
        records = source.read(indices)
        with torch.no_grad():
            outputs = call(model, records.inputs)
            sums["loss"] += _sum("loss", found.loss(outputs, records.labels), len(indices))
            for name, function in functions.items():
                sums[f"metric {name}"] += _sum(name, function(outputs, records.labels), len(indices))
        events.emit("evaluation.advanced", done=start + len(indices), total=source.num_records)
    count = max(source.num_records, 1)
    metrics = {name: sums[f"metric {name}"] / count for name in functions}
    measured = "" if checkpoint is None else Path(checkpoint).name
    return Evaluation(records=source.num_records, loss=sums["loss"] / count, metrics=metrics, checkpoint=measured)


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
