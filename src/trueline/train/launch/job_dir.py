"""A job's folder as every process finds it: who launches the job, how it ended, what happened.

    JOB/job.json        settings                 JOB/journal.sqlite   the master's log
    JOB/lock            held by the launcher     JOB/events.jsonl     what happened, one JSON object a line
    JOB/launcher.json   pid, start, end, why     JOB/logs/            of master, agent, launcher and workers
    JOB/master.json     address, page, pid       JOB/summary.json     of a finished job

The lock is an open-file-description lock (fcntl(2)): the kernel gives it back when the launcher ends, by whatever
means, and asking for it disturbs nobody. A pid alone would be somebody else's one day.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from trueline import events, files
from trueline.errors import UsageError

_FLOCK = "hhqqi4x"
"""struct flock: type, whence, start, length, pid (0 for these locks)."""
Outcome = Literal["", "finished", "failed", "stopped"]


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The last launch of a job. Times are seconds since 1970; `outcome` is empty until its launcher has ended."""

    pid: int
    started: float
    ended: float = 0.0
    outcome: Outcome = ""
    why: str = ""
    scratch: str = ""
    """A folder of its own, which its processes name on their command lines."""


def hold(job_dir: Path) -> int:
    """Takes the job's lock until the descriptor that is returned is closed. Raises UsageError when it is taken."""
    handle = os.open(job_dir / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except (BlockingIOError, PermissionError) as error:
        os.close(handle)
        raise UsageError(
            f"the job in {job_dir} is running", hint=f"follow it with `trueline logs -f {job_dir}`"
        ) from error
    return handle


def held(job_dir: Path) -> bool:
    """True while a launcher of this job lives."""
    try:
        handle = os.open(job_dir / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        found: int = struct.unpack(_FLOCK, fcntl.fcntl(handle, fcntl.F_OFD_GETLK, asked))[0]
        return found != fcntl.F_UNLCK
    finally:
        os.close(handle)


def write_launch(job_dir: Path, launch: Launch) -> None:
    files.write_atomic(job_dir / "launcher.json", msgspec.json.encode(launch))


def read_launch(job_dir: Path) -> Launch | None:
    """None for a job that was never launched."""
    try:
        return msgspec.json.decode((job_dir / "launcher.json").read_bytes(), type=Launch)
    except (OSError, msgspec.DecodeError):
        return None


def record(job_dir: Path, name: str, /, **fields: events.Field) -> None:
    """Appends an event of the launcher to the job's events, beside the master's. A full disk does not end the job."""
    line = json.dumps({"at": time.time(), "seq": 0, "name": name, "fields": fields}) + "\n"
    with contextlib.suppress(OSError), (job_dir / "events.jsonl").open("a") as file:
        file.write(line)


def events_from(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, events.Field], float]]:
    """(name, fields, at) of the lines of events.jsonl; a torn line is left out."""
    for line in lines:
        try:
            event = json.loads(line)
            yield event["name"], event["fields"], event["at"]
        except (ValueError, KeyError, TypeError):
            continue
