"""Distillation: a student is trained on the labels and on a teacher's answers, softened by a temperature.

The teacher, a bundle's program, answers every training record once, before the training; its answers lie in a file, by
record, so that an epoch costs what it costs without a teacher. Source: Hinton et al., arXiv 1503.02531.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch.nn import functional

from trueline import events, files
from trueline.data.source import Batch, Source, Unit
from trueline.errors import CaptureError

if TYPE_CHECKING:
    from trueline.compress.measure.records import ProgramRecords
    from trueline.data.order.permutation import Indices
    from trueline.runtime.session import Session

_HEAD, _BODY = "answers.json", "answers.f32"


class AnswersHead(msgspec.Struct, frozen=True, kw_only=True):
    """What the file of answers has: [records, *shape] float32, of output `output` of the bundle of digest `teacher`."""

    teacher: str
    records: str
    output: str
    shape: tuple[int, ...]


def write_answers(folder: Path, teacher: Session, records: ProgramRecords, digest: str) -> Path:
    """The teacher's first output for every record, in `folder`; what is there already stays. Raises CaptureError for an
    output that has no fixed shape, StorageError."""
    spec = teacher.signature.outputs[0]
    shape = spec.shape[1:]
    if not all(isinstance(size, int) for size in shape) or spec.dtype.kind != "f":
        raise CaptureError(
            f"output '{spec.name}' of the teacher has the shape {list(spec.shape)}: a student learns from one answer "
            "of a fixed size for each record"
        )
    head = AnswersHead(
        teacher=digest, records=records.source.fingerprint(), output=spec.name, shape=tuple(map(int, shape))
    )
    kept = folder / _HEAD
    if kept.is_file() and msgspec.json.decode(kept.read_bytes(), type=AnswersHead) == head:
        return folder
    with files.atomic_file(folder / _BODY) as body:
        done = 0
        for batch in records.batches():
            body.write(np.ascontiguousarray(teacher.run(batch.inputs)[spec.name], np.float32).tobytes())
            done += batch.count
            events.emit("teacher.advanced", done=done, total=records.count)
    files.write_atomic(kept, msgspec.json.encode(head))
    return folder


class TaughtSource:
    """The records of `source` with labels (label, teacher's answer)."""

    def __init__(self, source: Source, answers: str) -> None:
        head = msgspec.json.decode(Path(answers, _HEAD).read_bytes(), type=AnswersHead)
        self._source = source
        self._answers = np.memmap(Path(answers, _BODY), np.float32, "r", shape=(source.num_records, *head.shape))
        self._digest = f"{head.teacher}-{head.output}"

    @property
    def num_records(self) -> int:
        return self._source.num_records

    @property
    def units(self) -> Sequence[Unit]:
        return self._source.units

    def read(self, indices: Indices) -> Batch:
        batch = self._source.read(indices)
        return Batch(batch.inputs, (batch.labels, torch.from_numpy(np.array(self._answers[indices]))))

    def fingerprint(self) -> str:
        return files.sha256_bytes(f"{self._source.fingerprint()}|{self._digest}".encode())


def make_loss(loss: Callable[[Any, Any], Any], temperature: float, share: float) -> Callable[[Any, Any], Any]:
    """`loss` of the recipe for plain labels; for those of a TaughtSource, (1 - share) of it and `share` of the distance
    to the teacher: the divergence of softened classes, or the squared difference where there is one number a record."""

    def taught_loss(outputs: Any, labels: Any) -> Any:
        if not (isinstance(labels, tuple | list) and len(labels) == 2 and isinstance(labels[1], torch.Tensor)):
            return loss(outputs, labels)
        label, answers = labels
        first = next(leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
        if first.ndim > 1 and first.shape[-1] > 1:
            told = functional.log_softmax(answers.to(first) / temperature, dim=-1)
            said = functional.log_softmax(first / temperature, dim=-1)
            each = (told.exp() * (told - said)).sum(dim=-1).reshape(len(first), -1).mean(dim=1) * temperature**2
        else:
            each = ((first - answers.to(first).reshape(first.shape)) ** 2).reshape(len(first), -1).mean(dim=1)
        own = loss(outputs, label)
        distance = each if own.ndim else each.mean()
        return (1 - share) * own + share * distance

    return taught_loss
