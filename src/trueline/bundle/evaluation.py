"""What `trueline evaluate` keeps in a job's folder, and a bundle's report shows. No torch.

JOB/evaluation.json     of the last evaluation of a checkpoint of the job
"""

from pathlib import Path

import msgspec

from trueline import files
from trueline.errors import StorageError

FILE = "evaluation.json"


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Means over all `records`, and what they hide: which class was taken for which, or how far numbers are off."""

    records: int
    mode: str
    """The records: those of the recipe's `dataset(mode)`."""
    loss: float | None
    """None: not a finite number."""
    metrics: dict[str, float | None] = {}
    checkpoint: str = ""
    checkpoint_digest: str = ""
    classes: tuple[str, ...] = ()
    """Names of the classes; empty: only their indices are known."""
    confusion: tuple[tuple[int, ...], ...] = ()
    """[class of the label, class of the answer] Records; empty: the recipe is no classification."""
    pairs: tuple[tuple[float, float], ...] = ()
    """Label and answer of evenly spaced records; empty: the recipe is no regression of one number."""

    def class_name(self, index: int) -> str:
        return self.classes[index] if index < len(self.classes) else str(index)


def write(folder: Path, record: EvaluationRecord) -> None:
    """Raises StorageError."""
    files.write_atomic(folder / FILE, msgspec.json.encode(record))


def read(folder: Path) -> EvaluationRecord | None:
    """None if no checkpoint of the job in `folder` was evaluated. Raises StorageError for a file of another form."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=EvaluationRecord)
    except msgspec.MsgspecError as error:
        raise StorageError(
            f"{path} is no evaluation of this version: {error}", hint="write it again: trueline evaluate RECIPE JOB"
        ) from None
