"""The Scheduler: starts and ends processes of a job on machines that it has. Everything elastic is above it.

Laws, each tested in `tests/conformance/scheduler.py`: a scheduler never restarts anything; `submit` and `cancel` are
idempotent by name; a name is RUNNING after QUEUED and never comes back after ENDED; a queued submission has a reason in
words; the log of an ended process stays readable. What a scheduler lists is a hint: the master's lease decides what is
alive. Calls are synchronous and take up to some seconds, so they are made outside of event loops.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A process that lends room for `slots` workers to a job. `name` is unique for all time: JOB.LAUNCH.head or
    JOB.LAUNCH.host-N."""

    name: str
    command: tuple[str, ...]
    env: dict[str, str] = {}
    """Added to the environment that the scheduler gives."""
    slots: int = 1
    memory_mb: int = 0
    """What is reserved; 0: the scheduler's default."""
    log: str
    """File for stdout and stderr, where the scheduler writes files."""
    priority: int = 0
    gang: int = 0
    """Of a head: slots that its job needs to begin, its own included. For schedulers without a queue of their own."""

    @property
    def job(self) -> str:
        return job_of(self.name)


def make_name(job: str, launch: int, role: str) -> str:
    """
    >>> make_name("digits-1", 2, "host-3")
    'digits-1.2.host-3'
    """
    return f"{job}.{launch}.{role}"


def make_group(job: str, launch: int) -> str:
    """What `Scheduler.list` takes: the submissions of one launch.

    >>> make_group("digits-1", 2)
    'digits-1.2'
    """
    return f"{job}.{launch}"


def job_of(name: str) -> str:
    """
    >>> job_of("digits-1.2.host-3")
    'digits-1.2'
    """
    return name.rpartition(".")[0]


def role_of(name: str) -> str:
    """
    >>> role_of("digits-1.2.host-3")
    'host-3'
    """
    return name.rpartition(".")[2]


class SubmissionState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class SubmissionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheduler says of a submission. `reason`: why it waits, or how it ended, in the user's words."""

    name: str
    state: SubmissionState
    reason: str = ""
    node: str = ""
    code: int | None = None
    """Exit code, where the scheduler knows it."""


class Scheduler(Protocol):
    def submit(self, submission: Submission) -> str:
        """Submits unless the name is known; returns how the scheduler calls it. Raises UsageError if it refuses this
        submission for good, EngineAway."""
        ...

    def cancel(self, name: str, *, grace: bool = True) -> None:
        """Ends it: by SIGTERM first, with the time that the scheduler gives for that, or at once by SIGKILL. An unknown
        name is no error. Raises EngineAway."""
        ...

    def list(self, job: str) -> Sequence[SubmissionReport]:
        """The submissions of a launch (`JOB.LAUNCH`). Ended ones may be forgotten after some minutes. Raises
        EngineAway."""
        ...

    def read_log(self, name: str) -> bytes:
        """What it has written so far; empty before. Raises EngineAway."""
        ...
