"""What a model's outputs say in the words of its label: class names with probabilities, or numbers scaled back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trueline.columns.encoders import FittedLabel
from trueline.columns.fitted import FittedColumns

Array = npt.NDArray[Any]
CLASS, PROBABILITIES, VALUE = "class", "probabilities", "value"


def find_output(fitted: FittedColumns, outputs: Mapping[str, Array], rows: int | None = None) -> str | None:
    """The output that the one label is about: the only one of a form that it can have; None where it is not clear."""
    if len(fitted.labels) != 1:
        return None
    label = fitted.labels[0]
    fits = [
        name
        for name, values in outputs.items()
        if values.dtype.kind == "f" and values.ndim and (rows is None or len(values) == rows) and _fits(label, values)
    ]
    return fits[0] if len(fits) == 1 else None


def _fits(label: FittedLabel, values: Array) -> bool:
    single = values.ndim == 1 or (values.ndim == 2 and values.shape[1] == 1)
    if label.declared.number:
        return single
    many = len(label.classes)
    return (values.ndim == 2 and values.shape[1] == many and many > 1) or (single and many == 2)


def probabilities(label: FittedLabel, values: Array) -> Array:
    """[n, classes] float64 of an output [n, classes], or [n] or [n, 1] for two classes."""
    numbers = values.astype(np.float64)
    declared = label.declared.outputs == "probabilities"
    if numbers.ndim == 1 or numbers.shape[1] == 1:
        second = numbers.reshape(-1)
        if not declared:
            second = np.exp(-np.logaddexp(0.0, -second))
        return np.stack([1 - second, second], axis=1)
    if declared:
        return numbers
    with np.errstate(invalid="ignore"):
        powers = np.exp(numbers - numbers.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def undo_scale(label: FittedLabel, values: Array) -> Array:
    """[n] float64 in the unit of the training records."""
    return values.astype(np.float64).reshape(-1) * label.factor + label.offset


def columns_of(fitted: FittedColumns, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """Columns for tables of predictions: `class` and `probabilities`, or `value`; none where no output fits."""
    name = find_output(fitted, outputs)
    if name is None:
        return {}
    label = fitted.labels[0]
    if label.declared.number:
        return {VALUE: undo_scale(label, outputs[name])}
    likely = probabilities(label, outputs[name])
    return {CLASS: np.array(label.classes)[likely.argmax(axis=1)], PROBABILITIES: likely}


def records_of(fitted: FittedColumns, outputs: Mapping[str, Array]) -> Sequence[Any]:
    """An answer for each record as JSON's values: {"class", "probabilities": {class: number}} or {"value"}, and other
    outputs by name."""
    name, rows = find_output(fitted, outputs), _count(outputs)
    found: list[dict[str, Any]] = [
        {other: values[row].tolist() for other, values in outputs.items() if other != name} for row in range(rows)
    ]
    if name is None:
        return [next(iter(one.values())) for one in found] if len(outputs) == 1 else found
    label = fitted.labels[0]
    if label.declared.number:
        for one, number in zip(found, undo_scale(label, outputs[name]).tolist(), strict=True):
            one[VALUE] = number
        return found
    likely = probabilities(label, outputs[name])
    for one, row in zip(found, likely.tolist(), strict=True):
        one[CLASS] = label.classes[int(np.argmax(row))]
        one[PROBABILITIES] = dict(zip(label.classes, row, strict=True))
    return found


def _count(outputs: Mapping[str, Array]) -> int:
    return len(next(iter(outputs.values())))
