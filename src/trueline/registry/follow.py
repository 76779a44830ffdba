"""`python -m trueline.registry.follow JOB`: logs a training job to MLflow or another tracker while it trains.

    JOB/job.json, events.jsonl ──▶ follow ──▶ a Tracker's run: parameters, curves, certificates, at the end the files
                                      └─▶ JOB/mlflow.json: run id, store, offset of the logged events

It reads the job's files only, so a tracker can neither slow nor stop a job. Killed and restarted it continues the same
run: points that it logs twice are equal to the last digit, and MLflow keeps one of them. A store that does not answer
is tried again.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import json
import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from trueline import events, files
from trueline.errors import DiskFull, RegistryError, TruelineError, UsageError
from trueline.extras import translate
from trueline.registry import mlflow_tracker
from trueline.registry.curves import STATES, Curves, TrackedJob, Tracker, clock, read_events
from trueline.registry.machine import MachineLoad
from trueline.registry.store import link_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

POLL_S = 0.5
FLUSH_S, LOAD_S = 2.0, 10.0
GONE_S = 15.0
"""A job without an end whose processes have been gone for this long was killed."""
RETRY_S = 5.0
_KEPT = ("summary.json", "events.jsonl", "page.html", "job.json", "evaluation.json")
_FAMILIAR = {"wandb": "trueline.registry.wandb_tracker:open_tracker"}
"""Trackers beside MLflow that are named by one word."""


class _Follower:
    """Logs a job to one tracker, from the last logged event to the job's end. `name`: the tracker's."""

    def __init__(self, job_dir: Path, tracker: Tracker, name: str = "mlflow") -> None:
        self.job_dir, self.tracker, self.name = job_dir, tracker, name
        self.curves, self._load, self._loaded_at = Curves(), MachineLoad(), time.monotonic()
        known = link_of(job_dir, tracker.place, name)
        self.offset = known.get("offset", 0)
        self._read = self._safe = self.offset
        began = next((round(event["at"] * 1000) for _, event in read_events(self._log, 0)), None)
        job = TrackedJob(job_dir, json.loads((job_dir / "job.json").read_bytes()), began)
        self.run_id = tracker.begin(job, known.get("run_id", ""))
        if known:
            self._reread()
        else:
            self._save()
            events.emit("run.started", run=self.run_id, tracker=name, store=tracker.place)

    @property
    def _log(self) -> Path:
        return self.job_dir / "events.jsonl"

    def _reread(self) -> None:
        """Restores the counts over the whole job from the events that were logged."""
        for _, event in read_events(self._log, 0, self.offset):
            if event["name"] != "step.applied":
                self.curves.hear(event["name"], event["fields"], event["at"])
            else:
                self.curves.step = int(event["fields"]["step"])
                self.curves.since = clock(event["fields"], event["at"])
        self.curves.points.clear()
        if _alive(self.job_dir):
            self.curves.end, self.curves.former = "", self.curves.end

    def _save(self) -> None:
        link = {"run_id": self.run_id, "tracking_uri": self.tracker.place, "offset": self.offset}
        files.write_atomic(self.job_dir / f"{self.name}.json", json.dumps(link).encode())

    def read(self) -> None:
        """Reads the new events."""
        for end, event in read_events(self._log, self._read):
            try:
                self.curves.hear(event["name"], event["fields"], event["at"])
            except (LookupError, ValueError, TypeError):  # an event of another version
                events.emit("event.skipped", name=str(event.get("name")))
            self._read = end
            if not self.curves.pending:
                self._safe = end

    def add_load(self) -> None:
        """Adds how busy the machine is, every LOAD_S seconds of a job that runs."""
        if time.monotonic() >= self._loaded_at + LOAD_S:
            self._loaded_at, at_ms = time.monotonic(), round(time.time() * 1000)
            self.curves.points += [(key, value, at_ms, self.curves.step) for key, value in self._load.read().items()]

    def flush(self) -> None:
        """Logs points and tags, then saves the offset: after a death between the two they are logged twice."""
        if self.curves.points or self.curves.tags:
            self.tracker.log(self.curves.points, self.curves.tags)
        self.curves.points, self.curves.tags = [], {}
        if self.offset != self._safe:
            self.offset = self._safe
            self._save()

    def close(self, status: str) -> None:
        tags = {"trueline.state": STATES[status]}
        if status == "FINISHED" and (self.job_dir / "summary.json").exists():
            summary = json.loads((self.job_dir / "summary.json").read_bytes())
            once = all(one["tally_max"] in (1, -1) for one in summary["certificates"])
            tags["trueline.exactly_once"] = str(once).lower()
        self.tracker.log([], tags)
        kept = [path for path in map(self.job_dir.joinpath, _KEPT) if path.exists()]
        self.tracker.end(status, self.curves.ended_ms, kept)
        events.emit("run.ended", run=self.run_id, status=status)


def open_tracker(
    name: str, job_dir: Path, *, tracking_uri: str | None = None, experiment: str | None = None
) -> AbstractContextManager[Tracker]:
    """The tracker `name`: mlflow, wandb, or `module:function`, a function of the job's folder that returns a context
    manager of a Tracker. Raises UsageError."""
    if name == "mlflow":
        return mlflow_tracker.open_tracker(tracking_uri, experiment)
    module, _, function = _FAMILIAR.get(name, name).partition(":")
    try:
        found: AbstractContextManager[Tracker] = getattr(importlib.import_module(module), function)(job_dir)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"'{name}' is no tracker: {error}", hint="one of mlflow, wandb, module:function") from error
    return found


def check_tracker(name: str) -> None:
    """Raises UsageError or MissingPackage for a tracker that `open_tracker` would not find. Imports nothing."""
    module, _, function = name.partition(":")
    known, hint = name == "mlflow" or name in _FAMILIAR, "one of mlflow, wandb, module:function"
    package = name if known else module.partition(".")[0]
    if not known and not (package and function):
        raise UsageError(f"'{name}' is no tracker", hint=hint)
    if PathFinder.find_spec(package, [*sys.path, os.getcwd()]) is None:
        missing = translate(ModuleNotFoundError(name=package))
        raise missing or UsageError(f"'{name}' is no tracker: there is no module '{package}'", hint=hint)


def _file_name(tracker: str) -> str:
    """A tracker's name as that of its files in the job's folder."""
    return re.sub(r"\W+", "-", tracker)


def follow(
    job_dir: Path, *, tracking_uri: str | None = None, experiment: str | None = None, tracker: str = "mlflow"
) -> str:
    """Logs the job in `job_dir` to a tracker until it ends, and returns the run's id. `tracker` as in `open_tracker`.

    Raises UsageError if the folder holds no job or another process follows it already; RegistryError if the store
    cannot be used and the job has ended.
    """
    if not (job_dir / "job.json").exists():
        raise UsageError(f"{job_dir} holds no job: it has no job.json", hint="name a job's folder")
    name = _file_name(tracker)
    with _alone(job_dir, name):
        while True:
            try:
                with open_tracker(tracker, job_dir, tracking_uri=tracking_uri, experiment=experiment) as opened:
                    return _pump(_Follower(job_dir, opened, name))
            except (RegistryError, DiskFull) as error:
                if not _alive(job_dir):
                    raise
                events.emit("store.away", why=error.message, retry_s=RETRY_S)
                time.sleep(RETRY_S)


def record(job_dir: Path, client: MlflowClient, experiment: str) -> str | None:
    """Logs a job that has ended and that no process follows, as `follow` would have; returns the run's id. None for a
    folder without a job, or one whose job runs."""
    if not (job_dir / "job.json").exists() or _alive(job_dir):
        return None
    with _alone(job_dir):
        follower = _Follower(job_dir, mlflow_tracker.MlflowTracker(client, experiment))
        follower.read()
        follower.flush()
        follower.close(follower.curves.end or "KILLED")
    return follower.run_id


def _pump(follower: _Follower) -> str:
    flushed, alive_at, ended_at = -math.inf, time.monotonic(), math.inf
    while True:
        follower.read()
        now = time.monotonic()
        alive_at = now if _alive(follower.job_dir) else alive_at
        killed = (follower.curves.former or "KILLED") if now > alive_at + GONE_S else ""
        status = follower.curves.end or killed
        if status or now >= flushed + FLUSH_S:
            flushed = now
            follower.add_load()
            follower.flush()
        if status:
            ended_at = min(ended_at, now)
            if (follower.job_dir / "page.html").exists() or now > ended_at + FLUSH_S:  # the master writes it last
                follower.close(status)
                return follower.run_id
        time.sleep(POLL_S)  # the pace of looking at a file that another process appends to


def _alive(job_dir: Path) -> bool:
    """Whether the job's launcher or master runs on this machine. A launcher that has ended says so in its file; its
    process may live on, as a notebook's kernel or `trueline ship`."""
    for name in ("launcher.json", "master.json"):
        with suppress(OSError, ValueError, KeyError):
            known = json.loads((job_dir / name).read_bytes())
            os.kill(known["pid"], 0)
            if not known.get("outcome"):
                return True
    return False


