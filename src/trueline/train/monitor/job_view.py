"""The board: what a job's events add up to, for whoever looks at it (the live page, Prometheus).

    events.jsonl ──replay──▶ Board ◀──hear── the master's events         Board.state(now) ──▶ page, metrics

Pure: the same events give the same board, so a restarted master shows the whole history again. Bounded: neighbours
merge, lists keep their newest or most telling entries. An event that it does not know becomes a line of the list; one
with fields it cannot read is passed over, for the picture must never stop the job.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from trueline.engine.contract import parse_ref
from trueline.events import Field, render
from trueline.train.monitor.series import PHASES, Histogram, Point, Recent, Series, finite
from trueline.train.monitor.timeline import Lanes

Fields = Mapping[str, Field]
MAX_EVENTS, MAX_REGROUPS, MAX_EVALUATIONS, MAX_KEPT = 80, 240, 400, 200
_STILL_S = 1.0
_DONE = "exit code 0"
"""How a worker ends that has left as planned."""
_SILENT = {"step.applied", "worker.running", "group.released", "epoch.certified", "checkpoint.saved", "evaluation.done"}
"""Events that are many, and shown elsewhere."""
_BAD = {"worker.lost", "worker.killed", "worker.quarantined", "worker.fenced", "record.set_aside", "record.suspected",
        "job.failed", "log.truncated", "checkpoint.failed", "master.lost", "agent.lost"}  # fmt: skip
_GOOD = {"job.finished", "job.restored"}
_WORDS = {
    "worker.started": "{worker} starts",
    "worker.joined": "{worker} is ready",
    "worker.lost": "{worker} died: {why}",
    "worker.killed": "{worker} was given up: {why}",
    "worker.leaving": "{worker} leaves as planned",
    "view.published": "generation {generation}: {workers} workers ({why})",
    "record.suspected": "record {record} is suspected: {why}",
    "record.set_aside": "record {record} ({where}) is set aside: {why}",
    "job.scaled": "from {before} to {workers} workers: {why}",
    "job.failed": "the job failed: {why}",
    "job.finished": "the job is finished",
    "master.lost": "the master died and was started again",
    "agent.lost": "the engine's agent died and was started again",
    "log.truncated": "the log goes back to step {steps}: {why}",
}


def kind_of(why: str) -> str:
    """A reason of a death as a label with few values.

    >>> kind_of("killed by SIGSEGV while record 17 was tried"), kind_of("exit code 1"), kind_of("silent for 3.2 s")
    ('SIGSEGV', 'exit', 'silent')
    """
    signal = re.search(r"SIG[A-Z]+", why)
    if signal:
        return signal[0]
    kinds = {"exit": "exit", "silent": "silent", "stuck": "stuck", "not ready": "not_ready", "away": "master_away"}
    return next((kind for word, kind in kinds.items() if word in why), "other")


class Board:
    """What is known of one job; `facts` are its settings."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self.changes = 0
        """Grows with every event: who has seen this number has seen everything."""
        self.series, self.recent, self.lanes = Series(), Recent(), Lanes()
        self.phase, self.why, self.hint = "starting", "", ""
        self.started_at = self.last_at = 0.0
        self.step = self.steps_applied = self.records = self.total = self.generation = self.workers = 0
        self.loss: float | None = None
        self.not_finite: int | None = None
        """The first step whose loss was no number."""
        self.shares: list[int] = []
        self.redone = self.checkpoints = self.regroups_seen = 0
        self.phase_ms = dict.fromkeys(PHASES, 0.0)
        self.gaps_s = Histogram((0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0))
        self.deaths: Counter[str] = Counter()
        self.regroups: deque[dict[str, Any]] = deque(maxlen=MAX_REGROUPS)
        self.evaluations: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        self.certificates: dict[int, dict[str, Field]] = {}
        self.checkpoint: dict[str, Any] | None = None
        self.suspected: dict[int, str] = {}
        self.set_aside: dict[int, str] = {}
        self.said: deque[list[Any]] = deque(maxlen=MAX_EVENTS)
        self._stepped_at: float | None = None
        self._offset: float | None = None
        self._stamp = 0.0
        self._hear: dict[str, Callable[[Fields, float], None]] = {
            "step.applied": self._stepped, "view.published": self._viewed, "worker.started": self._started,
            "worker.running": self._running, "worker.joined": self._joined, "worker.lost": self._died,
            "worker.killed": self._died, "worker.leaving": self._leaving, "worker.quarantined": self._quarantined,
            "epoch.certified": self._certified, "evaluation.done": self._evaluated, "checkpoint.saved": self._saved,
            "record.suspected": self._suspected, "record.set_aside": self._set_aside, "log.truncated": self._truncated,
            "job.scaled": self._scaled, "job.finished": self._finished, "job.failed": self._failed,
            "job.stopping": self._stopping, "launcher.ended": self._launcher_ended,
        }  # fmt: skip

    def hear(self, name: str, fields: Fields, at: float) -> None:
        """Takes in one event that happened `at` seconds since 1970."""
        if self.ended and name in ("launcher.ended", "job.stopping"):  # tidying up
            return
        self.last_at = max(at, self.last_at)
        self.started_at = self.started_at or self.last_at
        self.changes += 1
        try:
            if name in self._hear:
                self._hear[name](fields, self.last_at)
        except (
            LookupError,
            ValueError,
            TypeError,
            ArithmeticError,
            AttributeError,
        ):  # another version's event; its line below still tells of it
            pass
        if fields.get("why") == _DONE:  # the end of a departure that was told before
            return
        if name not in _SILENT:
            self._say(name, fields)

    @property
    def ended(self) -> bool:
        return self.phase in ("finished", "failed", "stopped")

    def _say(self, name: str, fields: Fields) -> None:
        try:
            text = _WORDS[name].format(**fields)
        except (KeyError, ValueError):
            text = render(name, {key: value for key, value in fields.items() if key not in ("summary", "hint")})
        mood = "bad" if name in _BAD else "good" if name in _GOOD else ""
        self.said.append([round(self.last_at, 3), name, text[:400], mood])

    # Steps. --------------------------------------------------------------------------------------------------------

    def _stepped(self, fields: Fields, at: float) -> None:
        when = self._when(fields, at)
        step, records, loss = int(_number(fields, "step")), int(_number(fields, "records")), _number(fields, "loss")
        phases = (_number(fields, "data_ms"), _number(fields, "compute_ms"), _number(fields, "wait_ms"),
                  _number(fields, "commit_ms"))  # fmt: skip
        self.workers = int(_number(fields, "workers"))
        seconds = 0.0 if self._stepped_at is None else max(when - self._stepped_at, 0.0)
        self._stepped_at = when
        self.series.add(
            Point(step=step, at=when, loss=loss, records=records, seconds=seconds, phases_ms=phases,
                  workers=self.workers)
        )  # fmt: skip
        self.recent.add(when, records)
        self.step, self.steps_applied, self.records = step + 1, self.steps_applied + 1, self.records + records
        self.total = int(_number(fields, "total")) or self.total
        self.loss = finite(loss)
        if self.loss is None and self.not_finite is None:
            self.not_finite = step
        for name, value in zip(PHASES, phases, strict=True):
            self.phase_ms[name] += value
        self.redone += int(_number(fields, "redone"))
        if "shares" in fields:
            self.shares = [int(share) for share in _listed(fields["shares"])]
        self._closed_gap(fields, when, seconds)
        if not self.ended:
            self.phase = "training"

    def _when(self, fields: Fields, at: float) -> float:
        """When the step was applied. What a master hears late, because it was away, happened earlier: workers stamp
        their steps with a clock of their own, whose smallest distance from ours is the distance of the two clocks."""
        stamp = _number(fields, "at_ns") * 1e-9
        if not stamp:
            return at
        distance = at - stamp
        if self._offset is None or distance < self._offset or stamp < self._stamp:  # a reboot, or another machine
            self._offset = distance
        self._stamp = stamp
        return max(self._stepped_at or 0.0, min(at, stamp + self._offset))

    def _closed_gap(self, fields: Fields, when: float, seconds: float) -> None:
        """The first step of a generation ends its regroup. Who reports it first may have joined just now and know of no
        gap; then it is the time since the step before, unless the job stood still already when the view came."""
        for regroup in reversed(self.regroups):
            if regroup["generation"] != fields.get("generation"):
                continue
            if regroup["until"] is None:
                stood_still = when - seconds < regroup["at"] - _STILL_S
                gap_ms = _number(fields, "gap_ms") or (0.0 if stood_still else seconds * 1e3)
                regroup.update(gap_ms=round(gap_ms, 1), until=round(when, 3), workers=self.workers)
                if gap_ms:
                    self.gaps_s.add(gap_ms / 1e3)
            return

    def _truncated(self, fields: Fields, at: float) -> None:
        steps = int(_number(fields, "steps"))
        self.series.rewind(steps)
        self.step = min(self.step, steps)

    # Members. ------------------------------------------------------------------------------------------------------

    def _viewed(self, fields: Fields, at: float) -> None:
        self.generation, self.workers = int(_number(fields, "generation")), int(_number(fields, "workers"))
        self.regroups_seen += 1
        self.regroups.append({"generation": self.generation, "at": round(at, 3), "until": None, "gap_ms": 0.0,
                              "workers": self.workers, "why": str(fields.get("why", ""))})  # fmt: skip
        members = fields.get("members")
        self.lanes.viewed(at, frozenset(map(str, _listed(members))) if members is not None else None)
        self.phase, self.why, self.hint = "regrouping" if self.workers else "waiting for workers", "", ""

    def _started(self, fields: Fields, at: float) -> None:
        self.lanes.started(str(fields["worker"]), at, self._stepped_at or at)
        if self.ended:  # the job was resumed
            self.phase, self.why, self.hint = "starting", "", ""

    def _running(self, fields: Fields, at: float) -> None:
        self.lanes.started(str(fields["worker"]), at, self._stepped_at or at)

    def _joined(self, fields: Fields, at: float) -> None:
        self.lanes.ready(str(fields["worker"]), at)
        self.total = int(_number(fields, "total_steps")) or self.total

    def _died(self, fields: Fields, at: float) -> None:
        why, ref = str(fields.get("why", "")), str(fields["worker"])
        if why == _DONE:
            self.lanes.left(ref, at)
        elif self.lanes.died(ref, at, why):
            self.deaths[kind_of(why)] += 1

    def _leaving(self, fields: Fields, at: float) -> None:
        self.lanes.leaving(str(fields["worker"]))

    def _scaled(self, fields: Fields, at: float) -> None:
        """The highest slots leave when there are to be fewer workers."""
        workers = int(_number(fields, "workers"))
        self.facts = {**self.facts, "workers": workers}
        for span in self.lanes.living():
            if parse_ref(span.ref)[1] >= workers:
                self.lanes.leaving(span.ref)

    def _quarantined(self, fields: Fields, at: float) -> None:
        slot = fields.get("slot")
        found = int(slot) if slot is not None else parse_ref(str(fields["worker"]))[1]
        self.lanes.quarantined(found, str(fields.get("why", "")))

    # Results. ------------------------------------------------------------------------------------------------------

    def _certified(self, fields: Fields, at: float) -> None:
        self.certificates[int(_number(fields, "epoch"))] = dict(fields)
        while len(self.certificates) > MAX_KEPT:
            del self.certificates[min(self.certificates)]

    def _evaluated(self, fields: Fields, at: float) -> None:
        metrics = json.loads(str(fields.get("metrics") or "{}"))
        found = {"step": int(_number(fields, "step")), "at": round(at, 3), "loss": finite(_number(fields, "loss")),
                 "metrics": {name: finite(float(value)) for name, value in metrics.items()},
                 "best": bool(fields.get("best")), "stop": bool(fields.get("stop"))}  # fmt: skip
        self.evaluations = [one for one in self.evaluations if one["step"] < found["step"]]
        self.evaluations.append(found)
        if len(self.evaluations) > MAX_EVALUATIONS:
            self.evaluations = self.evaluations[::2]
        if found["best"]:
            self.best = found

    def _saved(self, fields: Fields, at: float) -> None:
        self.checkpoint = {"step": int(_number(fields, "step")), "at": round(at, 3)}
        self.checkpoints += 1

    def _suspected(self, fields: Fields, at: float) -> None:
        if len(self.suspected) < MAX_KEPT:
            self.suspected[int(_number(fields, "record"))] = str(fields.get("why", ""))

    def _set_aside(self, fields: Fields, at: float) -> None:
        record = int(_number(fields, "record"))
        self.suspected.pop(record, None)
        where, why = str(fields.get("where", "")), str(fields.get("why", ""))
        self.set_aside[record] = f"{where}: {why}" if where else why

    def _finished(self, fields: Fields, at: float) -> None:
        self.lanes.ended(at, "finished")
        self.phase = "finished"

    def _failed(self, fields: Fields, at: float) -> None:
        self.lanes.ended(at, "stopped")
        self.phase, self.why, self.hint = "failed", str(fields.get("why", "")), str(fields.get("hint", ""))

    def _stopping(self, fields: Fields, at: float) -> None:
        self.lanes.ended(at, "stopped")
        if not self.ended:
            self.phase, self.why = "stopped", str(fields.get("why", ""))

    def _launcher_ended(self, fields: Fields, at: float) -> None:
        (self._failed if fields.get("outcome") == "failed" else self._stopping)(fields, at)

    # For whoever looks. ----------------------------------------------------------------------------------------------

    def state(self, now: float) -> dict[str, Any]:
        """All of it as plain values that JSON can hold."""
        records_per_s, steps_per_s = (0.0, 0.0) if self.ended else self.recent.rates(now)
        left = max(self.total - self.step, 0)
        return {
            "job": dict(self.facts),
            "phase": self.phase, "why": self.why, "hint": self.hint,
            "at": round(now, 3), "started_at": self.started_at, "last_at": self.last_at,
            "step": self.step, "total": self.total, "records": self.records, "loss": self.loss,
            "not_finite": self.not_finite, "generation": self.generation, "workers": self.workers,
            "records_per_s": round(records_per_s, 2),
            "left_s": round(left / steps_per_s) if steps_per_s and left else None,
            "shares": self.shares[:64], "redone": self.redone,
            "series": {"width": self.series.width, **self.series.columns()},
            "lanes": self.lanes.rows(), "num_lanes": len(self.lanes.by_slot),
            "regroups": list(self.regroups), "num_regroups": self.regroups_seen, "deaths": dict(self.deaths),
            "gaps": {"count": self.gaps_s.count, "total_s": round(self.gaps_s.total, 4)},
            "evaluations": self.evaluations, "best": self.best,
            "certificates": [self.certificates[epoch] for epoch in sorted(self.certificates)],
            "checkpoint": self.checkpoint, "checkpoints": self.checkpoints,
            "suspected": [[record, why] for record, why in self.suspected.items()],
            "set_aside": [[record, why] for record, why in list(self.set_aside.items())[:MAX_KEPT]],
            "num_set_aside": len(self.set_aside),
            "events": list(self.said),
        }  # fmt: skip


def _number(fields: Fields, name: str) -> float:
    value = fields.get(name)
    return math.nan if name == "loss" and value is None else float(value or 0)


def _listed(text: Field) -> list[Any]:
    """A list that travels in a field as JSON text."""
    found = json.loads(text) if isinstance(text, str) and text else []
    return found if isinstance(found, list) else []
