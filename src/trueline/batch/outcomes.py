"""What an evaluation counts beside its means: which class was taken for which, or labels and answers of some records.

Counts are sums over chunks by name, like the loss, so they are the same for any number of workers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

MAX_CLASSES = 50
"""A larger matrix is unreadable."""
MAX_PAIRS = 500
"""Points of a plot."""
Outcomes = Callable[[int, int, Any, Any], dict[str, float]]
"""From (start, stop, outputs, labels) of the records [start, stop) to sums by name."""


def make_outcomes(num_records: int) -> Outcomes:
    """Counts of a chunk: `taken LABEL CLASS`, or `label RECORD` and `answer RECORD` of every n-th record; nothing for
    outputs and labels of other forms.

    Classification: floats [n, classes] and whole numbers [n]. Regression: floats [n] or [n, 1], both of them.
    """
    stride = max(1, -(-num_records // MAX_PAIRS))

    def count(start: int, stop: int, outputs: Any, labels: Any) -> dict[str, float]:
        n = stop - start
        if not isinstance(outputs, torch.Tensor) or not isinstance(labels, torch.Tensor):
            return {}
        if not outputs.is_floating_point() or labels.shape[:1] != (n,) or outputs.shape[:1] != (n,):
            return {}
        if labels.is_floating_point():
            if outputs.numel() != n or labels.numel() != n:
                return {}
            chosen = range(-(-start // stride) * stride, stop, stride)
            told, said = labels.reshape(n).double().tolist(), outputs.reshape(n).double().tolist()
            found = {f"label {at}": told[at - start] for at in chosen}
            return found | {f"answer {at}": said[at - start] for at in chosen}
        return _count_classes(outputs, labels)

    return count


def _count_classes(outputs: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    classes = outputs.shape[1] if outputs.ndim == 2 else 0
    if labels.ndim != 1 or labels.dtype == torch.bool or not 2 <= classes <= MAX_CLASSES:
        return {}
    known = (labels >= 0) & (labels < classes)  # -100 marks labels that do not count
    cells = torch.bincount(labels[known].long() * classes + outputs.argmax(dim=1)[known], minlength=classes**2)
    counts = cells.reshape(classes, classes).tolist()
    return {f"taken {at} {to}": float(row[to]) for at, row in enumerate(counts) for to in range(classes)}


def confusion(sums: Mapping[str, float]) -> tuple[tuple[int, ...], ...]:
    """[class of the label, class of the answer] Records, of the sums of all chunks.

    >>> confusion({"taken 0 0": 3.0, "taken 0 1": 1.0, "taken 1 0": 0.0, "taken 1 1": 2.0})
    ((3, 1), (0, 2))
    """
    cells = {tuple(map(int, name.split()[1:])): int(count) for name, count in sums.items() if name.startswith("taken ")}
    classes = max((max(cell) for cell in cells), default=-1) + 1
    return tuple(tuple(cells.get((at, to), 0) for to in range(classes)) for at in range(classes))


def pairs(sums: Mapping[str, float]) -> tuple[tuple[float, float], ...]:
    """Label and answer of each record that was chosen, in the order of the records.

    >>> pairs({"label 0": 1.0, "answer 0": 1.5, "label 2": 3.0, "answer 2": 2.5})
    ((1.0, 1.5), (3.0, 2.5))
    """
    records = sorted(int(name.removeprefix("label ")) for name in sums if name.startswith("label "))
    return tuple((sums[f"label {at}"], sums[f"answer {at}"]) for at in records)
