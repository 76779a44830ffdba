"""A job's events as what MLflow keeps: points of curves and tags. Pure; `follow` is the shell around it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

MAX_POINTS = 2000
"""Of one curve; each point is the mean of the steps up to it."""
_MAX_TAGS = 100
"""Certificates of the first epochs that become tags; all of them are in summary.json."""
_ENDS = {"job.finished": "FINISHED", "job.failed": "FAILED", "job.stopping": "KILLED"}
_OUTCOMES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
"""How a launcher says that it ended, where no event of the master says how the job did."""
STATES = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}
_MEANS = {"loss": "train/loss", "workers": "members", "data_ms": "step/data_ms", "compute_ms": "step/compute_ms",
          "wait_ms": "step/wait_ms", "commit_ms": "step/commit_ms"}  # fmt: skip

Point = tuple[str, float, int, int]
"""Key, value, milliseconds since 1970, step."""


@dataclass(slots=True)
class Curves:
    """Events as points and tags. Where a point ends depends on step numbers alone, so a second reading finds the same
    ones."""

    points: list[Point] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    end: str = ""
    """MLflow's status of a run whose job has ended."""
    former: str = ""
    """How the job had ended when it was followed before, should it not go on after all."""
    deaths: int = 0
    step: int = 0
    _steps: list[dict[str, Any]] = field(default_factory=list)
    since: float | None = None
    """When the last point ended."""

    @property
    def pending(self) -> bool:
        """Whether steps wait for the others of their point."""
        return bool(self._steps)

    def hear(self, name: str, fields: dict[str, Any], at: float) -> None:
        match name:
            case "step.applied":
                self._stepped(fields, at)
            case "evaluation.done":
                found = {"loss": fields["loss"], **json.loads(fields.get("metrics") or "{}")}
                for key, value in found.items():
                    self._add(f"eval/{_key(key)}", value, at, int(fields["step"]))
            case "epoch.certified" if fields["epoch"] < _MAX_TAGS:
                self.tags[f"trueline.certificate.{fields['epoch']}"] = json.dumps(fields)
            case "worker.lost" | "worker.killed" if fields.get("why") != "exit code 0":  # that one has left as planned
                self.deaths += 1
                self._add("deaths", self.deaths, at, self.step)
            case "record.set_aside":
                said = ": ".join(str(fields[name]) for name in ("where", "why") if fields.get(name))
                self.tags[f"trueline.set_aside.{fields['record']}"] = said[:4000]
            case "job.finished" | "job.failed" | "job.stopping" | "launcher.ended":
                if self.end:  # how it ended stays; what follows is tidying up
                    return
                self._close(at)
                self.end = _ENDS.get(name) or _OUTCOMES.get(fields.get("outcome", ""), "KILLED")
                self.tags |= {"trueline.state": STATES[self.end], "trueline.why": str(fields.get("why", ""))[:4000]}
            case "worker.started" if self.end or self.former:  # the job was resumed
                self.end = self.former = ""
                self.tags |= {"trueline.state": "running", "trueline.why": ""}

    def _stepped(self, fields: dict[str, Any], at: float) -> None:
        self.step = int(fields["step"])
        if self.since is None:
            self.since = clock(fields, at)
        if self._steps and self.step <= self._steps[-1]["step"]:  # the job went back
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
    """When a step was applied, in seconds by the clock of its workers: a master may hear of many steps at once."""
    return float(fields.get("at_ns") or at * 1e9) / 1e9


def _key(name: str) -> str:
    """A metric's name with the letters that MLflow allows.

    >>> _key("top-5 (%)")
    'top-5 ___'
    """
    return re.sub(r"[^\w\-. /]", "_", name)
