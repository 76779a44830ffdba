"""What candidates are compared with: the parent's answers to the evaluation records, and batches for timing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.numpy import save

from trueline import files
from trueline.checkpoint.checkpoint import load_model
from trueline.compress.measure import accuracy
from trueline.compress.measure.accuracy import Answers, Metric
from trueline.compress.measure.latency import Rounds, Run, measure_alternately
from trueline.compress.measure.records import (
    CALIBRATION,
    CHUNK,
    OutputForm,
    ProgramRecords,
    RecordBatch,
    name_inputs,
    open_records,
)
from trueline.compress.method import Budget, check_metric
from trueline.errors import DataError, RecipeError, RequestError
from trueline.recipe.contract import Recipe
from trueline.recipe.eager_mode import as_trained
from trueline.runtime.open import open_program, open_session
from trueline.runtime.session import Session
from trueline.train.worker.measure import call_model

if TYPE_CHECKING:
    from trueline.bundle import Bundle
    from trueline.bundle.signature import Array

LARGE = 32
"""Records in the larger batch that is timed."""
PARENT, EAGER = "parent (fp32)", "eager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The parent bundle with its recipe's records and its own answers to them."""

    bundle: Bundle
    recipe: Recipe
    metric: Metric
    budget: Budget
    session: Session
    batches: Sequence[RecordBatch]
    answers: Answers
    training: ProgramRecords
    fingerprints: Mapping[str, str]
    """Of the records, by mode: candidates that were judged by others do not count."""
    timed: Mapping[int, Any]
    """By batch size: inputs as the recipe gives them and as the program takes them."""
    model: torch.nn.Module

    @property
    def count(self) -> int:
        return len(self.answers.values)

    @property
    def value(self) -> float:
        """The parent's metric."""
        return float(self.answers.values.mean())

    def open(self, program: Path, format: str) -> Session:
        """A candidate as a server would open it; machine code, too, since it was made here. Raises UsageError where its
        runtime is not installed."""
        return open_session(format, program, self.bundle.signature_of("onnx"), native=True)

    def answer(self, session: Session) -> Answers:
        return accuracy.answer(session, self.batches, self.metric)

    def calibration(self) -> list[dict[str, Array]]:
        """Training records in batches of one size."""
        size = min(CHUNK // 4, self.training.count)
        found = [batch.inputs for batch in self.training.batches(CALIBRATION, size) if batch.count == size]
        return found or [batch.inputs for batch in self.training.batches(CALIBRATION, 1)]

    def time(self, sessions: Mapping[str, Session], *, batch: int, seconds: float, eager: bool) -> Rounds:
        """`sessions`, the parent and, if asked for, the eager model, alternately."""
        raw, inputs = self.timed[batch]
        runs: dict[str, Run] = {PARENT: partial(self.session.run, inputs)}
        if eager:
            runs[EAGER] = partial(self._run_eager, raw)
        runs |= {name: partial(session.run, inputs) for name, session in sessions.items()}
        return measure_alternately(runs, seconds=seconds, slow=EAGER if eager else "")

    def _run_eager(self, raw: Any) -> None:
        with torch.no_grad(), as_trained():
            call_model(self.model, raw)

    def write_inputs(self, path: Path) -> Path:
        """The larger batch as safetensors, for processes that have no recipe."""
        files.write_atomic(path, save(self.timed[max(self.timed)][1]))
        return path


def open_reference(bundle: Bundle, recipe: Recipe, budget: Budget | None) -> Reference:
    """Answers all evaluation records by the parent. `budget`: None for the first metric of the recipe.

    Raises RecipeError, UsageError, DataError, CaptureError.
    """
    if recipe.columns is not None:
        recipe = recipe.with_columns(bundle.columns())
    functions = {"loss": recipe.loss, **(recipe.metrics() if recipe.metrics else {})}
    names = [*(name for name in functions if name != "loss"), "loss"]
    budget = budget or Budget(names[0], float("inf"))
    check_metric(budget, names)
    signature = bundle.signature_of("onnx")
    records = open_records(recipe, "evaluation", signature)
    model = load_model(recipe, None).eval()
    timed = _timed_batches(records)
    smallest = timed[min(timed)][0]
    metric = Metric(budget.metric, functions[budget.metric], OutputForm(model, smallest, signature))
    session = open_program(bundle, "onnx")
    batches = list(records.batches())
    answers = accuracy.answer(session, batches, metric)
    if not np.isfinite(answers.values).all():
        raise RecipeError(
            f"'{budget.metric}' of the parent is not finite for {int((~np.isfinite(answers.values)).sum())} records",
            hint="`trueline evaluate` shows the parent's metrics; a budget needs one number for each record",
        )
    training = open_records(recipe, "training", signature)
    return Reference(
        bundle=bundle, recipe=recipe, metric=metric, budget=budget, session=session, batches=batches, answers=answers,
        training=training, fingerprints={one.mode: one.source.fingerprint() for one in (records, training)},
        timed=timed, model=model,
    )  # fmt: skip


def _timed_batches(records: ProgramRecords) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for size in (1, LARGE):
        try:
            raw = records.source.read(np.arange(size, dtype=np.int64) % records.count).inputs
        except DataError:  # records of unequal sizes
            raw = records.source.read(np.zeros(size, dtype=np.int64)).inputs
        inputs = {name: np.ascontiguousarray(array) for name, array in name_inputs(records.signature, raw).items()}
        try:
            records.signature.check(inputs)
        except RequestError:
            continue
        found[size] = (raw, inputs)
    if not found:
        first = records.read(0, min(records.count, CHUNK))
        found[first.count] = (first.inputs, first.inputs)
    return found
