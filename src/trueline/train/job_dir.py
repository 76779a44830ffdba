"""A job's folder: what each process of the job, and every operator, finds there. The only module that knows its files.

    JOB/job.json        settings                 JOB/journal.sqlite   the master's log
    JOB/lock            held by the launcher     JOB/events.jsonl     what happened, one JSON object a line
    JOB/launcher.json   pid, start, end, why     JOB/logs/            of master, agent, launcher and workers
    JOB/master.json     address, page, pid       JOB/summary.json     of a finished job
    JOB/secret          while the job runs       JOB/checkpoints/     unless they are written elsewhere
    JOB/faults/         those carried out        JOB/page.html        the live page, and its token
    JOB/master.lock     held by the master           JOB/loss.json        how the loss reduces, as it was tried
    JOB/weights.safetensors   a copy of those that the training starts from
    JOB/columns.json    the recipe's fitted columns        JOB/records.json   fingerprint of the records of a launch
    JOB/trial.json      what is tried before the first step, meanwhile
    JOB/hosts/          of a launch that other hosts may join: certificate and key, token, files that travel, hosts
    JOB/events.out.tfevents.0.trueline   the curves, for TensorBoard

The lock is an open-file-description lock (fcntl(2)): the kernel releases it when the launcher ends, by whatever means,
and a query does not disturb the holder. A pid alone would belong to another process one day.
"""

import contextlib
import fcntl
import json
import os
import secrets
import struct
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from trueline import events, files
from trueline.errors import StorageError, TrainError, UsageError
from trueline.full_disk import PatientWriter, append_lines

