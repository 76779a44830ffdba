"""The recipe's metric of a program, record by record, and the decisions that differ from its parent's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trueline.batch.evaluate import evaluate_records
from trueline.bundle.signature import Signature
from trueline.compress.measure.records import OutputForm, RecordBatch

if TYPE_CHECKING:
    from trueline.bundle.signature import Array
    from trueline.runtime.session import Session

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to all evaluation records, batch by batch, and the metric of each record."""

    outputs: Sequence[dict[str, Array]]
    values: Floats


@dataclass(frozen=True, slots=True)
class Metric:
    """The metric that the budget is about."""

    name: str
    function: Callable[[Any, Any], Any]
    form: OutputForm

    def values(self, outputs: Mapping[str, Array], batch: RecordBatch) -> Floats:
        """[records] Its value for each record. Raises RecipeError for a metric that is no mean over its records."""
        found = evaluate_records(self.name, self.function, self.form.build(outputs), batch.labels, batch.count)
        return found.astype(np.float64)


def answer(session: Session, batches: Sequence[RecordBatch], metric: Metric) -> Answers:
    """What `session` answers to `batches`."""
    outputs = [session.run(batch.inputs) for batch in batches]
    values = [metric.values(one, batch) for one, batch in zip(outputs, batches, strict=True)]
    return Answers(outputs, np.concatenate(values))


def count_changed(parent: Answers, candidate: Answers) -> int | None:
    """Records for which the largest element of an output is another one. Where no output has several: for which a
    metric that is 0 or 1 for each record is another one, as of a yes or no; None where there is no such decision."""
    changed, decides = 0, False
    for one, other in zip(parent.outputs, candidate.outputs, strict=True):
        for name, want in one.items():
            if want.ndim >= 2 and want.shape[-1] >= 2 and want.dtype.kind == "f" and len(want):
                moved = want.argmax(axis=-1) != other[name].argmax(axis=-1)
                decides, changed = True, changed + int(moved.reshape(len(want), -1).any(axis=1).sum())
    if decides:
        return changed
    both = np.stack([parent.values, candidate.values])
    return int((both[0] != both[1]).sum()) if np.isin(both, (0.0, 1.0)).all() else None


def largest_errors(parent: Answers, candidate: Answers, signature: Signature) -> dict[str, tuple[float, Floats | None]]:
    """How far each float output is off over all records: at most, and at each index of its last axis where that has a
    fixed size."""
    found: dict[str, tuple[float, Floats | None]] = {}
    for spec in signature.outputs:
        if spec.dtype.kind != "f":
            continue
        worst, columns = 0.0, None
        for one, other in zip(parent.outputs, candidate.outputs, strict=True):
            gap = np.abs(one[spec.name].astype(np.float64) - other[spec.name].astype(np.float64))
            worst = max(worst, float(np.nanmax(gap, initial=0.0)))
            if gap.ndim >= 2 and isinstance(spec.shape[-1], int):
                each = np.nanmax(gap.reshape(-1, gap.shape[-1]), axis=0, initial=0.0)
                columns = each if columns is None else np.maximum(columns, each)
        found[spec.name] = (worst, columns)
    return found
