"""What a job's events add up to, for the live page and Prometheus. The same events give the same view.

Bounded: adjacent points merge, lists keep their newest or most telling entries. An unknown event, or one with fields
that it cannot read, only becomes a line of the list: the page must never stop the job.
"""

import contextlib
import json
import math
import re
import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from trueline.engine.contract import parse_ref
from trueline.events import Field, render
from trueline.train.monitor.charts import PHASES, WORKER, CumulativeHistogram, Lanes, Point, Recent, StepCurves, finite
from trueline.train.reasons import group_by_reason

Fields = Mapping[str, Field]
MAX_EVENTS, MAX_REGROUPS, MAX_EVALUATIONS, MAX_KEPT, MAX_MEASURED = 80, 240, 400, 200, 512
_STILL_S = 1.0
_LOOK_BACK = 8
"""A line that one of the last eight repeats, apart from the worker's incarnation, is counted there."""
_INCARNATION = re.compile(r"(?<=worker-)(\d+)\.\d+")
_ONE = re.compile(r"(?<!\S)(1 (?:worker|epoch|parameter server))s")
_CLEAN_EXIT = "exit code 0"  # how a worker ends that has left as planned
_SILENT = {"step.applied", "worker.running", "worker.receiving", "worker.received", "group.released",
           "epoch.certified", "workers.measured", "checkpoint.saved", "evaluation.done",
           "servers.measured", "hosts.measured"}  # fmt: skip
"""Frequent events, which the page shows elsewhere."""
_BAD = {"worker.lost", "worker.killed", "worker.quarantined", "worker.fenced", "record.set_aside", "record.suspected",
        "host.avoided", "job.failed", "disk.full", "log.truncated", "checkpoint.failed", "master.lost",
        "agent.lost"}  # fmt: skip
_GOOD = {"job.finished", "job.restored", "disk.has_room"}
_WORDS = {
    "worker.started": "{worker} starts",
    "worker.joined": "{worker} is ready",
    "worker.lost": "{worker} died: {why}",
    "worker.killed": "{worker} was given up: {why}",
    "worker.leaving": "{worker} leaves as planned",
    "view.published": "generation {generation}: {workers} workers ({why})",
    "worker.quarantined": "worker {slot} is in quarantine, and is tried again in {retry_s:.0f} s: {why}",
    "worker.retried": "worker {slot} is tried again after its quarantine",
    "record.suspected": "record {record} is suspected: {why}",
    "record.set_aside": "record {record} ({where}) is set aside: {why}",
    "job.scaled": "from {before} to {workers} workers: {why}",
    "job.failed": "the job failed: {why}",
    "job.started": "the job starts: {workers} workers, {epochs} epochs",
    "job.finished": "the job is finished",
    "host.avoided": "{host} gets no workers for {retry_s:.0f} s: {why}",
    "host.clock": "the clock of {host} is {off}, compared with the master's",
    "servers.scaling": "from {before} to {servers} parameter servers: rows move",
    "servers.scaled": "{servers} parameter servers from now on",
    "server.waits": "{server} waits: {why}",
    "server.continues": "{server} continues",
    "cut.broken": "a checkpoint or a move of rows is tried again: {why}",
    "master.lost": "the master died and was started again",
    "agent.lost": "the engine's agent died and was started again",
    "disk.full": "the disk is full: {path} cannot be written ({free} free); {effect}",
    "disk.has_room": "there is room again: {path} is written",
    "log.truncated": "the log goes back to step {steps}: {why}",
}


def kind_of(why: str) -> str:
    """The kind of a death: a label with few values.

    >>> kind_of("killed by SIGSEGV while record 17 was tried"), kind_of("exit code 1"), kind_of("silent for 3.2 s")
    ('SIGSEGV', 'exit', 'silent')
    """
    signal = re.search(r"SIG[A-Z]+", why)
    if signal:
        return signal[0]
    kinds = {"exit": "exit", "silent": "silent", "stuck": "stuck", "not ready": "not_ready", "away": "master_away"}
    return next((kind for word, kind in kinds.items() if word in why), "other")


