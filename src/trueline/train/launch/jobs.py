"""Jobs from outside, for operators: list, status, scale, halt.

A running job's master answers; of a dead job the journal is read. No job needs this module to run. Torch-free.
"""

import contextlib
import json
import math
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import grpc

from trueline import events
from trueline.errors import TrainError, UsageError, closest, join_names
from trueline.train import settings as job_settings
from trueline.train.job_dir import JobDir, LaunchRecord
from trueline.train.reasons import describe_group, group_by_reason
from trueline.wire import train_pb2 as pb
from trueline.wire import train_pb2_grpc as pb_grpc

State = Literal["prepared", "running", "finished", "failed", "stopped", "dead", "damaged"]
"""`dead`: its launcher has gone without an end (SIGKILL, power); `damaged`: its job.json cannot be read."""
RUNS = Path("runs")
END_S = 30.0
"""A launcher that takes longer to end its processes hangs; usually that takes less than a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job by its folder. `step`: applied steps; `checkpoint`: steps in the newest checkpoint."""

    folder: Path
    name: str
    state: State
    why: str
    step: int = 0
    total: int = 0
    workers: int = 0
    loss: float | None = None
    checkpoint: int = 0
    started: float

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"folder": str(self.folder)}


def find_job(given: str | Path, runs: Path = RUNS) -> Path:
    """The folder of the job that `given` names: a path, or a name under `runs`. Raises UsageError."""
    for folder in (Path(given), runs / given):
        if JobDir(folder).settings.is_file():
            return folder.resolve()
    names = [folder.name for folder in _folders(runs)]
    near = closest(str(given), names)
    raise UsageError(
        f"there is no job '{given}' (in {runs}: {join_names(names)})",
        hint=f"did you mean '{near}'?" if near else "name the job's folder; `trueline jobs` lists those under ./runs",
    )


def _folders(runs: Path) -> list[Path]:
    return sorted((file.parent for file in runs.glob("*/job.json")), key=lambda path: path.stat().st_mtime)


def list_jobs(runs: Path = RUNS) -> list[JobRecord]:
    """The jobs under `runs`, the one that changed last at the end."""
    jobs = []
    for folder in _folders(runs):
        try:
            jobs.append(read_job(folder))
        except UsageError as error:  # it does not hide the other jobs
            at, why = JobDir(folder).settings.stat().st_mtime, error.message
            jobs.append(JobRecord(folder=folder, name=folder.name, state="damaged", why=why, started=at))
    return jobs


def read_job(folder: Path) -> JobRecord:
    """The job in `folder`, as it is on the disk. Raises UsageError when there is none."""
    settings = job_settings.load(folder)
    launch = JobDir(folder).read_launch()
    state, why = _state(folder, launch)
    last = _read_journal(folder)
    commit, view, saved = last.get("COMMIT", {}), last.get("VIEW", {}), last.get("CKPT", {}).get("step", -1)
    return JobRecord(
        folder=folder, name=settings.name, state=state, why=why,
        step=max(last.get("TRUNCATE", {}).get("steps", commit.get("step", -1) + 1), saved),
        total=last.get("FACTS", {}).get("total_steps", 0),
        workers=len(view.get("members", ())) if state == "running" else 0,
        loss=commit.get("loss"), checkpoint=max(saved, 0),
        started=launch.started if launch is not None else JobDir(folder).settings.stat().st_mtime,
    )  # fmt: skip


def _state(folder: Path, launch: LaunchRecord | None) -> tuple[State, str]:
    if JobDir(folder).is_held():
        return "running", ""
    if JobDir(folder).summary.exists():
        return "finished", describe_left_out(folder)
    if launch is None:
        return "prepared", "never launched"
    if launch.outcome:
        return launch.outcome, launch.why
    return "dead", "its launcher was killed"


def describe_left_out(folder: Path) -> str:
    """`3 records were left out` of a finished job; empty: none."""
    with contextlib.suppress(OSError, ValueError):
        count = len(json.loads(JobDir(folder).summary.read_bytes()).get("set_aside") or ())
        return f"{count} record{'s were' if count > 1 else ' was'} left out" if count else ""
    return ""


def _read_journal(folder: Path) -> dict[str, dict[str, Any]]:
    """The newest row of each kind in the journal, which may grow meanwhile; TRUNCATE only if no step followed it."""
    uri = f"file:{quote(str(JobDir(folder).journal))}?mode=ro"
    rows: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(uri, uri=True)) as log:
        for kinds in (("COMMIT", "TRUNCATE"), ("COMMIT",), ("VIEW",), ("CKPT",), ("FACTS",)):
            marks = ", ".join("?" * len(kinds))
            other = "" if "COMMIT" in kinds else "kind <> 'COMMIT' AND"  # so that the journal's index serves
            query = f"SELECT kind, body FROM log WHERE {other} kind IN ({marks}) ORDER BY seq DESC LIMIT 1"
            rows |= {kind: json.loads(body) for kind, body in log.execute(query, kinds)}
    return rows


