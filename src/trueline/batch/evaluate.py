"""`trueline.evaluate`: the loss and the recipe's metrics of a checkpoint, each record counted once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch.utils._pytree import tree_map

from trueline import events, files
from trueline.batch import job as parts
from trueline.batch import outcomes, pool
from trueline.batch.job import Answer, BatchJob, BatchOptions, compute_chunks
from trueline.batch.pool import Compute, Work
from trueline.bundle import evaluation as kept_evaluation
from trueline.bundle.evaluation import EvaluationRecord
from trueline.checkpoint.checkpoint import bind_columns, load_model, read_manifest
from trueline.data.loading.seeding import seed_generators
from trueline.errors import RecipeError
from trueline.recipe.contract import Recipe
from trueline.recipe.eager_mode import as_trained
from trueline.recipe.load import load_recipe
from trueline.storage.location import Location, parse_location, split_location
from trueline.train import devices
from trueline.train.job_dir import JobDir
from trueline.train.worker.measure import call_model, make_measure, sum_values

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

ADVANCED = "evaluation.advanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Means over all `records`."""

    records: int
    loss: float
    metrics: dict[str, float]
    checkpoint: str
    """Name of the checkpoint; empty for the untrained model."""
    outcomes: Mapping[str, float] = field(default_factory=dict, repr=False)
    """What `batch/outcomes.py` counted; empty with `out`."""

    def as_dict(self) -> dict[str, Any]:
        return {"records": self.records, "loss": self.loss, "metrics": self.metrics, "checkpoint": self.checkpoint}

    def as_text(self) -> str:
        named = [("loss", self.loss), *self.metrics.items()]
        values = ", ".join(f"{name} {value:.4f}" for name, value in named)
        return f"{self.records} records: {values} ({self.checkpoint or 'untrained'})"

    def _repr_html_(self) -> str:
        rows = [("records", str(self.records)), ("loss", f"{self.loss:.4f}")]
        rows += [(escape(name), f"{value:.4f}") for name, value in self.metrics.items()]
        return f"<table>{''.join(f'<tr><th>{name}</th><td>{text}</td></tr>' for name, text in rows)}</table>"


def evaluate(
    recipe: str | Path | Recipe,
    checkpoint: Location | None,
    *,
    out: str | Path | None = None,
    **options: Unpack[BatchOptions],
) -> Evaluation:
    """Measures `checkpoint` (a path or URL; None: the untrained model) over all records of `mode` ("evaluation").

    A metric returns one value for each record, or the mean over the batch; either is weighted by records. The result
    is the same for any number of `workers`, and when some are killed.

    With `out`, a folder or URI, loss and metrics of each record are written there in parts, as they are computed; a
    call that was interrupted continues where it ended. A metric that returns the mean of a batch is then called for
    each record alone, and refused if the values do not add up to its value for the batch.

    For a checkpoint in a job's folder, `evaluation.json` there keeps the result with a confusion matrix or labels
    beside answers, which `trueline bundle report --job` shows (not with `out`).

    Raises RecipeError, CheckpointError, DataError, StorageError, UsageError.
    """
    source = "" if checkpoint is None else str(parse_location(checkpoint))
    job = BatchJob.of(recipe, source, options, mode="evaluation")
    if out is not None:
        return _evaluate_each(job, out)
    if job.workers == 1:
        count, measure = _open_measure(job.recipe, job)
        sums: Sequence[Mapping[str, float]] = compute_chunks(count, measure, job.batch, ADVANCED)
    else:
        count = job.num_records()
        work = job.work("trueline.batch.evaluate:open_worker", num_records=count, chunk=job.batch)
        sums = pool.run(work, workers=job.workers, report=lambda done: events.emit(ADVANCED, done=done, total=count))
    totals = _add(sums)
    means = {name: total / max(count, 1) for name, total in totals.items()}
    metrics = {name: means.get(f"metric {name}", 0.0) for name in (job.recipe.metrics() if job.recipe.metrics else {})}
    evaluation = Evaluation(
        records=count, loss=means.get("loss", 0.0), metrics=metrics, checkpoint=_name_of(job), outcomes=totals
    )
    _keep(job, evaluation)
    return evaluation


def _keep(job: BatchJob, evaluation: Evaluation) -> None:
    """Writes evaluation.json to the folder of the job that made the checkpoint, if that is a local one."""
    source = parse_location(job.source) if job.source else None
    if not isinstance(source, Path) or not (folder := JobDir(source.absolute().parent.parent)).settings.is_file():
        return
    if source.absolute().parent != folder.checkpoints.absolute():
        return
    fitted = bind_columns(job.recipe, source).fitted
    record = EvaluationRecord(
        records=evaluation.records, mode=job.mode, loss=_finite(evaluation.loss),
        metrics={name: _finite(value) for name, value in evaluation.metrics.items()},
        checkpoint=evaluation.checkpoint, checkpoint_digest=str(read_manifest(source).get("digest", "")),
        classes=fitted.classes if fitted is not None else (), confusion=outcomes.confusion(evaluation.outcomes),
        pairs=tuple(pair for pair in outcomes.pairs(evaluation.outcomes) if all(map(math.isfinite, pair))),
    )  # fmt: skip
    kept_evaluation.write(folder.path, record)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _name_of(job: BatchJob) -> str:
    return split_location(job.source)[1] if job.source else ""


