"""Distillation: a student is trained on the labels and on a teacher's answers, softened by a temperature.

The teacher, a bundle's program, answers every training record once, before the training; its answers lie in a file, by
record, so that an epoch costs what it costs without a teacher. Outputs inside of the teacher's eager model, by name,
lie beside them. Source: Hinton et al., arXiv 1503.02531.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from trueline import events, files
from trueline.compress.derive.features import FeatureWatch, watch_outputs
from trueline.compress.measure.records import CHUNK
from trueline.data.source import Batch, Source, Unit
from trueline.errors import CaptureError, RecipeError, UsageError, closest
from trueline.recipe.eager_mode import as_trained
from trueline.train.worker.measure import call_model

if TYPE_CHECKING:
    from trueline.compress.derive.plan import DerivePlan
    from trueline.compress.measure.records import ProgramRecords
    from trueline.data.order.permutation import Indices
    from trueline.recipe.contract import Recipe
    from trueline.runtime.session import Session

_HEAD, _BODY = "answers.json", "answers.f32"
_SUREST = 1e-7
"""From 0 or 1, of a probability: float32 has few numbers that are nearer to 1."""
Distance = Callable[[Any, torch.Tensor], torch.Tensor]
"""Of a student's outputs from the teacher's answers to the same records: one number, or one for each record."""


class AnswersHead(msgspec.Struct, frozen=True, kw_only=True):
    """What the file of answers has: [records, *shape] float32, of output `output` of the bundle of digest `teacher`."""

    teacher: str
    records: str
    output: str
    shape: tuple[int, ...]
    features: list[tuple[tuple[int, ...], float]] = []
    """Shape for a record, and variance, of the outputs of the teacher's submodules; the Nth lies in feature-N.f32."""


@dataclass(frozen=True, slots=True)
class Insides:
    """The teacher's eager model, and the submodules whose outputs are wanted."""

    model: torch.nn.Module
    names: Sequence[str]


def write_answers(
    folder: Path, teacher: Session, records: ProgramRecords, digest: str, insides: Insides | None = None,
    check: Callable[[str], None] = lambda before: None,
) -> Path:  # fmt: skip
    """The teacher's first output for every record, in `folder`; what is there already stays. `check`, of what the time
    may be over before, is called between batches. Raises CaptureError for an output that has no fixed shape,
    StorageError, UsageError for a submodule that is not there, and what `check` raises."""
    spec = teacher.signature.outputs[0]
    shape = spec.shape[1:]
    if not all(isinstance(size, int) for size in shape) or spec.dtype.kind != "f":
        raise CaptureError(
            f"output '{spec.name}' of the teacher has the shape {list(spec.shape)}: a student learns from one answer "
            "of a fixed size for each record"
        )
    head = AnswersHead(
        teacher=digest, records=records.source.fingerprint(), output=spec.name, shape=tuple(map(int, shape)),
        features=_write_insides(folder, insides, records) if insides is not None else [],
    )  # fmt: skip
    kept = folder / _HEAD
    if kept.is_file() and msgspec.json.decode(kept.read_bytes(), type=AnswersHead) == head:
        return folder
    with files.atomic_file(folder / _BODY) as body:
        done = 0
        for batch in records.batches():
            body.write(np.ascontiguousarray(teacher.run(batch.inputs)[spec.name], np.float32).tobytes())
            done += batch.count
            if done < records.count:
                check(f"the teacher had answered more than {done} of {records.count} records")
            events.emit("teacher.advanced", done=done, total=records.count)
    files.write_atomic(kept, msgspec.json.encode(head))
    return folder


def _write_insides(folder: Path, insides: Insides, records: ProgramRecords) -> list[tuple[tuple[int, ...], float]]:
    seen: dict[str, torch.Tensor] = {}
    watch_outputs(insides.model, insides.names, seen)
    shapes: dict[str, tuple[int, ...]] = {}
    sums = np.zeros((len(insides.names), 3))
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened, torch.no_grad(), as_trained():
        bodies = [opened.enter_context(files.atomic_file(folder / _feature(at))) for at in range(len(insides.names))]
        for start in range(0, records.count, CHUNK):
            stop = min(start + CHUNK, records.count)
            call_model(insides.model, records.source.read(np.arange(start, stop, dtype=np.int64)).inputs)
            for at, (name, body) in enumerate(zip(insides.names, bodies, strict=True)):
                array = seen[name].float().numpy()
                if len(array) != stop - start or shapes.setdefault(name, array.shape[1:]) != array.shape[1:]:
                    raise CaptureError(f"'{name}' of the teacher returns no output of one size for each record")
                body.write(np.ascontiguousarray(array).tobytes())
                exact = array.astype(np.float64)
                sums[at] += exact.size, exact.sum(), np.square(exact).sum()
            events.emit("teacher.advanced", done=stop, total=records.count)
    variances = [float(squares / count - (total / count) ** 2) for count, total, squares in sums]
    return [(shapes[name], variance) for name, variance in zip(insides.names, variances, strict=True)]


def read_answers(folder: Path) -> npt.NDArray[np.float32]:
    """[records, *shape], as they lie in the file."""
    shape = _read_head(str(folder)).shape
    return np.memmap(folder / _BODY, np.float32, "r").reshape(-1, *shape)


