"""`python -m trueline.registry.follow JOB`: logs a training job to an MLflow run while it trains.

    JOB/job.json, events.jsonl ──▶ follow ──▶ MLflow run: parameters, curves, certificates, at the end the files
                                      └─▶ JOB/mlflow.json: run id, store, offset of the logged events

It reads the job's files only, so MLflow can neither slow nor stop a job. Killed and restarted it continues the same
run: points that it logs twice are equal to the last digit, and MLflow keeps one of them. A store that does not answer
is tried again.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueline import events, files
from trueline.errors import DiskFull, RegistryError, TruelineError, UsageError
from trueline.registry import store
from trueline.registry.machine import MachineLoad

if TYPE_CHECKING:
    from mlflow import MlflowClient

POLL_S = 0.5
FLUSH_S, LOAD_S = 2.0, 10.0
GONE_S = 15.0
"""A job without an end whose processes have been gone for this long was killed."""
RETRY_S = 5.0
_BATCH, _TAGS = 900, 100  # MLflow takes at most 1000 metrics and 100 tags at once
_KEPT = ("summary.json", "events.jsonl", "page.html", "job.json")
MAX_POINTS = 2000
"""Of one curve; each point is the mean of the steps since the previous one."""
_MAX_TAGS = 100
"""Only certificates of the first epochs become tags; all of them are in summary.json."""
_ENDS = {"job.finished": "FINISHED", "job.failed": "FAILED", "job.stopping": "KILLED"}
_OUTCOMES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
"""A launcher's outcome, for a job whose master sent no end."""
STATES = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}
_MEANS = {"loss": "train/loss", "workers": "members", "data_ms": "step/data_ms", "compute_ms": "step/compute_ms",
          "wait_ms": "step/wait_ms", "commit_ms": "step/commit_ms"}  # fmt: skip

Point = tuple[str, float, int, int]
"""Key, value, milliseconds since 1970, step."""


@dataclass(slots=True)
class Curves:
    """A job's events as points and tags. Pure: where points end depends on step numbers alone, so that a second
    reading makes the same points.
    """

    points: list[Point] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    end: str = ""
    """MLflow's status of the run, once the job has ended."""
    ended_ms: int | None = None
    """When it ended, in milliseconds since 1970."""
    former: str = ""
    """The job's end in a former reading, in case it does not continue."""
    deaths: int = 0
    step: int = 0
    _steps: list[dict[str, Any]] = field(default_factory=list)
    since: float | None = None
    """Time of the last point's end."""

    @property
    def pending(self) -> bool:
        """Whether a point is incomplete."""
        return bool(self._steps)

    def hear(self, name: str, fields: dict[str, Any], at: float) -> None:
        match name:
            case "step.applied":
                self._add_step(fields, at)
            case "evaluation.done":
                found = {"loss": fields["loss"], **json.loads(fields.get("metrics") or "{}")}
                for key, value in found.items():
                    self._add(f"eval/{_key(key)}", value, at, int(fields["step"]))
            case "loop.logged":
                for key, value in fields.items():
                    if key != "step":
                        self._add(_key(key), value, at, int(fields["step"]))
            case "epoch.certified" if fields["epoch"] < _MAX_TAGS:
                self.tags[f"trueline.certificate.{fields['epoch']}"] = json.dumps(fields)
            case "worker.lost" | "worker.killed" if fields.get("why") != "exit code 0":  # as planned
                self.deaths += 1
                self._add("deaths", self.deaths, at, self.step)
            case "record.set_aside":
                reason = ": ".join(str(fields[name]) for name in ("where", "why") if fields.get(name))
                self.tags[f"trueline.set_aside.{fields['record']}"] = reason[:4000]
            case "job.finished" | "job.failed" | "job.stopping" | "launcher.ended":
                if self.end:  # the first end counts; later events are cleanup
                    return
                self._close(at)
                self.ended_ms = round(at * 1000)
                self.end = _ENDS.get(name) or _OUTCOMES.get(fields.get("outcome", ""), "KILLED")
                self.tags |= {"trueline.state": STATES[self.end], "trueline.why": str(fields.get("why", ""))[:4000]}
            case "worker.started" if self.end or self.former:  # the job was resumed
                self.end, self.former, self.ended_ms = "", "", None
                self.tags |= {"trueline.state": "running", "trueline.why": ""}

    def _add_step(self, fields: dict[str, Any], at: float) -> None:
        self.step = int(fields["step"])
        if self.since is None:
            self.since = clock(fields, at)
        if self._steps and self.step <= self._steps[-1]["step"]:  # the job was rolled back
            self._steps.clear()
        self._steps.append(fields)
        if fields.get("gap_ms"):
            self._add("regroup_gap_ms", fields["gap_ms"], at, self.step)
        stride = max(1, math.ceil((fields.get("total") or 0) / MAX_POINTS))
        if (self.step + 1) % stride == 0:
            self._close(at)

    def _close(self, at: float) -> None:
        if not self._steps:
            return
        for key, name in _MEANS.items():
            values = [one[key] for one in self._steps if one.get(key) is not None]
            if values:
                self._add(name, sum(values) / len(values), at, self.step)
        until = clock(self._steps[-1], at)
        if self.since is not None and until > self.since:
            records = sum(one["records"] for one in self._steps)
            self._add("records_per_second", records / (until - self.since), at, self.step)
        self._steps, self.since = [], until

    def _add(self, key: str, value: float | None, at: float, step: int) -> None:
        if value is not None:
            self.points.append((key, float(value), round(at * 1000), step))


