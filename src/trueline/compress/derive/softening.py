"""How a teacher's answers are softened, so that a student learns from them more than the labels say.

A teacher that is sure of nearly every record answers labels: which wrong classes it finds more likely than others is in
digits that a loss does not see. A temperature divides its logits. Which one that takes depends on the teacher, so it is
chosen by its answers to the training records, which lie in a file before the training begins: the softened answers have
a set share of the entropy of a guess. A student that is large enough to follow its teacher learns most from nearly all
of what it knows, at a high temperature; a far smaller one from a part of it. Source: Hinton et al., arXiv 1503.02531.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from trueline.compress.derive.plan import DerivePlan
from trueline.compress.derive.taught import read_answers

if TYPE_CHECKING:
    from trueline.bundle.signature import Array
    from trueline.compress.measure.records import ProgramRecords
    from trueline.runtime.session import Session

ABLE = 1 / 5
"""Of the teacher's parameters, from which on a student follows it."""
TO_FOLLOW, TO_LEAN_ON = (0.97, 0.9), (0.7, 0.5)
"""For such a student, and for a smaller one: the entropy that softened answers have on average, as a share of
log(classes), and the teacher's share of the loss."""
_VALUES = 2**22
"""Of the answers, by which a temperature is chosen."""
_HOTTEST = 1e6
_STEPS = 24
_NEAR, _LEAST = 1e-3, 1e-6
_TRIED = 32
"""Records by which is found out what the loss sees."""


def soften(
    plan: DerivePlan, teacher: Session, records: ProgramRecords, loss: Callable[[Mapping[str, Array], Any], Any],
    size: float,
) -> DerivePlan:  # fmt: skip
    """`plan`, whose `answers` are written, with the axis of the classes, their temperature and their share of the loss,
    if `loss`, of outputs by name and labels, is of classes. `size`: the student's parameters, as a share of the
    teacher's. Raises what `loss` raises."""
    first = next(records.batches(_TRIED, _TRIED))
    outputs, name = teacher.run(first.inputs), teacher.signature.outputs[0].name

    def measure(found: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(loss({**outputs, name: found.numpy()}, first.labels))

    classes = find_class_axis(measure, torch.from_numpy(outputs[name]))
    if not classes:
        return plan
    entropy, share = TO_FOLLOW if size >= ABLE else TO_LEAN_ON
    temperature = choose_temperature(read_answers(Path(plan.answers)), classes, entropy)
    return msgspec.structs.replace(plan, classes=classes, temperature=temperature, share=share)


def find_class_axis(loss: Callable[[torch.Tensor], torch.Tensor], outputs: torch.Tensor) -> int:
    """The axis of `outputs` [records, ...] whose elements are logits of classes; 0: there is none, they are numbers.

    A softmax does not see what is added to all logits of a record, so neither does a loss of classes. Logarithms of
    probabilities are logits too, whatever their loss.
    """
    axes = [axis for axis in (1, outputs.ndim - 1) if 0 < axis < outputs.ndim and outputs.shape[axis] > 1]
    draw, before = torch.Generator().manual_seed(0), loss(outputs).double().mean()
    size = outputs.std().clamp_min(_LEAST)
    changed = abs(loss(outputs + size * torch.randn(outputs.shape, generator=draw)).double().mean() - before)
    for axis in dict.fromkeys(axes):
        if outputs.logsumexp(dim=axis).abs().max() < _NEAR:
            return axis
        shape = [1 if at == axis else count for at, count in enumerate(outputs.shape)]
        moved = loss(outputs + size * torch.randn(shape, generator=draw)).double().mean()
        if abs(moved - before) < _NEAR * changed:
            return axis
    return 0


def choose_temperature(answers: npt.NDArray[np.float32], axis: int, entropy: float) -> float:
    """The temperature, of two digits, at which the classes along `axis` of `answers` [records, ...] have the share
    `entropy` of the largest possible entropy on average; 1 where they are as soft as that already."""
    classes = answers.shape[axis]
    records = max(1, _VALUES // max(1, answers[0].size))
    picked = np.unique(np.linspace(0, len(answers) - 1, records).astype(np.int64))
    logits = torch.from_numpy(np.moveaxis(np.array(answers[picked]), axis, -1).reshape(-1, classes))
    low, high, wanted = 1.0, _HOTTEST, entropy * float(np.log(classes))
    if _measure_entropy(logits, low) >= wanted:
        return low
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _measure_entropy(logits, middle) < wanted else (low, middle)
    return float(f"{high:.2g}")


def _measure_entropy(logits: torch.Tensor, temperature: float) -> float:
    """The mean entropy of rows of logits, in nats."""
    told = torch.log_softmax(logits / temperature, dim=-1)
    return float(-(told.exp() * told).sum(dim=-1).mean())
