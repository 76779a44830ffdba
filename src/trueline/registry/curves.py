"""A job's events as curves and tags, for MLflow, TensorBoard and other trackers. Pure, but for reading the file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

MAX_POINTS = 2000
"""Of one curve; each point is the mean of the steps since the previous one."""
_MAX_TAGS = 100
"""Only certificates of the first epochs become tags; all of them are in summary.json."""
STATES = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}
"""A job's state by MLflow's status of its run."""
_ENDS = {"job.finished": "FINISHED", "job.failed": "FAILED", "job.stopping": "KILLED"}
_OUTCOMES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
"""A launcher's outcome, for a job whose master sent no end."""
_MEANS = {"loss": "train/loss", "workers": "members", "data_ms": "step/data_ms", "compute_ms": "step/compute_ms",
          "wait_ms": "step/wait_ms", "commit_ms": "step/commit_ms", "learning_rate": "learning_rate",
          "gradient_norm": "gradient_norm"}  # fmt: skip

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
            case "workers.measured":
                self._add("memory_mb", max(json.loads(fields["memory"]).values(), default=0) / 2**20, at, self.step)
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


def read_events(log: Path, start: int, stop: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
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


class TrackedJob(NamedTuple):
    """The job that a run is made for."""

    folder: Path
    settings: Mapping[str, Any]
    began_ms: int | None
    """Time of its first event, in milliseconds since 1970."""

    @property
    def plain_settings(self) -> dict[str, str | int | float | bool]:
        return {name: value for name, value in self.settings.items() if isinstance(value, str | int | float | bool)}

    @property
    def group(self) -> str:
        """The job's name without its number."""
        return re.sub(r"-\d+$", "", str(self.settings["name"]))


class Tracker(Protocol):
    """Where the curves of a job go. One object serves one job; its methods may raise RegistryError, and are then tried
    again with a new object, so points may come twice."""

    place: str
    """The store. A run in another store is not continued."""

    def begin(self, job: TrackedJob, run: str) -> str:
        """Begins the job's run, or continues `run`, which an earlier process began; returns its id."""

    def log(self, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        """Adds points and sets tags."""

    def end(self, status: str, at_ms: int | None, kept: Sequence[Path]) -> None:
        """Ends the run with a status of STATES, at `at_ms` (milliseconds since 1970), and stores the files `kept`."""