def clock(fields: dict[str, Any], at: float) -> float:
    """When a step was applied, in seconds by its workers' clock: a master may receive many steps at once."""
    return float(fields.get("at_ns") or at * 1e9) / 1e9


def _key(name: str) -> str:
    """A metric's name in the characters that MLflow allows.

    >>> _key("top-5 (%)")
    'top-5 ___'
    """
    return re.sub(r"[^\w\-. /]", "_", name)


class _Follower:
    """Logs a job over one connection to the store, from the last logged event to the job's end."""

    def __init__(self, job_dir: Path, client: MlflowClient, experiment: str | None) -> None:
        self.job_dir, self.client = job_dir, client
        self.curves, self._load, self._loaded_at = Curves(), MachineLoad(), time.monotonic()
        self.settings = json.loads((job_dir / "job.json").read_bytes())
        known = store.link_of(job_dir, client.tracking_uri)
        self.offset = known.get("offset", 0)
        self._read = self._safe = self.offset
        self.run_id = known.get("run_id") or self._begin(experiment)
        if known:
            client.update_run(self.run_id, status="RUNNING")
            self._reread()

    def _begin(self, experiment: str | None) -> str:
        from mlflow.entities import Param

        name = str(self.settings["name"])
        where = store.experiment_of(self.client, experiment or re.sub(r"-\d+$", "", name))
        tags = {"trueline.job": name, "trueline.job_dir": str(self.job_dir), "trueline.state": "running",
                "mlflow.source.name": "trueline",
                "mlflow.user": "trueline", store.RECIPE_TAG: self.settings["recipe_digest"]}  # fmt: skip
        began = next((round(event["at"] * 1000) for _, event in _events(self.job_dir / "events.jsonl", 0)), None)
        run = self.client.create_run(where, start_time=began, tags=tags, run_name=name)
        plain = {key: value for key, value in self.settings.items() if isinstance(value, str | int | float | bool)}
        self.client.log_batch(run.info.run_id, params=[Param(key, str(value)[:6000]) for key, value in plain.items()])
        self.run_id = str(run.info.run_id)
        self._save()
        events.emit("run.started", run=self.run_id, experiment=where, store=self.client.tracking_uri)
        return self.run_id

    def _reread(self) -> None:
        """Restores the counts over the whole job from the events that were logged."""
        for _, event in _events(self.job_dir / "events.jsonl", 0, self.offset):
            if event["name"] != "step.applied":
                self.curves.hear(event["name"], event["fields"], event["at"])
            else:
                self.curves.step = int(event["fields"]["step"])
                self.curves.since = clock(event["fields"], event["at"])
        self.curves.points.clear()
        if _alive(self.job_dir):
            self.curves.end, self.curves.former = "", self.curves.end

    def _save(self) -> None:
        link = {"run_id": self.run_id, "tracking_uri": store.absolute(self.client.tracking_uri), "offset": self.offset}
        files.write_atomic(self.job_dir / "mlflow.json", json.dumps(link).encode())

    def read(self) -> None:
        """Reads the new events."""
        for end, event in _events(self.job_dir / "events.jsonl", self._read):
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
        from mlflow.entities import Metric, RunTag

        points, tags = self.curves.points, list(self.curves.tags.items())
        for start in range(0, max(len(points), 1), _BATCH):
            metrics = [Metric(key, value, at_ms, step) for key, value, at_ms, step in points[start : start + _BATCH]]
            now, tags = tags[:_TAGS], tags[_TAGS:]
            if metrics or now:
                self.client.log_batch(self.run_id, metrics, tags=[RunTag(key, value) for key, value in now])
        self.curves.points, self.curves.tags = [], dict(tags)
        if self.offset != self._safe:
            self.offset = self._safe
            self._save()

    def close(self, status: str) -> None:
        self.client.set_tag(self.run_id, "trueline.state", STATES[status])
        if status == "FINISHED" and (self.job_dir / "summary.json").exists():
            summary = json.loads((self.job_dir / "summary.json").read_bytes())
            once = all(one["tally_max"] in (1, -1) for one in summary["certificates"])
            self.client.set_tag(self.run_id, "trueline.exactly_once", str(once).lower())
        for name in _KEPT:
            if (self.job_dir / name).exists():
                self.client.log_artifact(self.run_id, str(self.job_dir / name))
        self.client.set_terminated(self.run_id, status, self.curves.ended_ms)
        events.emit("run.ended", run=self.run_id, status=status)


