"""`trueline.evaluate`: the loss and the recipe's metrics of a checkpoint, each record counted once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch.utils._pytree import tree_map

from trueline import events, files
from trueline.batch import output_parts, pool
from trueline.batch.output_parts import PART_RECORDS, Answer
from trueline.batch.pool import Compute, Work
from trueline.checkpoint.checkpoint import load_model
from trueline.data.loading.seeding import seeded
from trueline.data.tools.writer import WritePlan
from trueline.errors import RecipeError
from trueline.recipe.contract import Mode, Recipe
from trueline.recipe.load import load_recipe
from trueline.storage.location import Location, parse_location, split_location
from trueline.train import devices
from trueline.train.worker.measure import call_model, make_measure, sum_values

if TYPE_CHECKING:
    from trueline.bundle.signature import Array


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
    checkpoint: Location | None,
    *,
    mode: Mode = "evaluation",
    batch: int = 256,
    workers: int = 1,
    device: str | None = None,
    out: str | Path | None = None,
    format: str = "parquet",
    part_records: int = PART_RECORDS,
) -> Evaluation:
    """Measures `checkpoint` (a path or URL; None: the untrained model) over all records of `mode`.

    A metric's function returns one value for each record, or the mean over the batch; either is weighted by records.
    `workers` processes of one thread each share the batches; the result is the same for any number of them, and when
    some are killed. They compute on `device` (auto, cpu, cuda, cuda:N; None: the recipe's own, else auto). Raises
    RecipeError, CheckpointError, DataError, StorageError, UsageError.

    `out`, a folder or URI, gets loss and metrics of each record, in parts of `part_records` (`parquet` or `jsonl`) that
    are written as they are computed; a call that was cut short goes on where it ended. A function that returns the mean
    of a batch is asked for each record's outputs alone then, and refused when these do not add up to what it says of
    the batch.
    """
    found = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    device = device or found.defaults.device
    where = "" if checkpoint is None else str(parse_location(checkpoint))
    if out is not None:
        return _each(found, recipe, where, mode, batch, workers, device, out, format, part_records)
    records, compute = _opened(found, where, mode, device) if workers == 1 else (found.source(mode).num_records, None)

    def advanced(done: int) -> None:
        events.emit("evaluation.advanced", done=done, total=records)

    if compute is not None:
        sums = []
        for start in range(0, records, batch):
            sums.append(compute(start, min(start + batch, records)))
            advanced(min(start + batch, records))
    else:
        work = pool.work("trueline.batch.evaluate:opened", found, recipe, where, mode, records=records, batch=batch)
        work = msgspec.structs.replace(work, device=device)
        sums = pool.run(work, workers=workers, advanced=advanced)
    means = _means(sums, max(records, 1))
    metrics = {name: means.get(f"metric {name}", 0.0) for name in (found.metrics() if found.metrics else {})}
    return _evaluation(records, means.get("loss", 0.0), metrics, where)


def _evaluation(records: int, loss: float, metrics: dict[str, float], where: str) -> Evaluation:
    return Evaluation(records=records, loss=loss, metrics=metrics, checkpoint=split_location(where)[1] if where else "")


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
        model = load_model(recipe, checkpoint or None).to(devices.choose_own(device))
    source = recipe.source(mode)
    return source.num_records, make_measure(recipe, model, source)


def _each(
    recipe: Recipe,
    given: object,
    where: str,
    mode: Mode,
    batch: int,
    workers: int,
    device: str,
    out: str | Path,
    format: str,
    part_records: int,
) -> Evaluation:
    """Writes the values of each record, and evaluates what was written."""
    of = files.sha256_bytes(f"evaluation|{output_parts.made_of(recipe, where, mode, batch)}".encode())
    plan = WritePlan(num_records=recipe.source(mode).num_records, range_records=part_records, format=format, of=of)

    def work() -> Work:
        said = pool.work(EACH, recipe, given, where, mode, records=plan.num_records, batch=part_records)
        return msgspec.structs.replace(said, device=device)

    output_parts.write(
        out, plan, batch, answering=lambda: _valuing(recipe, where, mode, device), work=work, workers=workers,
        event="evaluation.advanced",
    )  # fmt: skip
    sums = output_parts.sums(out)
    means = {name: total / max(plan.num_records, 1) for name, total in sums.items() if name != "record"}
    loss = means.pop("loss", 0.0)
    return _evaluation(plan.num_records, loss, means, where)


EACH = "trueline.batch.evaluate:opened_each"


def opened_each(work: Work) -> tuple[int, Compute]:
    """What a pool's worker does with the values of each record: it writes its parts itself."""
    return output_parts.opened(work, *_valuing(load_recipe(work.recipe), work.source, work.mode, work.device))


def _valuing(recipe: Recipe, checkpoint: str, mode: Mode, device: str) -> tuple[int, Answer]:
    """Loss and metrics of each record."""
    with seeded(recipe.defaults.seed):
        model = load_model(recipe, checkpoint or None).to(devices.choose_own(device))
    source = recipe.source(mode)
    metrics = recipe.metrics() if recipe.metrics else {}
    for name in {"record", "loss"} & {*metrics}:
        raise RecipeError(
            f"a metric is called '{name}', as another column of the values is", hint="give it another name"
        )
    functions = {"loss": recipe.loss, **metrics}

    def answer(start: int, stop: int) -> dict[str, Array]:
        with torch.no_grad(), seeded(start):
            batch = source.read(np.arange(start, stop, dtype=np.int64))
            records = devices.place_batch(batch, devices.of_model(model))
            outputs = call_model(model, records.inputs)
            return {name: _values(name, one, outputs, records.labels, stop - start) for name, one in functions.items()}

    return source.num_records, answer


def _values(name: str, function: Callable[[Any, Any], Any], outputs: Any, labels: Any, count: int) -> Array:
    """A value for each record. Raises RecipeError when those of single records do not make that of the batch."""
    found = torch.as_tensor(function(outputs, labels), dtype=torch.float64)
    if found.ndim:
        sum_values(name, found, count)  # refuses what has another number of values
        return found.reshape(count, -1).mean(dim=1).cpu().numpy()
    alone = [function(_record(outputs, at, count), _record(labels, at, count)) for at in range(count)]
    each = [torch.as_tensor(one, dtype=torch.float64).mean().item() for one in alone]
    values = np.array(each, dtype=np.float64)
    mean = float(values.mean())
    if not math.isclose(mean, found.item(), rel_tol=1e-4, abs_tol=1e-6) and not math.isnan(found.item()):
        raise RecipeError(
            f"'{name}' is {found.item():.6g} for a batch of {count} records, and {mean:.6g} on average for each alone: "
            "it is no mean over its records, so no record has a value of it",
            hint=f"let '{name}' return one value for each record, or evaluate without values of records",
        )
    return values


def _record(value: Any, at: int, count: int) -> Any:
    """Record `at` of a batch of `count`, as a batch of one, whatever the tensors are nested in."""

    def one(leaf: Any) -> Any:
        whole = isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == count
        return leaf[at : at + 1] if whole else leaf

    return tree_map(one, value)
