"""`python -m trueline.registry.follow JOB`: a training job becomes an MLflow run while it trains.

    JOB/job.json, events.jsonl ──▶ follow ──▶ MLflow run: parameters, curves, certificates, at the end the files
                                      └─▶ JOB/mlflow.json: run id, store, how far the events are logged

It meets training in files only, so MLflow can neither slow nor stop a job. Killed and started again it goes on with
the same run: what it logs twice is the same to the last digit, and MLflow keeps one of it. A store that is away is
asked again. Curves have at most 2000 points; each is the mean of the steps up to it.
"""

from __future__ import annotations

import argparse
import atexit
import fcntl
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
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueline import events, files
from trueline.errors import RegistryError, TruelineError, UsageError
from trueline.registry import store
from trueline.registry.curves import STATES, Curves, clock

if TYPE_CHECKING:
    from mlflow import MlflowClient

POLL_S = 0.5
FLUSH_S = 2.0
GONE_S = 15.0
"""A job without an end whose processes have been gone for so long was killed."""
RETRY_S = 5.0
_BATCH, _TAGS = 900, 100  # MLflow takes at most 1000 metrics and 100 tags at once
_KEPT = ("summary.json", "events.jsonl", "page.html", "job.json")


class _Follower:
    """One connection to the store: from what was logged last to the job's end."""

    def __init__(self, job_dir: Path, client: MlflowClient, experiment: str | None) -> None:
        self.job_dir, self.client = job_dir, client
        self.curves = Curves()
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

        from trueline.registry.add import experiment_of

        name = str(self.settings["name"])
        where = experiment_of(self.client, experiment or re.sub(r"-\d+$", "", name))
        tags = {"trueline.job": name, "trueline.state": "running", "mlflow.source.name": "trueline",
                "mlflow.user": "trueline", store.RECIPE_TAG: self.settings["recipe_digest"]}  # fmt: skip
        run = self.client.create_run(where, tags=tags, run_name=name)
        plain = {key: value for key, value in self.settings.items() if isinstance(value, str | int | float | bool)}
        self.client.log_batch(run.info.run_id, params=[Param(key, str(value)[:6000]) for key, value in plain.items()])
        self.run_id = str(run.info.run_id)
        self._save()
        events.emit("run.started", run=self.run_id, experiment=where, store=self.client.tracking_uri)
        return self.run_id

    def _reread(self) -> None:
        """What counts over the whole job is counted again, up to where the points were logged."""
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
        """Takes in what was appended to the events."""
        for end, event in _events(self.job_dir / "events.jsonl", self._read):
            try:
                self.curves.hear(event["name"], event["fields"], event["at"])
            except (LookupError, ValueError, TypeError):  # an event of another version
                events.emit("event.skipped", name=str(event.get("name")))
            self._read = end
            if not self.curves.pending:
                self._safe = end

    def flush(self) -> None:
        """Logs what there is, then says how far that is: a death between the two logs the same once more."""
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
        self.client.set_terminated(self.run_id, status)
        events.emit("run.ended", run=self.run_id, status=status)


def _events(log: Path, start: int, stop: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Events of the whole lines from byte `start` on, each with where it ends."""
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

    Raises UsageError when the folder holds no job or somebody follows it already; RegistryError when the store cannot
    be used and the job has ended.
    """
    if not (job_dir / "job.json").exists():
        raise UsageError(f"{job_dir} holds no job: it has no job.json", hint="name a job's folder")
    with _alone(job_dir):
        while True:
            try:
                with store.opened(tracking_uri) as client:
                    return _pump(_Follower(job_dir, client, experiment))
            except RegistryError as error:
                if not _alive(job_dir):
                    raise
                events.emit("store.away", why=error.message, retry_s=RETRY_S)
                time.sleep(RETRY_S)  # between two tries at a store that refuses or is away


def _pump(follower: _Follower) -> str:
    flushed, alive_at, ended_at = -math.inf, time.monotonic(), math.inf
    while True:
        follower.read()
        now = time.monotonic()
        alive_at = now if _alive(follower.job_dir) else alive_at
        status = follower.curves.end
        if not status and now > alive_at + GONE_S:
            status = follower.curves.former or "KILLED"
        if status or now >= flushed + FLUSH_S:
            flushed = now
            follower.flush()
        if status:
            ended_at = min(ended_at, now)
            if (follower.job_dir / "page.html").exists() or now > ended_at + FLUSH_S:  # the master's last act
                follower.close(status)
                return follower.run_id
        time.sleep(POLL_S)  # the pace of looking at a file that another process appends to


def _alive(job_dir: Path) -> bool:
    """Whether the job's launcher or master lives on this machine."""
    for name in ("launcher.json", "master.json"):
        try:
            os.kill(json.loads((job_dir / name).read_bytes())["pid"], 0)
        except (OSError, ValueError, KeyError):
            continue
        return True
    return False


@contextmanager
def _alone(job_dir: Path) -> Iterator[None]:
    with (job_dir / "mlflow.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another process logs {job_dir} to MLflow already", hint="let it, or end it") from error
        yield


def start(job_dir: Path, *, tracking_uri: str | None = None) -> subprocess.Popen[bytes]:
    """Follows the job in a process of its own, which ends with the job; it writes to JOB/logs/mlflow.log."""
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
    parser.add_argument("--experiment", help="the job's name without its number when left out")
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