_FLOCK = "hhqqi4x"  # struct flock: type, base, start, length, pid (0 for these locks)
_WHOLE_FILE = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
Outcome = Literal["", "finished", "failed", "stopped"]
_Record = TypeVar("_Record")


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The last launch of a job. Times are seconds since 1970; `outcome` is empty until its launcher has ended."""

    pid: int
    started: float
    ended: float = 0.0
    outcome: Outcome = ""
    why: str = ""
    scratch: str = ""  # a folder that the processes of this launch name on their command lines


class MasterRecord(msgspec.Struct, frozen=True, kw_only=True):
    address: str = ""
    pid: int = 0
    page: str = ""  # URL of the live page, with its token; empty: there is none


class JobDir:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = path / "job.json"
        self.journal = path / "journal.sqlite"
        self.events = path / "events.jsonl"
        self.summary = path / "summary.json"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.faults = path / "faults"
        self.loss = path / "loss.json"
        self.records = path / "records.json"
        self.trial = path / "trial.json"
        self.weights = path / "weights.safetensors"
        self.columns = path / "columns.json"
        self.hosts = path / "hosts"
        self.page = path / "page.html"
        self.page_token = path / "page.token"
        self._lock = path / "lock"
        self._launch = path / "launcher.json"
        self._master = path / "master.json"
        self._secret = path / "secret"
        self._master_lock = path / "master.lock"

    def log(self, name: str) -> Path:
        """The file that takes the output of a process: `master`, `agent`, `launcher` or a worker's ref."""
        return self.logs / f"{name}.log"

    def hold(self) -> int:
        """Takes the lock until the returned descriptor is closed. Raises UsageError when it is taken."""
        handle = _lock_file(self._lock)
        if handle is None:
            raise self._running()
        return handle

    def hold_master(self) -> int:
        """Takes the lock of the one master that may serve the job, until the returned descriptor is closed.

        Masters of a launch share a port, so a port in use does not keep a second one from serving. Raises TrainError.
        """
        handle = _lock_file(self._master_lock)
        if handle is None:
            raise TrainError(
                f"another master of the job in {self.path} still runs",
                hint="the launcher tries again; if that does not help, stop the job and resume it",
            )
        return handle

    def is_held(self) -> bool:
        """Whether a launcher of this job lives."""
        try:
            handle = os.open(self._lock, os.O_RDONLY)
        except OSError:
            return False
        try:
            kind: int = struct.unpack(_FLOCK, fcntl.fcntl(handle, fcntl.F_OFD_GETLK, _WHOLE_FILE))[0]
            return kind != fcntl.F_UNLCK
        finally:
            os.close(handle)

    def expect_idle(self) -> None:
        """Raises UsageError while a launcher of this job lives."""
        if self.is_held():
            raise self._running()

    def _running(self) -> UsageError:
        return UsageError(f"the job in {self.path} is running", hint=f"follow it with `trueline logs -f {self.path}`")

    def write_launch(self, launch: LaunchRecord) -> None:
        files.write_atomic(self._launch, msgspec.json.encode(launch))

    def read_launch(self) -> LaunchRecord | None:
        """None for a job that was never launched."""
        return _read(self._launch, LaunchRecord)

    def begin_launch(self) -> None:
        """Makes the folder of the logs and the secret of a launch, which has no master yet. Raises StorageError."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            for of_last in (self._master, self.records, self.trial):
                of_last.unlink(missing_ok=True)
        except OSError as error:
            raise files.storage_error(error, self.path) from error
        files.write_atomic(self._secret, secrets.token_urlsafe(32).encode(), mode=0o600)

    def begin_succession(self, secret: str) -> None:
        """As `begin_launch`, on a host whose master succeeds that of another: the job has begun, and has a secret."""
        self.logs.mkdir(parents=True, exist_ok=True)
        files.write_atomic(self._secret, secret.encode(), mode=0o600)
        self.write_master(MasterRecord())

    def read_secret(self) -> str:
        """Raises OSError when the job does not run."""
        return self._secret.read_text()

    def remove_secret(self) -> None:
        """Hides no error that ended the job: its folder may be read-only by now."""
        with contextlib.suppress(OSError):
            self._secret.unlink()

    def write_master(self, master: MasterRecord) -> None:
        files.write_atomic(self._master, msgspec.json.encode(master), mode=0o600)

    def read_master(self) -> MasterRecord | None:
        """The master of the last launch; None before it listens."""
        return _read(self._master, MasterRecord)

    def read_loss(self) -> dict[str, Any]:
        """How the loss reduces, as the first worker tried it; empty before that."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(self.loss.read_bytes()))
        return {}

    def record(self, name: str, /, **fields: events.Field) -> None:
        """Appends an event of the launcher or of a loop, beside the master's; on a full disk once there is room."""
        line = json.dumps({"at": time.time(), "seq": 0, "name": name, "fields": fields}) + "\n"
        writer = _writers.setdefault(self.events, PatientWriter(partial(append_lines, self.events)))
        writer.write(line.encode())


_writers: dict[Path, PatientWriter] = {}
"""Of this process, by the file of events."""


def current_job() -> Path | None:
    """The folder of the job that this process is a worker of."""
    folder = os.environ.get("TRUELINE_JOB")
    return Path(folder) if folder else None


def note_trial(what: str) -> None:
    """Notes, for the launcher, how the first worker tries the loss before its first step."""
    folder = current_job()
    if folder is None or not os.environ.get("TRUELINE_REF", "").startswith("worker-0."):
        return
    with contextlib.suppress(StorageError):  # it is a line of progress
        files.write_atomic(JobDir(folder).trial, json.dumps({"what": what}).encode(), durable=False)


def _lock_file(path: Path) -> int | None:
    """Locks a file until the returned descriptor is closed; None when it is locked. Raises StorageError."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise files.storage_error(error, path) from error
    try:
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, _WHOLE_FILE)
    except (BlockingIOError, PermissionError):
        os.close(handle)
        return None
    return handle


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def parse_events(lines: Iterable[str | bytes]) -> Iterator[tuple[str, dict[str, events.Field], float]]:
    """(name, fields, at) of the lines of events.jsonl; a torn line is left out."""
    for line in lines:
        try:
            event = json.loads(line)
            parsed = str(event["name"]), dict(event["fields"]), float(event["at"])
        except (ValueError, KeyError, TypeError):
            continue
        yield parsed