def _add(chunks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums of chunks, added in the order of the chunks so that rounding is always the same."""
    totals: dict[str, float] = defaultdict(float)
    for chunk in chunks:
        for name, value in chunk.items():
            totals[name] += value
    return dict(totals)


def open_worker(work: Work) -> tuple[int, Compute]:
    """What a pool's worker does with its chunks: it sums the loss and the metrics."""
    return _open_measure(load_recipe(work.recipe), work)


def _open_model(recipe: Recipe, on: BatchJob | Work) -> torch.nn.Module:
    with seed_generators(recipe.defaults.seed):  # an untrained model is the same in every process
        return load_model(recipe, on.source or None).to(devices.choose_own(on.device))


def _open_measure(recipe: Recipe, on: BatchJob | Work) -> tuple[int, Compute]:
    recipe = bind_columns(recipe, on.source or None)
    model, source = _open_model(recipe, on), recipe.source(on.mode)
    count = source.num_records
    return count, make_measure(recipe, model, source, outcomes.make_outcomes(count))


def _evaluate_each(job: BatchJob, out: str | Path) -> Evaluation:
    """Writes the values of each record, and evaluates what was written."""
    plan = parts.plan_parts(job, files.sha256_bytes(f"evaluation|{parts.digest_inputs(job)}".encode()))
    parts.write(
        out, job, plan, open_answer=lambda: _open_values(job.recipe, job),
        entry="trueline.batch.evaluate:open_part_worker", event=ADVANCED,
    )  # fmt: skip
    sums = parts.sum_columns(out)
    means = {name: total / max(plan.num_records, 1) for name, total in sums.items() if name != "record"}
    loss = means.pop("loss", 0.0)
    return Evaluation(records=plan.num_records, loss=loss, metrics=means, checkpoint=_name_of(job))


def open_part_worker(work: Work) -> tuple[int, Compute]:
    """What a pool's worker does with parts: it writes the values of each record."""
    return parts.open_part_worker(work, *_open_values(load_recipe(work.recipe), work))


def _open_values(recipe: Recipe, on: BatchJob | Work) -> tuple[int, Answer]:
    """Opens what computes loss and metrics of each record."""
    recipe = bind_columns(recipe, on.source or None)
    model, source = _open_model(recipe, on), recipe.source(on.mode)
    metrics = recipe.metrics() if recipe.metrics else {}
    for name in {"record", "loss"} & {*metrics}:
        raise RecipeError(
            f"a metric is called '{name}', as another column of the values is", hint="give it another name"
        )
    functions = {"loss": recipe.loss, **metrics}

    def answer(start: int, stop: int) -> dict[str, Array]:
        with torch.no_grad(), as_trained(), seed_generators(start):
            batch = source.read(np.arange(start, stop, dtype=np.int64))
            records = devices.place_batch(batch, devices.of_model(model))
            outputs = call_model(model, records.inputs)
            count = stop - start
            return {
                name: evaluate_records(name, each, outputs, records.labels, count) for name, each in functions.items()
            }

    return source.num_records, answer


def evaluate_records(name: str, function: Callable[[Any, Any], Any], outputs: Any, labels: Any, count: int) -> Array:
    """[count] The function's value for each record. Raises RecipeError if their mean is not its value for the batch."""
    whole = torch.as_tensor(function(outputs, labels), dtype=torch.float64)
    if whole.ndim:
        sum_values(name, whole, count)  # refuses another number of values
        return whole.reshape(count, -1).mean(dim=1).cpu().numpy()
    alone = [function(_take_record(outputs, at, count), _take_record(labels, at, count)) for at in range(count)]
    values = np.array([torch.as_tensor(value, dtype=torch.float64).mean().item() for value in alone], dtype=np.float64)
    mean = float(values.mean())
    if not math.isclose(mean, whole.item(), rel_tol=1e-4, abs_tol=1e-6) and not math.isnan(whole.item()):
        raise RecipeError(
            f"'{name}' is {whole.item():.6g} for a batch of {count} records, and {mean:.6g} on average for each alone: "
            "it is no mean over its records, so no record has a value of it",
            hint=f"let '{name}' return one value for each record, or evaluate without values of records",
        )
    return values


def _take_record(value: Any, at: int, count: int) -> Any:
    """Record `at` of a batch of `count`, as a batch of one; `value` may be nested."""

    def take(leaf: Any) -> Any:
        batched = isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == count
        return leaf[at : at + 1] if batched else leaf

    return tree_map(take, value)