@contextmanager
def _alone(job_dir: Path, name: str = "mlflow") -> Iterator[None]:
    with ExitStack() as held:
        try:
            held.enter_context(files.hold_lock(job_dir / f"{name}.lock", wait=False))
        except BlockingIOError as error:
            shown = "MLflow" if name == "mlflow" else name
            raise UsageError(f"another process logs {job_dir} to {shown} already", hint="let it, or end it") from error
        yield


def log_of(job_dir: Path, tracker: str) -> Path:
    """Where the process that follows the job writes what it does."""
    return job_dir / "logs" / f"{_file_name(tracker)}.log"


def start(job_dir: Path, *, tracking_uri: str | None = None, tracker: str = "mlflow") -> subprocess.Popen[bytes]:
    """Follows the job in a separate process, which ends with the job and writes to JOB/logs/NAME.log."""
    command = [sys.executable, "-m", "trueline.registry.follow", str(job_dir), "--track", tracker]
    (job_dir / "logs").mkdir(exist_ok=True)
    with log_of(job_dir, tracker).open("ab") as log:
        return subprocess.Popen(
            [*command, *(("--tracking-uri", tracking_uri) if tracking_uri else ())],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trueline.registry.follow", description="Logs a job to a tracker.")
    parser.add_argument("job_dir", type=Path)
    parser.add_argument("--track", default="mlflow", help="mlflow, wandb or module:function")
    parser.add_argument("--tracking-uri", help="of MLflow")
    parser.add_argument("--experiment", help="of MLflow; else the job's name without its number")
    given = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s")
    events.logger.setLevel(logging.INFO)
    sys.path.append(os.getcwd())  # for a tracker of the user's own
    where = {"tracking_uri": given.tracking_uri, "experiment": given.experiment}
    try:
        run_id = follow(given.job_dir.resolve(), tracker=given.track, **where)
    except TruelineError as error:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        return error.exit_code
    sys.stdout.write(run_id + "\n")
    return 0


if __name__ == "__main__":
    atexit.register(gc.freeze)  # the exit does not look through what MLflow has imported, for half a second
    sys.exit(main())
