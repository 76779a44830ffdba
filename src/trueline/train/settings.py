"""What a job is to do, as one frozen value in `JOB/job.json`: launcher, master and workers read the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from trueline import files
from trueline.errors import UsageError

Phase = Literal["before", "backward", "allreduced", "applied"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """An injected SIGKILL: incarnation `incarnation` of worker `slot` kills itself at the first step >= `step`.

    `phase` is where in the step: before it, while gradients are being reduced, after the allreduce and before the
    optimizer, or after the optimizer and before anybody is told.
    """

    step: int
    slot: int
    incarnation: int = 0
    phase: Phase = "backward"


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    recipe: str
    """Absolute path of the recipe, or `module:object`."""
    recipe_digest: str
    workers: int
    min_workers: int = 1
    epochs: int
    global_batch: int
    seed: int
    find_unused_parameters: bool = False
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: at the end of each epoch. The last step always has one."""
    faults: tuple[Fault, ...] = ()
    lease_s: float = 30.0
    max_failures: int = 3
    threads: int = 1
    """Intra-op threads of each worker."""


def save(settings: JobSettings, job_dir: Path) -> None:
    files.write_atomic(job_dir / "job.json", msgspec.json.format(msgspec.json.encode(settings), indent=1))


def load(job_dir: Path) -> JobSettings:
    """Raises UsageError when `job_dir` holds no job."""
    file = job_dir / "job.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=JobSettings)
    except FileNotFoundError as error:
        raise UsageError(
            f"{job_dir} holds no job: it has no job.json", hint="name the folder of an earlier job"
        ) from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{file} is not a job's settings: {error}") from error


def parse_workers(text: str) -> tuple[int, int]:
    """`"3"` or `"2:8"` as (min_workers, workers). Raises UsageError.

    >>> parse_workers("3"), parse_workers("2:8")
    ((1, 3), (2, 8))
    """
    low, colon, high = str(text).partition(":")
    try:
        numbers = (int(low), int(high)) if colon else (1, int(low))
    except ValueError:
        numbers = (0, 0)
    if not 1 <= numbers[0] <= numbers[1]:
        raise UsageError(f"'{text}' is no number of workers", hint="write 3, or 2:8 for at least two and at most eight")
    return numbers