def _events(log: Path, start: int, stop: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Events of the whole lines from byte `start` on, each after its end."""
    if not log.exists():
        return
    with log.open("rb") as file:
        at = file.seek(start)
        for line in file:
            at += len(line)
            if not line.endswith(b"\n") or (stop is not None and at > stop):
                return
            try:
                event = json.loads(line)
            except ValueError:  # torn when the master died
                continue
            yield at, event


def follow(job_dir: Path, *, tracking_uri: str | None = None, experiment: str | None = None) -> str:
    """Logs the job in `job_dir` to MLflow until it ends, and returns the run's id.

    Raises UsageError if the folder holds no job or another process follows it already; RegistryError if the store
    cannot be used and the job has ended.
    """
    if not (job_dir / "job.json").exists():
        raise UsageError(f"{job_dir} holds no job: it has no job.json", hint="name a job's folder")
    with _alone(job_dir):
        while True:
            try:
                with store.open_store(tracking_uri) as client:
                    return _pump(_Follower(job_dir, client, experiment))
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
        follower = _Follower(job_dir, client, experiment)
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
    """Whether the job's launcher or master runs on this machine."""
    for name in ("launcher.json", "master.json"):
        with suppress(OSError, ValueError, KeyError):
            os.kill(json.loads((job_dir / name).read_bytes())["pid"], 0)
            return True
    return False


@contextmanager
def _alone(job_dir: Path) -> Iterator[None]:
    with ExitStack() as held:
        try:
            held.enter_context(files.hold_lock(job_dir / "mlflow.lock", wait=False))
        except BlockingIOError as error:
            raise UsageError(f"another process logs {job_dir} to MLflow already", hint="let it, or end it") from error
        yield


def start(job_dir: Path, *, tracking_uri: str | None = None) -> subprocess.Popen[bytes]:
    """Follows the job in a separate process, which ends with the job and writes to JOB/logs/mlflow.log."""
    command = [sys.executable, "-m", "trueline.registry.follow", str(job_dir)]
    (job_dir / "logs").mkdir(exist_ok=True)
    with (job_dir / "logs" / "mlflow.log").open("ab") as log:
        return subprocess.Popen(
            [*command, *(("--tracking-uri", tracking_uri) if tracking_uri else ())],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trueline.registry.follow", description="Logs a job to MLflow.")
    parser.add_argument("job_dir", type=Path)
    parser.add_argument("--tracking-uri")
    parser.add_argument("--experiment", help="else the job's name without its number")
    given = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s")
    events.logger.setLevel(logging.INFO)
    try:
        run_id = follow(given.job_dir.resolve(), tracking_uri=given.tracking_uri, experiment=given.experiment)
    except TruelineError as error:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        return error.exit_code
    sys.stdout.write(run_id + "\n")
    return 0


if __name__ == "__main__":
    atexit.register(gc.freeze)  # the exit does not look through what MLflow has imported, for half a second
    sys.exit(main())
