"""The training of a derived recipe, within a time limit.

A job that would end too late is halted with a checkpoint, at once where its pace shows that, else at the limit. The
same call with a later limit continues it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueline import events
from trueline.capture.time_limit import OutOfTime
from trueline.errors import JobStopped
from trueline.storage.location import Location, parse_location
from trueline.train.api import JobSummary, TrainResult, prepare
from trueline.train.job_dir import JobDir
from trueline.train.launch.launcher import LocalJob
from trueline.train.monitor.notebook import progress

TRIED = 1 / 4
"""Of the time for a training, after which its pace is believed."""
LATE = 1.5
"""Times the time that is left: a training that would take as much longer is not waited for."""
_STEPS = 3
"""That a pace takes at least."""
_CAPTURE_MINUTES = 1.0
_HINT = "the same command with more --minutes continues it"


@dataclass(frozen=True, slots=True)
class Deadline:
    """What is trained ends before `ends` on `clock`, or is left out."""

    ends: float = math.inf
    clock: Callable[[], float] = time.monotonic

    @property
    def left_s(self) -> float:
        return self.ends - self.clock()

    @property
    def minutes(self) -> float | None:
        """For the capture of what was trained in time."""
        return max(_CAPTURE_MINUTES, self.left_s / 60) if math.isfinite(self.ends) else None

    def check(self, what: str) -> None:
        """Raises OutOfTime once the time is over."""
        if self.left_s <= 0:
            raise OutOfTime(f"not trained: the time was over before {what}", hint=_HINT)


class TrainingPace:
    """Tells by the steps of a job whether it ends in time."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._allowed_s = deadline.left_s
        self._first: tuple[int, float] | None = None

    def judge(self, step: int, total: int) -> str:
        """Why the job is to be halted after step `step` (from 0) of `total`; empty: it continues."""
        now, left = self._deadline.clock(), self._deadline.left_s
        if self._first is None:  # after what starts a job
            self._first = step, now
        if left <= 0 and step + 1 < total:
            return f"the time was over after {step + 1} of {total} steps"
        done, seconds = step - self._first[0], now - self._first[1]
        if not 0 < left < math.inf or done < _STEPS or left > (1 - TRIED) * self._allowed_s:
            return ""
        wanted = seconds / done * (total - step - 1)
        if wanted < LATE * left:
            return ""
        return (
            f"after {step + 1} of {total} steps it wanted {_minutes(wanted)} more, of {_minutes(left)} that were left"
        )


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.2g} min"


def train_in_time(recipe: Path, job: Path, deadline: Deadline, workers: str) -> Location:
    """The checkpoint that the job in `job` ends with: it is begun, continued, or has ended before. Raises OutOfTime for
    one that does not end in time, and what training raises."""
    finished = JobDir(job).summary
    if finished.is_file():
        return _result(job, json.loads(finished.read_bytes()))
    deadline.check("its job began")
    resume = JobDir(job).settings.is_file()
    folder = prepare(recipe, workers=None if resume else workers, job_dir=job, resume=resume)
    pace, why = TrainingPace(deadline), ""

    def hear(name: str, fields: dict[str, events.Field]) -> None:
        nonlocal why
        if name == "step.applied" and not why:
            why = pace.judge(int(fields["step"] or 0), int(fields["total"] or 0))
            if why:
                running.halt(why)

    try:
        with progress(), LocalJob(folder) as running, events.listening(hear):
            return _result(job, running.run())
    except JobStopped as stopped:
        if not why:
            raise
        raise OutOfTime(f"not trained to its end: {why}", hint=_HINT) from stopped


def _result(job: Path, facts: dict[str, Any]) -> Location:
    return TrainResult(checkpoint=parse_location(facts["checkpoint"]), job_dir=job, summary=JobSummary(facts)).chosen
