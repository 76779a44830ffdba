"""How a teacher's answers are softened, so that a student learns from them more than the labels say.

A teacher that is sure of nearly every record answers labels: which wrong classes it finds more likely than others is in
digits that a loss does not see. A temperature divides its logits. Which one that takes depends on the teacher, so it is
chosen by its answers to the training records, which lie in a file before the training begins: the softened answers have
a set share of the entropy of a guess. The student's own logits are not divided: what it has to reach is small, so it is
near in as many steps as labels take, where logits of the teacher's size take several times as many. Sources: Hinton et
al., arXiv 1503.02531; a temperature for each of the two: Sun et al., arXiv 2403.01427.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from trueline.compress.derive.plan import DerivePlan
from trueline.compress.derive.taught import as_logits, read_answers

if TYPE_CHECKING:
    from trueline.bundle.signature import Array
    from trueline.compress.measure.records import ProgramRecords
    from trueline.runtime.session import Session

ENTROPY, MANY = 0.7, 10
"""That softened answers have on average, as a share of log(classes), but of at most `MANY` of them: so much of a guess
among thousands would leave the right one nothing."""
TEACHING = 0.9
"""The teacher's share of the loss, where its answers are softened."""
_VALUES = 2**22
"""Of the answers, by which a temperature is chosen."""
_HOTTEST = 1e6
_STEPS = 24
_NEAR, _LEAST = 1e-3, 1e-6
_TRIED = 32
"""Records by which is found out what the loss sees."""
_SIZES = (0.5, 2.0, 8.0)
"""Of logits by which is found out whether they decide between two classes."""
YesOrNo = Literal["", "logits", "probabilities"]


def soften(
    plan: DerivePlan, teacher: Session, records: ProgramRecords, loss: Callable[[Mapping[str, Array], Any], Any]
) -> DerivePlan:  # fmt: skip
    """`plan`, whose `answers` are written, with the axis of the classes, or with what tells two of them apart, their
    temperature and their share of the loss, if `loss`, of outputs by name and labels, is of classes. Raises what
    `loss` raises."""
    first = next(records.batches(_TRIED, _TRIED))
    outputs, name = teacher.run(first.inputs), teacher.signature.outputs[0].name

    def measure(found: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(loss({**outputs, name: found.numpy()}, first.labels))

    found = torch.from_numpy(outputs[name])
    kind = tell_yes_or_no(measure, found)
    classes = 0 if kind else find_class_axis(measure, found)
    if not kind and not classes:
        return plan
    answers = read_answers(Path(plan.answers))
    if kind:
        temperature = choose_temperature(_pair_logits(answers, kind), 1, ENTROPY)
    else:
        many = max(1.0, float(np.log(answers.shape[classes]) / np.log(MANY)))
        temperature = choose_temperature(answers, classes, ENTROPY / many)
    return msgspec.structs.replace(plan, classes=classes, yes_or_no=kind, temperature=temperature, share=TEACHING)


def tell_yes_or_no(loss: Callable[[torch.Tensor], torch.Tensor], outputs: torch.Tensor) -> YesOrNo:
    """What each element of `outputs` [records, ...] is, if it decides alone between two classes; empty: it does not.

    The cross entropy of a logit and of its negative add up to the same for either label, whatever weight that has. So
    for logits of one size and any signs these sums have one ratio to those of the formula, at every size.
    """
    kind: YesOrNo = "probabilities" if _is_probable(outputs) else "logits"
    if kind == "probabilities" and any(
        count > 1 and (outputs.sum(dim=axis) - 1).abs().max() < _NEAR
        for axis, count in enumerate(outputs.shape) if axis
    ):  # fmt: skip
        return ""  # of several classes, of which one is right
    signs = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0)).sign()

    def measure(logits: torch.Tensor) -> float:
        return float(loss(logits.sigmoid() if kind == "probabilities" else logits).double().mean())

    middle = measure(0 * signs)
    sums = [measure(size * signs) + measure(-size * signs) - 2 * middle for size in _SIZES]
    ratios = np.array(sums) / [size + 2 * np.log1p(np.exp(-size)) - 2 * np.log(2) for size in _SIZES]
    return kind if ratios.min() > 0 and np.ptp(ratios) < _NEAR * ratios.max() else ""


def _is_probable(outputs: torch.Tensor) -> bool:
    return bool(((outputs >= 0) & (outputs <= 1)).all())


def _pair_logits(answers: npt.NDArray[np.float32], kind: YesOrNo) -> npt.NDArray[np.float32]:
    """[decisions, 2] Logits of both classes, of some of the decisions in `answers`."""
    flat = answers.reshape(-1)
    picked = np.unique(np.linspace(0, len(flat) - 1, _VALUES).astype(np.int64))
    logits = as_logits(torch.from_numpy(np.array(flat[picked])), kind).numpy()
    return np.stack([logits, np.zeros_like(logits)], axis=1)


def find_class_axis(loss: Callable[[torch.Tensor], torch.Tensor], outputs: torch.Tensor) -> int:
    """The axis of `outputs` [records, ...] whose elements are logits of classes; 0: there is none, they are numbers.

    A softmax does not see what is added to all logits of a record, so neither does a loss of classes. Logarithms of
    probabilities are logits too, whatever their loss.
    """
    if _is_probable(outputs):  # a loss may refuse what is none
        return 0
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