class JobView:
    """What is known of one job; `facts` are its settings."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self.changes = 0  # grows with every event
        self.series, self.recent, self.lanes = StepCurves(), Recent(), Lanes()
        self.phase, self.why, self.hint = "starting", "", ""
        self.started_at = self.last_at = 0.0
        self.step = self.steps_applied = self.records = self.total = self.generation = self.workers = 0
        self.loss: float | None = None
        self.not_finite: int | None = None  # the first step whose loss was NaN or infinite
        self.shares: list[int] = []
        self.measured: list[tuple[float, int, float, float | None]] = []  # time, step, learning rate, gradient norm
        self.memory: dict[str, int] = {}  # bytes, by worker
        self.hosts: list[dict[str, Any]] = []  # as the master described them last
        self.servers: list[dict[str, Any]] = []  # parameter servers, as the master measured them last
        self.redone = self.checkpoints = self.num_regroups = 0
        self.phase_ms = dict.fromkeys(PHASES, 0.0)
        self.gaps_s = CumulativeHistogram((0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0))
        self.deaths: Counter[str] = Counter()
        self.regroups: deque[dict[str, Any]] = deque(maxlen=MAX_REGROUPS)
        self.evaluations: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        self.certificates: dict[int, dict[str, Field]] = {}
        self.checkpoint: dict[str, Any] | None = None
        self.suspected: dict[int, str] = {}
        self.set_aside: dict[int, dict[str, Any]] = {}
        self.full: dict[str, str] = {}  # what waits for room on the disk
        self.lines: deque[list[Any]] = deque(maxlen=MAX_EVENTS)  # time, name, text, mood, how often
        self._last_step_at: float | None = None
        self._offset: float | None = None
        self._stamp = 0.0

    def apply(self, name: str, fields: Fields, at: float) -> None:
        """Enters an event that happened `at` seconds since 1970."""
        if self.ended and name in ("launcher.ended", "job.stopping"):  # the job's end is known already
            return
        self.last_at = max(at, self.last_at)
        self.started_at = self.started_at or self.last_at
        self.changes += 1
        with contextlib.suppress(LookupError, ValueError, TypeError, ArithmeticError, AttributeError):
            getattr(self, "_on_" + name.replace(".", "_"))(fields, self.last_at)  # else unknown, or of another version
        if name not in _SILENT and fields.get("why") != _CLEAN_EXIT:  # the departure has its line already
            self._add_line(name, fields)

    @property
    def ended(self) -> bool:
        return self.phase in ("finished", "failed", "stopped")

    def _add_line(self, name: str, fields: Fields) -> None:
        try:
            text = _WORDS[name].format(**fields)
        except (KeyError, ValueError):
            text = render(name, {key: value for key, value in fields.items() if key not in ("summary", "hint")})
        text = _ONE.sub(r"\1", text)
        mood = "bad" if name in _BAD else "good" if name in _GOOD else ""
        if name == "job.finished" and self.set_aside:
            count = len(self.set_aside)
            text, mood = f"the job is finished without {count} record{'s' if count > 1 else ''}", "bad"
        text, times = text[:400], 1
        kind = _INCARNATION.sub(r"\1", text)
        for line in list(self.lines)[-_LOOK_BACK:]:
            if line[1] == name and _INCARNATION.sub(r"\1", line[2]) == kind:
                self.lines.remove(line)
                times = line[4] + 1
        self.lines.append([round(self.last_at, 3), name, text, mood, times])

    def _on_step_applied(self, fields: Fields, at: float) -> None:
        when = self._time_of(fields, at)
        step, records, loss = int(_number(fields, "step")), int(_number(fields, "records")), _number(fields, "loss")
        phases = tuple(_number(fields, f"{name}_ms") for name in PHASES)
        self.workers = int(_number(fields, "workers"))
        seconds = 0.0 if self._last_step_at is None else max(when - self._last_step_at, 0.0)
        self._last_step_at = when
        self.series.add(Point(step, when, loss, records, seconds, phases, self.workers))
        self.recent.add(when, records)
        self.step, self.steps_applied, self.records = step + 1, self.steps_applied + 1, self.records + records
        self.total = int(_number(fields, "total")) or self.total
        self.loss = finite(loss)
        if self.loss is None and self.not_finite is None:
            self.not_finite = step
        for name, value in zip(PHASES, phases, strict=True):
            self.phase_ms[name] += value
        self.redone += int(_number(fields, "redone"))
        if fields.get("learning_rate") or fields.get("gradient_norm"):
            self.measured = [one for one in self.measured if one[1] < step]
            rate, norm = _number(fields, "learning_rate"), finite(_number(fields, "gradient_norm"))
            self.measured.append((round(when, 3), step, rate, norm))
            self.measured = self.measured[::2] if len(self.measured) > MAX_MEASURED else self.measured
        if "shares" in fields:
            self.shares = [int(share) for share in json.loads(str(fields["shares"]))]
        self._close_gap(fields, when, seconds)
        if not self.ended:
            self.phase = "training"

    def _time_of(self, fields: Fields, at: float) -> float:
        """When the step was applied, by the worker's clock; the smallest distance from `at` is that of the clocks."""
        stamp = _number(fields, "at_ns") * 1e-9
        if not stamp:
            return at
        distance = at - stamp
        if self._offset is None or distance < self._offset or stamp < self._stamp:  # a reboot, or another machine
            self._offset = distance
        self._stamp = stamp
        return max(self._last_step_at or 0.0, min(at, stamp + self._offset))

    def _close_gap(self, fields: Fields, when: float, seconds: float) -> None:
        """Ends the regroup of the step's generation, if this is its first step.

        The reporting worker may have joined just now and know no gap. The gap is then the time since the step before,
        unless the job was stopped already when the view came.
        """
        for regroup in reversed(self.regroups):
            if regroup["generation"] != fields.get("generation"):
                continue
            if regroup["until"] is None:
                was_stopped = when - seconds < regroup["at"] - _STILL_S
                gap_ms = _number(fields, "gap_ms") or (0.0 if was_stopped else seconds * 1e3)
                regroup.update(gap_ms=round(gap_ms, 1), until=round(when, 3), workers=self.workers)
                if gap_ms:
                    self.gaps_s.add(gap_ms / 1e3)
            return

    def _on_log_truncated(self, fields: Fields, at: float) -> None:
        steps = int(_number(fields, "steps"))
        self.series.rewind(steps)
        self.step = min(self.step, steps)

    def _on_view_published(self, fields: Fields, at: float) -> None:
        self.generation, self.workers = int(_number(fields, "generation")), int(_number(fields, "workers"))
        self.num_regroups += 1
        self.regroups.append({"generation": self.generation, "at": round(at, 3), "until": None, "gap_ms": 0.0,
                              "workers": self.workers, "why": str(fields.get("why", ""))})  # fmt: skip
        self.lanes.apply_view(at)
        self.phase, self.why, self.hint = "regrouping" if self.workers else "waiting for workers", "", ""

    def _on_worker_started(self, fields: Fields, at: float) -> None:
        self.lanes.start(str(fields["worker"]), at, self._last_step_at or at)
        if self.ended:  # the job was resumed
            self.phase, self.why, self.hint = "starting", "", ""

    def _on_worker_running(self, fields: Fields, at: float) -> None:
        if parse_ref(str(fields["worker"]))[0] == "saver":  # of each checkpoint another one
            return
        self.lanes.start(str(fields["worker"]), at, self._last_step_at or at)

    def _on_worker_joined(self, fields: Fields, at: float) -> None:
        self.lanes.mark_ready(str(fields["worker"]), at)
        self.total = int(_number(fields, "total_steps")) or self.total

    def _on_worker_lost(self, fields: Fields, at: float) -> None:
        why, ref = str(fields.get("why", "")), str(fields["worker"])
        if why == _CLEAN_EXIT:
            self.lanes.end(ref, at, "left", "left as planned")
        elif self.lanes.end(ref, at, "died", why):
            self.deaths[kind_of(why)] += 1

    _on_worker_killed = _on_worker_lost

    def _on_worker_leaving(self, fields: Fields, at: float) -> None:
        self.lanes.mark_leaving(str(fields["worker"]))

    def _on_job_scaled(self, fields: Fields, at: float) -> None:
        """When the job shrinks, its highest slots leave."""
        workers = int(_number(fields, "workers"))
        self.facts = {**self.facts, "workers": workers}
        for span in self.lanes.living():
            role, slot, _ = parse_ref(span.ref)
            if role == WORKER and slot >= workers:
                self.lanes.mark_leaving(span.ref)

    def _on_worker_receiving(self, fields: Fields, at: float) -> None:
        self.lanes.note(str(fields["worker"]), str(fields.get("does", "")))

    _on_worker_received = _on_worker_receiving

    def _on_workers_measured(self, fields: Fields, at: float) -> None:
        self.memory = {str(ref): int(size) for ref, size in json.loads(str(fields["memory"])).items()}

    def _on_servers_measured(self, fields: Fields, at: float) -> None:
        self.servers = [dict(one) for one in json.loads(str(fields["servers"]))][:MAX_KEPT]
        for one in self.servers:
            self.lanes.mark_ready(str(one["ref"]), at)

    def _on_hosts_measured(self, fields: Fields, at: float) -> None:
        self.hosts = [dict(one) for one in json.loads(str(fields["hosts"]))][:MAX_KEPT]

    def _on_worker_quarantined(self, fields: Fields, at: float) -> None:
        slot = fields.get("slot")
        number = parse_ref(str(fields["worker"]))[1] if slot is None else int(slot)
        self.lanes.quarantine(number, str(fields.get("why", "")))

    def _on_epoch_certified(self, fields: Fields, at: float) -> None:
        self.certificates[int(_number(fields, "epoch"))] = dict(fields)
        while len(self.certificates) > MAX_KEPT:
            del self.certificates[min(self.certificates)]

    def _on_evaluation_done(self, fields: Fields, at: float) -> None:
        metrics = json.loads(str(fields.get("metrics") or "{}"))
        evaluation = {"step": int(_number(fields, "step")), "at": round(at, 3), "loss": finite(_number(fields, "loss")),
                      "metrics": {name: finite(float(value)) for name, value in metrics.items()},
                      "best": bool(fields.get("best")), "stop": bool(fields.get("stop"))}  # fmt: skip
        earlier = [other for other in self.evaluations if other["step"] < evaluation["step"]]
        self.evaluations = [*earlier, evaluation]
        if len(self.evaluations) > MAX_EVALUATIONS:
            self.evaluations = self.evaluations[::2]
        if evaluation["best"]:
            self.best = evaluation

    def _on_checkpoint_saved(self, fields: Fields, at: float) -> None:
        self.checkpoint = {"step": int(_number(fields, "step")), "at": round(at, 3)}
        self.checkpoints += 1

    def _on_record_suspected(self, fields: Fields, at: float) -> None:
        if len(self.suspected) < MAX_KEPT:
            self.suspected[int(_number(fields, "record"))] = str(fields.get("why", ""))

    def _on_record_set_aside(self, fields: Fields, at: float) -> None:
        record = int(_number(fields, "record"))
        self.suspected.pop(record, None)
        where, why = str(fields.get("where", "")), str(fields.get("why", ""))
        self.set_aside[record] = {"record": record, "where": f"{where}: " if where else "", "why": why}

    def _on_disk_full(self, fields: Fields, at: float) -> None:
        since = time.strftime("%H:%M:%S", time.localtime(at))
        text = f"{fields['path']} cannot be written since {since}, {fields['free']} free: {fields['effect']}"
        self.full[str(fields["what"])] = text

    def _on_disk_has_room(self, fields: Fields, at: float) -> None:
        self.full.pop(str(fields["what"]), None)

    def _on_job_finished(self, fields: Fields, at: float) -> None:
        self.lanes.end_all(at, "finished")
        self.phase = "finished"

    def _on_job_failed(self, fields: Fields, at: float) -> None:
        self.lanes.end_all(at, "stopped")
        self.phase, self.why, self.hint = "failed", str(fields.get("why", "")), str(fields.get("hint", ""))

    def _on_job_stopping(self, fields: Fields, at: float) -> None:
        self.lanes.end_all(at, "stopped")
        if not self.ended:
            self.phase, self.why = "stopped", str(fields.get("why", ""))

    def _on_launcher_ended(self, fields: Fields, at: float) -> None:
        (self._on_job_failed if fields.get("outcome") == "failed" else self._on_job_stopping)(fields, at)

    def _list_set_aside(self) -> list[list[Any]]:
        """A row for each reason: the record, or how many there are, and the first one's reason."""
        rows = []
        for group in group_by_reason(list(self.set_aside.values())):
            name = group[0]["record"] if len(group) == 1 else f"{len(group)} records"
            rows.append([name, group[0]["where"] + group[0]["why"]])
        return rows

    def state(self, now: float) -> dict[str, Any]:
        """Everything as plain JSON values."""
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
            "measured": self.measured, "memory": dict(list(self.memory.items())[:MAX_KEPT]),
            "servers": self.servers, "hosts": self.hosts, "shares": self.shares[:64], "redone": self.redone,
            "series": {"width": self.series.width, **self.series.columns()},
            "lanes": self.lanes.rows(), "num_lanes": len(self.lanes.by_slot),
            "regroups": list(self.regroups), "num_regroups": self.num_regroups, "deaths": dict(self.deaths),
            "gaps": {"count": self.gaps_s.count, "total_s": round(self.gaps_s.total, 4)},
            "evaluations": self.evaluations, "best": self.best,
            "certificates": [self.certificates[epoch] for epoch in sorted(self.certificates)],
            "checkpoint": self.checkpoint, "checkpoints": self.checkpoints,
            "suspected": [[record, why] for record, why in self.suspected.items()],
            "set_aside": self._list_set_aside()[:MAX_KEPT],
            "full": list(self.full.values()), "num_set_aside": len(self.set_aside),
            "events": list(self.lines),
        }  # fmt: skip


def _number(fields: Fields, name: str) -> float:
    value = fields.get(name)
    return math.nan if name == "loss" and value is None else float(value or 0)