def last_view(folder: Path) -> tuple[str, ...]:
    """The workers of the job's last group."""
    return tuple(_read_journal(folder).get("VIEW", {}).get("members", ()))


def format_set_aside(aside: list[dict[str, Any]]) -> list[str]:
    """Records that were set aside, a line for each reason.

    >>> format_set_aside([{"record": 17, "where": "record 5 of b.parquet#1", "why": "worker-0.0: OSError: torn"}])
    ['set aside: record 17 (record 5 of b.parquet#1): worker-0.0: OSError: torn']
    """
    return [f"set aside: {describe_group(group)}" for group in group_by_reason(aside)]


def status(folder: Path) -> dict[str, Any] | None:
    """The job's status from its master; None if that does not answer."""
    try:
        with _master(folder) as ask:
            facts: dict[str, Any] = json.loads(ask("Status", pb.Cursor()).json)
    except TrainError:
        return None
    return facts


def scale(folder: Path, workers: int = 0, *, servers: int = 0) -> None:
    """Sets the job's number of workers, of parameter servers, or both (0: as before). Raises UsageError when the job
    refuses it or does not run."""
    _expect_running(folder)
    with _master(folder) as ask:
        ask("Scale", pb.ScaleRequest(workers=workers, servers=servers, why="trueline scale"))


def save(folder: Path) -> int:
    """Asks the running job for a checkpoint; returns the step that it will have at least. Raises UsageError, TrainError
    without an answer."""
    _expect_running(folder)
    with _master(folder) as ask:
        return int(ask("Save", pb.Cursor()).save_from)


def _expect_running(folder: Path) -> None:
    job = read_job(folder)
    if job.state != "running":
        raise UsageError(
            f"job '{job.name}' is not running: it is {job.state}{f' ({job.why})' if job.why else ''}",
            hint="" if job.state == "finished" else f"continue with `trueline resume {folder}`",
        )


@contextlib.contextmanager
def _master(folder: Path) -> Iterator[Callable[[str, Any], Any]]:
    """A function that calls the job's master. It raises TrainError without an answer, UsageError when refused."""
    job_dir = JobDir(folder)
    try:
        master, secret = job_dir.read_master(), job_dir.read_secret()
    except OSError:
        master = None
    if master is None or not master.address:
        raise TrainError(f"the job in {folder} has no master at the moment", hint="ask again in a second")
    metadata = (("authorization", f"Bearer {secret}"),)
    with grpc.insecure_channel(master.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = pb_grpc.MasterStub(channel)  # type: ignore[no-untyped-call,unused-ignore]

        def ask(name: str, request: Any) -> Any:
            try:
                return getattr(stub, name)(request, metadata=metadata, timeout=5.0)
            except grpc.RpcError as error:
                code, words = error.code(), error.details() or ""
                if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
                    raise UsageError(words) from error
                raise TrainError(
                    f"the master of {folder.name} does not answer: {words}", hint=f"see {job_dir.log('master')}"
                ) from error

        yield ask


def halt(folder: Path, *, patience_s: float = math.inf, why: str = "trueline halt") -> JobRecord:
    """Ends the job at a step whose checkpoint is written, and returns its record: no step is lost.

    After `patience_s` seconds it is ended at once, and steps after its newest checkpoint will be repeated. Raises
    UsageError when the job does not run, TrainError when it does not end.
    """
    _expect_running(folder)
    deadline, requested = time.monotonic() + patience_s, False
    while patience_s and JobDir(folder).is_held() and time.monotonic() < deadline:
        if not requested:
            with contextlib.suppress(TrainError), _master(folder) as ask:  # a successor of the master may answer
                ask("Stop", pb.StopRequest(why=why, save=True))
                requested = True
                events.emit("job.halting", why=why)
        time.sleep(0.05)  # polls
    if JobDir(folder).is_held():
        _end(folder, why)
    return read_job(folder)


def _end(folder: Path, why: str) -> None:
    """Ends the job at once."""
    try:
        with _master(folder) as ask:
            ask("Stop", pb.StopRequest(why=why))
    except TrainError:  # end its launcher; the others end with it
        launch = JobDir(folder).read_launch()
        for _ in range(2):  # the first one would wait for a checkpoint
            if launch is not None and JobDir(folder).is_held():
                os.kill(launch.pid, signal.SIGTERM)
                time.sleep(0.05)  # two at once are one
    deadline = time.monotonic() + END_S
    while JobDir(folder).is_held():
        if time.monotonic() > deadline:
            raise TrainError(f"the job in {folder} did not end within {END_S:.0f} s", hint="kill its launcher")
        time.sleep(0.05)  # polls