def read_variances(folder: str) -> list[float]:
    """Of the outputs inside the teacher, in their order."""
    return [variance for _, variance in _read_head(folder).features]


def _read_head(folder: str) -> AnswersHead:
    return msgspec.json.decode(Path(folder, _HEAD).read_bytes(), type=AnswersHead)


def _feature(at: int) -> str:
    return f"feature-{at}.f32"


class TaughtSource:
    """The records of `source` with labels (label, teacher's answer, its outputs inside)."""

    def __init__(self, source: Source, answers: str) -> None:
        head = _read_head(answers)
        self._source = source
        self._answers = np.memmap(Path(answers, _BODY), np.float32, "r", shape=(source.num_records, *head.shape))
        self._features = [
            np.memmap(Path(answers, _feature(at)), np.float32, "r", shape=(source.num_records, *shape))
            for at, (shape, _) in enumerate(head.features)
        ]
        self._digest = "-".join([head.teacher, head.output, *map(str, head.features)])

    @property
    def num_records(self) -> int:
        return self._source.num_records

    @property
    def units(self) -> Sequence[Unit]:
        return self._source.units

    def read(self, indices: Indices) -> Batch:
        batch = self._source.read(indices)
        told = [torch.from_numpy(np.array(one[indices])) for one in (self._answers, *self._features)]
        return Batch(batch.inputs, (batch.labels, *told))

    def fingerprint(self) -> str:
        return files.sha256_bytes(f"{self._source.fingerprint()}|{self._digest}".encode())


def find_distance(recipe: Recipe, name: str) -> Distance:
    """The function `name` beside the blanks of `recipe`. Raises UsageError."""
    modules = {getattr(blank, "__module__", None) for blank in (recipe.loss, recipe.model, recipe.dataset)}
    known: dict[str, Any] = {}
    for module in modules & sys.modules.keys():
        known |= {key: value for key, value in vars(sys.modules[str(module)]).items() if callable(value)}
    if name in known:
        return cast(Distance, known[name])
    near = closest(name, known)
    raise UsageError(
        f"the student's recipe '{recipe.name}' has no function '{name}', by which it is to be taught",
        hint=f"did you mean '{near}'?" if near else f"def {name}(outputs, answers): one distance for each record",
    )


def make_loss(
    loss: Callable[[Any, Any], Any], plan: DerivePlan, watch: FeatureWatch | None = None,
    distance: Distance | None = None,
) -> Callable[[Any, Any], Any]:  # fmt: skip
    """`loss` of the recipe for plain labels; for those of a TaughtSource, (1 - plan.share) of it and the share of the
    distance to the teacher: `distance`, else the divergence of classes, two or more, from answers at the plan's
    temperature, or the squared difference of numbers; and the distance of the outputs inside that `watch` has seen."""
    parts = 2 + len(watch.matches if watch is not None else ())

    def taught_loss(outputs: Any, labels: Any) -> Any:
        if not (isinstance(labels, tuple | list) and len(labels) == parts and isinstance(labels[1], torch.Tensor)):
            return loss(outputs, labels)
        label, answers, *inside = labels
        first = next(leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
        if distance is not None:
            each = _check_distance(distance(outputs, answers.to(first)), len(first))
        else:
            each = _measure_apart(plan, first, answers.to(first))
        if watch is not None and inside:
            each = each + watch.measure_distance(inside).to(each)
        own = loss(outputs, label)
        return (1 - plan.share) * own + plan.share * (each if own.ndim else each.mean())

    return taught_loss


def _measure_apart(plan: DerivePlan, outputs: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """[records] How far the student's outputs [records, ...] are from the teacher's answers to the same records, which
    alone are softened."""
    if plan.yes_or_no:
        said = as_logits(outputs, plan.yes_or_no)
        told = as_logits(answers, plan.yes_or_no).reshape(said.shape) / plan.temperature
        sure, apart = (
            functional.binary_cross_entropy_with_logits(one, told.sigmoid(), reduction="none") for one in (told, said)
        )
        return (apart - sure).reshape(len(outputs), -1).mean(dim=1)
    if plan.classes:
        told, said = (functional.log_softmax(one, dim=plan.classes) for one in (answers / plan.temperature, outputs))
        apart = (told.exp() * (told - said)).sum(dim=plan.classes)
        return apart.reshape(len(outputs), -1).mean(dim=1)
    return (outputs - answers.reshape(outputs.shape)).square().reshape(len(outputs), -1).mean(dim=1)


def as_logits(values: torch.Tensor, yes_or_no: str) -> torch.Tensor:
    """Logits of decisions between two classes, whose probabilities or logits are `values`."""
    return torch.logit(values, eps=_SUREST) if yes_or_no == "probabilities" else values


def _check_distance(found: Any, records: int) -> torch.Tensor:
    if not isinstance(found, torch.Tensor) or found.shape not in ((), (records,)):
        what = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise RecipeError(
            f"the distance to the teacher's answers is {what}, expected a tensor: one number, or one for each of "
            f"{records} records",
            hint="take the mean over all axes but the first",
        )
    return found
