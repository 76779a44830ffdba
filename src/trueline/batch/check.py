"""`check`: reads a recipe and its data together before any training, and takes one step of two records.

columns        fit to the training records; missing values, constants, duplicates, a column that decides the label
evaluation     every record encoded: unseen categories, unknown words, texts that are cut, labels that are new
a dry step     forward, loss, backward and optimizer on two unequal records; labels against the model's outputs
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from trueline import events
from trueline.columns.cells import one_array
from trueline.columns.declared import input_name
from trueline.columns.encoders import (
    UNKNOWN,
    UNSEEN,
    FittedCategory,
    FittedColumn,
    FittedImage,
    FittedLabel,
    FittedNumber,
    FittedSeries,
    FittedText,
)
from trueline.columns.fitted import FittedColumns
from trueline.data.missing import stream_tables
from trueline.data.open import open_training
from trueline.data.source import Source
from trueline.data.sources.table_source import TableSource
from trueline.errors import TruelineError, first_line
from trueline.recipe.contract import Recipe
from trueline.recipe.load import load_recipe
from trueline.train.worker.measure import call_model

Level = Literal["error", "warning", "note"]
SAMPLED = 200_000
"""Training records in which duplicates and leaks are looked for."""
_ROWS_EACH = 5
"""Records per label: below it, a value that occurs with one label alone may do so by chance."""
_CUT_SHARE, _UNKNOWN_SHARE = 0.05, 0.2


@dataclass(frozen=True, slots=True)
class DataFinding:
    level: Level
    where: str
    """A column, or a part of the recipe."""
    what: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class DataReport:
    """Findings, errors first."""

    recipe: str
    records: dict[str, int]
    findings: tuple[DataFinding, ...]

    @property
    def sound(self) -> bool:
        return all(one.level != "error" for one in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sound": self.sound}

    def as_text(self) -> str:
        width = max((len(one.where) for one in self.findings), default=0)
        lines = [
            f"{one.level:<7}  {one.where:<{width}}  {one.what}{f'; {one.hint}' if one.hint else ''}"
            for one in self.findings
        ]
        counted = ", ".join(f"{count} records for {mode}" for mode, count in self.records.items())
        verdict = "nothing keeps it from training" if self.sound else "correct the errors before training"
        return "\n".join([*lines, f"{self.recipe}: {counted or 'no records'}; {verdict}"])


class _Findings:
    def __init__(self) -> None:
        self.found: list[DataFinding] = []

    def add(self, level: Level, where: str, what: str, hint: str = "") -> None:
        self.found.append(DataFinding(level, where, what, hint))

    def attempt(self, where: str, work: Callable[[], Any]) -> Any:
        """What `work` returns; None, and an error under `where`, if it raises."""
        try:
            return work()
        except TruelineError as error:
            self.add("error", where, error.message, error.hint)
        except Exception as error:  # noqa: BLE001 - the user's functions may raise anything
            self.add("error", where, f"{type(error).__name__}: {first_line(error)}")
        return None


def check(given: str | Path | Recipe) -> DataReport:
    """Reads all records of the recipe once and takes one step. Raises RecipeError for a recipe that is none."""
    recipe = given if isinstance(given, Recipe) else load_recipe(given)
    findings = _Findings()
    records: dict[str, int] = {}
    if recipe.columns is not None and recipe.feed is None:
        fitted = findings.attempt("columns", recipe.with_columns)
        if fitted is None:
            return _report(recipe, records, findings)
        recipe = fitted
        assert recipe.fitted is not None
        _check_fitted(recipe.fitted, findings)
    training = findings.attempt("training", lambda: recipe.source("training"))
    if training is not None:
        records["training"] = training.num_records
        if recipe.fitted is None:
            findings.attempt("training", lambda: open_training(training))
        elif isinstance(training, TableSource):
            _check_sample(training, recipe.fitted, findings)
        findings.attempt("a dry step", lambda: _step(recipe, training, findings))
    evaluation = findings.attempt("evaluation", lambda: recipe.source("evaluation"))
    if evaluation is not None:
        records["evaluation"] = evaluation.num_records
        if recipe.fitted is not None and isinstance(evaluation, TableSource):
            _check_evaluation(evaluation, recipe.fitted, findings)
        else:
            findings.attempt("evaluation", lambda: evaluation.read(_two(evaluation)))
    return _report(recipe, records, findings)


def _report(recipe: Recipe, records: dict[str, int], findings: _Findings) -> DataReport:
    order = ("error", "warning", "note")
    listed = sorted(dict.fromkeys(findings.found), key=lambda one: order.index(one.level))
    return DataReport(recipe.name, records, tuple(listed))


def _check_fitted(fitted: FittedColumns, findings: _Findings) -> None:
    for one in fitted.columns:
        if one.missing:
            share = one.missing / fitted.records
            findings.add("note", one.name, f"no value in {one.missing} of {fitted.records} records ({share:.1%})")
        if isinstance(one, FittedNumber | FittedSeries) and one.low == one.high:
            findings.add("warning", one.name, f"is {one.low:g} in every record", "leave it out")
        if isinstance(one, FittedCategory) and len(one.values) < 2:
            findings.add("warning", one.name, f"has {len(one.values)} values that are not rare", "leave it out")
        if isinstance(one, FittedCategory) and len(one.values) > max(100, fitted.records // 2):
            findings.add(
                "warning", one.name, f"has {len(one.values)} different values in {fitted.records} records",
                "an id tells a model nothing about new records; Category(rare=...) joins rare ones",
            )  # fmt: skip
        if isinstance(one, FittedText | FittedSeries) and one.cut > _CUT_SHARE * fitted.records:
            share, kind = one.cut / fitted.records, type(one.declared).__name__
            called, longer = ("lists", one.longest) if isinstance(one, FittedSeries) else ("texts", 2 * one.length)
            findings.add("warning", one.name, f"{share:.1%} of the {called} are longer than {one.length} and are cut",
                         f"{kind}(max_length={longer})")  # fmt: skip
        if isinstance(one, FittedSeries) and one.gaps:
            findings.add("note", one.name, f"{one.gaps} of {fitted.records} lists have a gap inside, which is masked")
        if isinstance(one, FittedLabel) and one.counts and min(one.counts) * 100 < max(one.counts):
            rare = one.classes[int(np.argmin(one.counts))]
            findings.add("note", one.name, f"class '{rare}' has {min(one.counts)} of {fitted.records} records")
    if fitted.ignored:
        findings.add("note", "columns", f"not declared and not read: {', '.join(fitted.ignored[:12])}")


def _sample(source: TableSource, names: list[str]) -> pa.Table:
    """The first SAMPLED records, evenly from all units if there are more."""
    share = min(1.0, SAMPLED / max(source.num_records, 1))
    pieces = []
    for number, unit in enumerate(source.units):
        count = max(1, int(unit.count * share))
        for table in stream_tables(source.records, number, count):
            pieces.append(table.select(names).take(np.arange(len(table))))  # a slice would keep its whole piece
    return pa.concat_tables(pieces).combine_chunks()


def _check_sample(source: TableSource, fitted: FittedColumns, findings: _Findings) -> None:
    """Duplicates and leaks, in a sample."""
    table = _sample(source, [one.name for one in fitted.columns])
    first: dict[bytes, str] = {}
    for one in fitted.columns:
        if not isinstance(one, FittedImage):
            key = _content(one_array(table.column(one.name)))
            other = first.setdefault(key, one.name)
            if other != one.name:
                is_label = any(each.name in (other, one.name) for each in fitted.labels)
                findings.add(
                    "warning", one.name, f"is the same as column '{other}'" + (", the label" if is_label else ""),
                    "the answer is in the inputs: leave it out" if is_label else "leave one of them out",
                )  # fmt: skip
    for label in fitted.labels:
        for one in fitted.columns:
            if isinstance(one, FittedCategory | FittedNumber) and not label.declared.number:
                _check_leak(table, one, label, findings)


def _content(array: Any) -> bytes:
    values = array.to_pylist()
    return hashlib.sha256(repr([float(one) if isinstance(one, int) else one for one in values]).encode()).digest()


def _check_leak(table: pa.Table, column: FittedColumn, label: FittedLabel, findings: _Findings) -> None:
    """Whether each value of `column` stands with one class only, in more records than chance would have."""
    pairs = pa.table({"value": one_array(table.column(column.name)), "label": one_array(table.column(label.name))})
    grouped = pairs.group_by("value").aggregate([("label", "count_distinct"), ("label", "count")])
    classes = pc.max(grouped.column("label_count_distinct")).as_py()
    if classes == 1 and 1 < len(grouped) <= len(table) / _ROWS_EACH:
        findings.add(
            "warning", column.name, f"each of its {len(grouped)} values stands with one class of '{label.name}' only",
            "it may be written after the label is known: leave it out, or keep it if it is known when you ask",
        )  # fmt: skip


def _check_evaluation(source: TableSource, fitted: FittedColumns, findings: _Findings) -> None:
    seen: dict[str, int] = defaultdict(int)
    words: dict[str, int] = defaultdict(int)
    total = 0
    for table in _all_tables(source):
        encoded = findings.attempt("evaluation", partial(fitted.encode_table, table))
        if encoded is None:
            return
        inputs, total = encoded[0], total + len(table)
        for one in fitted.columns:
            if isinstance(one, FittedCategory):
                seen[one.name] += int((inputs[_input(one)] == UNSEEN).sum())
            if isinstance(one, FittedText):
                ids = inputs[_input(one)]
                seen[one.name] += int((ids == UNKNOWN).sum())
                words[one.name] += int((ids > 0).sum())
        events.emit("check.advanced", done=total, total=source.num_records)
    for one in fitted.columns:
        count = seen[one.name]
        if isinstance(one, FittedCategory) and count:
            findings.add(
                "warning", one.name, f"{count} of {total} evaluation records have a value that training does not have "
                "(or that is rare)", "" if one.declared.rare > 1 else "Category(rare=2) trains the index of unseen",
            )  # fmt: skip
        if isinstance(one, FittedText) and count > _UNKNOWN_SHARE * max(words[one.name], 1):
            findings.add("warning", one.name, f"{count / words[one.name]:.0%} of the words in evaluation are unknown")


def _input(column: FittedColumn) -> str:
    return input_name(column.name)


def _all_tables(source: TableSource) -> Iterator[pa.Table]:
    for number, unit in enumerate(source.units):
        yield from stream_tables(source.records, number, unit.count)


def _two(source: Source) -> Any:
    """The first and the last record, which are rarely equal in length."""
    return np.array([0, source.num_records - 1], np.int64)


def _step(recipe: Recipe, source: Source, findings: _Findings) -> None:
    """One optimizer step of two records. What the recipe's functions raise is an error of the part that raised it."""
    batch = findings.attempt("records", lambda: source.read(_two(source)))
    model = findings.attempt("model", recipe.make_model) if batch is not None else None
    if model is None:
        return
    outputs = findings.attempt("model", lambda: call_model(model.train(), batch.inputs))
    if outputs is None:
        return
    _check_labels(recipe, batch.labels, outputs, findings)
    loss = findings.attempt("loss", lambda: recipe.loss(outputs, batch.labels))
    if loss is None:
        return
    mean = torch.as_tensor(loss).float().mean()
    if not bool(torch.isfinite(mean)):
        findings.add("error", "loss", f"is {mean.item()} for two records", "look for numbers that are not scaled")
        return

    def update() -> None:
        optimizer = recipe.optimizer(model.parameters())
        mean.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    findings.attempt("optimizer", update)
    unused = [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
    if unused and mean.requires_grad:
        findings.add("warning", "model", f"parameters without a gradient: {', '.join(unused[:5])}",
                     "set find_unused_parameters = True if that is meant")  # fmt: skip


def _check_labels(recipe: Recipe, labels: Any, outputs: Any, findings: _Findings) -> None:
    """Classes against the columns of the only output."""
    if not isinstance(outputs, torch.Tensor) or not isinstance(labels, torch.Tensor):
        return
    shape, classes = list(outputs.shape), recipe.fitted.num_classes if recipe.fitted is not None else 0
    if labels.dtype == torch.int64 and outputs.ndim == 2 and labels.ndim == 1 and shape[1] > 1:
        wanted = classes or int(labels.max()) + 1
        if shape[1] < wanted:
            findings.add("error", "model", f"has {shape[1]} outputs, and the labels have {wanted} classes",
                         "nn.Linear(..., columns.num_classes)" if classes else "")  # fmt: skip
        elif classes and shape[1] > classes:
            findings.add("warning", "model", f"has {shape[1]} outputs for {classes} classes, so answers name no class")
    if labels.dtype.is_floating_point and outputs.ndim == 2 and labels.ndim == 1 and shape[1] == 1:
        findings.add("warning", "loss", f"compares outputs {shape} with labels {list(labels.shape)}: they broadcast to "
                     f"{[shape[0], shape[0]]}", "return outputs.squeeze(1) from the model")  # fmt: skip
