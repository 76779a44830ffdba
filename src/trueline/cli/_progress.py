"""Shows events as progress: bars on a terminal, else a line for each tenth.

Events in _WORDS are formatted by it, those in _MINOR appear only with --debug, and any other event is rendered as one
line.
"""

import contextlib
import json
import os
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

import click

from trueline import events
from trueline.events import Field
from trueline.train.reasons import find_reason

if TYPE_CHECKING:
    from rich.progress import TaskID

DEBUG = "TRUELINE_DEBUG"
"""Environment variable of --debug, so that child processes get it too."""
_COUNTS = {
    "step.applied": ("training", "step", "total"),
    "probe.done": ("proving", "done", "total"),
    "proof.advanced": ("proving", "done", "total"),
    "check.advanced": ("checking", "done", "total"),
    "columns.advanced": ("reading columns", "done", "total"),
    "evaluation.advanced": ("evaluating", "done", "total"),
    "prediction.advanced": ("predicting", "done", "total"),
    "comparison.advanced": ("comparing", "done", "total"),
    "ranges.measured": ("measuring the ranges of inputs", "done", "total"),
    "sensitivity.advanced": ("looking for the operators to blame", "done", "total"),
}
"""Events that count: the bar's label, the field of the count and the field of its end.

Steps are numbered from 0, so that after step 0 one is done; the other fields are counts.
"""
_DETAILS = ("format", "epoch", "loss", "workers", "records_per_s")
_ENDS = {"job.finished", "stage.started", "program.proven", "program.refused", "program.untried", "bundle.sealed"}
_WORDS = {
    "stage.started": "[{number}/{of}] {stage}",
    "compress.started": "  {bundle}: {metric} {value:.4f} over {records} evaluation records",
    "search.restored": "  continues with {rows} candidates in {folder}",
    "search.ended": "  {why}: {tried} candidates were tried",
    "search.stopped": "  stopped: the best so far, {best}, is {path}; the same command continues",
    "candidate.started": "  {name} ...",
    "candidate.judged": "  {name}: {verdict} {why}",
    "job.started": "  job {job}: {workers} workers, {epochs} epochs",
    "job.trying": "  before step 0 the loss is tried {what} ({seconds:.0f} s so far)",
    "view.published": "  generation {generation}: {workers} workers ({why})",
    "weights.loaded": "  {tensors} tensors from {path}; new layers: {new}; not used: {unused}",
    "job.restored": "  continuing from {checkpoint}, step {step}",
    "log.truncated": "  the log goes back to step {steps}: {why}",
    "checkpoint.refused": "  skipped {path}: {why}",
    "checkpoint.failed": "  no checkpoint at step {step}: {why}",
    "page.opened": "  see it at {url}",
    "page.failed": "  {why}",
    "config.ignored": "  {key} is not read: {why}",
    "job.restarted": "  {why}",
    "hosts.listening": "  other hosts join with: {line}",
    "head.started": "  the head started on {host} ({engine})",
    "host.submitted": "  {host} is submitted: {why}",
    "host.not_submitted": "  {host} was not submitted: {why}; again in {again_s:.0f} s",
    "launch.given_back": "  {why}",
    "host.cancelled": "  {host} is given back: {why}",
    "host.ended": "  {host} has ended: {why}",
    "duties.delayed": "  {what} does not answer, and training continues: {why}",
    "duties.resumed": "  {what} answers again",
    "manifest.noted": "  note: {why}",
    "learner.joined": "  learner {learner} is ready on {host} ({address})",
    "learner.ended": "  learner {learner} has ended: {why}",
    "learner.lost": "  learner {learner} is lost: {why}",
    "learner.leaving": "  learner {learner} leaves: {why}",
    "learner.refused": "  learner {learner} cannot start: {why}",
    "learner.localized": "  {file}: /job is this job's own folder, in {places} places",
    "learners.started": "  {learners} learners start (start {start})",
    "learners.restarting": "  all learners start again: {why}",
    "learners.halting": "  the learners get SIGTERM, and some seconds for a checkpoint of their own ({why})",
    "group.formed": "  a process group of {size} has formed ({key})",
    "group.corrected": "  ranks are corrected: {why}",
    "group.waits": "  a process group of {size} has {has} members, of the learners {learners} ({key})",
    "data.fetching": "  {objects} objects of bucket {bucket} are fetched, {megabytes:.0f} MB",
    "results.delayed": "  results are not in their bucket yet: {why}",
    "results.lost": "  results did not reach their bucket: {why}; they are in {where}",
    "ssh.lost": "  the ssh connection to {host} ended: {why}; again in {again_s:.0f} s",
    "ssh.refused": "  {host} does not take part: {why}",
    "host.joined": "  {host} joins with room for {cores} workers ({address})",
    "host.returned": "  {host} is back ({address})",
    "host.away": "  the connection to {host} is lost; it has {workers} workers",
    "host.lost": "  {host} is given up: {why}; {workers} workers are lost",
    "host.leaving": "  {host} takes its cores back; {workers} workers leave",
    "host.left": "  {host} has left",
    "host.refused": "  {host} ({address}) may not join: {why}",
    "host.short": "  {host} gets {places} workers on its {cores} cores: it has {has} of memory, a worker takes {takes}",
    "host.avoided": "  {host} gets no workers for {retry_s:.0f} s: {why}",
    "host.clock": "  the clock of {host} is {off}, compared with the master's: it labels logs and files alone",
    "servers.scaling": "  from {before} to {servers} parameter servers: rows move",
    "servers.scaled": "  {servers} parameter servers from now on",
    "server.waits": "  {server} waits: {why}",
    "server.continues": "  {server} continues",
    "job.waiting": "  the job waits: {why}, and there is room for {room}",
    "join.prepared": "  the files of job {job} are here: {files}, {fetched} of them fetched",
    "join.joined": "  lends {cores} cores to job {job}; workers listen at {address}",
    "join.clock": "  the clock of this host is {off}, compared with the master's: it labels logs and files alone",
    "join.fenced": "  ended the workers here: {why}",
    "lender.lent": "  {host} lends {cores} cores to the jobs of {store}",
    "lender.started": "  {submission} starts on {slots} of them",
    "lender.ended": "  {submission} has ended: {why}",
    "lender.leaving": "  takes the cores back from {running} submissions (Ctrl-C again ends them at once)",
    "lender.away": "  the store {store} does not answer: {why}; what runs here continues",
    "lender.back": "  the store {store} answers again",
    "standby.ended": "  this host will not lead the job if the master's host dies: {why}",
    "standby.waits": "  no master answers, and {why}",
    "standby.leads": "  no master answers at {host}: this host leads the job now, after generation {generation}",
    "job.superseded": "  {host} leads the job now ({address})",
    "store.away": "  the store {where} does not answer: {why}; {effect}",
    "store.back": "  the store {where} answers again",
    "join.leaving": "  takes the cores back: workers leave between two steps (Ctrl-C again ends them at once)",
    "job.scaled": "  {workers} workers from now on ({why})",
    "job.halting": "  the job stops at the next step, with a checkpoint of it ({why})",
    "job.failed": "  the job failed: {why}",
    "launcher.ended": "  the job is over: {outcome} {why}",
    "worker.leaving": "  {worker} has to leave",
    "worker.killed": "  killed {worker}: {why}",
    "fault.unreachable": "  no worker will be killed at step {step}: {why}",
    "worker.quarantined": "  worker {slot} is in quarantine: {why}",
    "worker.retried": "  worker {slot} is tried again after its quarantine",
    "sums.ordered": "  the loop computes in half precision: gradients are summed by fixed shards, so that any number "
    'of workers trains the same; with precision = "bf16" it is faster, and they differ by its rounding',
    "disk.full": "  the disk is full: {path} cannot be written ({free} free); {effect}",
    "disk.has_room": "  there is room again after {seconds:.1f} s: {path} is written",
    "record.suspected": "  record {record} is suspected: {why}",
    "record.set_aside": "  record {record} ({where}) is set aside: {why}",
    "evaluation.done": "  evaluation after step {step}: loss {loss:.4g}, {metrics}",
    "checkpoint.chosen": "  using the best checkpoint: {path}",
    "checkpoint.skipped": "  no checkpoint at step {step}: {why}",
    "pool.lost": "  process {worker} is replaced: {why}",
    "master.lost": "  the master died and is started again",
    "agent.lost": "  the engine's agent died and is started again",
    "model.examined": "  is the model a function of its inputs?",
    "model.tracing": "  torch.export traces the model",
    "model.as_trained": "  {why}",
    "program.retraced": "  torch.export traces it another way: {how}",
    "claim.tried": "  a narrower range is tried: {range}",
    "claim.kept": "  the narrower range proves no more programs; the wider one is kept",
    "claim.narrowed": "  the range is narrowed: {to}",
    "rows.shortened": "  rows of {tables} are shortened to their max_norm now, as their first lookup would",
    "example.excluded": "  {format}: warning: its range, {range}, leaves out your {example}",
    "answers.jump": "  a rounded number decides an answer, where runtimes may differ: {place}",
    "program.offloaded": "  offload: {parts} parts go to ONNX Runtime, {kept} of {operators} operators stay",
    "program.emitting": "  {format}: writing the program",
    "program.proven": "  {format}: proven on {probes} probes, {given_error:.1e} off at most on given records; {range}",
    "program.refused": "  {format}: refused: {why} {line}",
    "program.untried": "  {format}: {why} {line}",
    "model.observed": "  the model answers {probes} probes",
    "stage.runs": "  {what}: {seconds} s so far{at}",
    "bundle.sealed": "  sealed {path}",
    "doctor.started": "  recording the calls of each submodule of {recipe}",
    "doctor.examining": "  {submodule}: traced, scripted, exported",
    "doctor.rewritten": "  {module}: {steps}; equal to the original on {probes} calls",
    "doctor.applied": "  {files} files are rewritten in {folder}",
    "doctor.not_applied": "  {file} is left as it is: {why}",
    "doctor.progress_not_kept": "  the next run will not know this one's progress: {why}",
    "model.registered": "  registered {uri}, alias {alias}",
    "server.started": "  {url} serves {model} version {version}",
}
_MINOR = {
    "server.ready", "servers.measured", "workers.measured", "hosts.measured",
    "worker.started", "worker.running", "worker.lost", "worker.joined", "group.released", "epoch.certified",
    "worker.receiving", "worker.received", "checkpoint.saved", "job.finished", "job.stopping", "capture.started",
    "program.emitted", "program.unfollowed", "record.suspected",
}  # fmt: skip
_STYLES = {
    "stage.started": "bold", "disk.full": "bold red", "job.failed": "bold red", "checkpoint.failed": "red",
    "worker.quarantined": "red", "record.set_aside": "yellow",
}  # fmt: skip
"""On a terminal."""
WINDOW_NS = 5_000_000_000
"""Records a second are the mean over this time."""


@dataclass(slots=True)
class Sparse:
    """Selects the events of a count that get a line: the first, each further tenth, the last."""

    _next: dict[str, int] = field(default_factory=dict)

    def due(self, name: str, done: int, total: int | None) -> bool:
        """True when `done` has reached the next mark of `name`."""
        step = max(1, round(total / 10)) if total else 100
        if done >= self._next.get(name, 0):
            self._next[name] = (done // step + 1) * step
            return True
        return total is not None and done >= total


def read_count(name: str, fields: Mapping[str, Field]) -> tuple[str, int, int | None] | None:
    """Label, count and end of an event that counts."""
    label, done_key, total_key = _COUNTS.get(name, ("", "", ""))
    done, total = fields.get(done_key), fields.get(total_key)
    if not isinstance(done, int):
        return None
    return label, done + (done_key == "step"), total if isinstance(total, int) and total else None


def format_event(name: str, fields: Mapping[str, Field]) -> str | None:
    """The line for an event that does not count; None for a minor one without --debug."""
    if name in _MINOR and not os.environ.get(DEBUG):
        return None
    try:
        line = _WORDS[name].format(**_format_metrics(fields))
    except (KeyError, ValueError, AttributeError):  # no words for it, or not for these fields
        return events.render(name, dict(fields))
    line = re.sub(r"\b1 (worker|epoch)s\b", r"1 \1", events.printable(line))
    return line.removesuffix(", 0 epochs").rstrip(" ,")  # a script, whose epochs are unknown; no metrics


class EventText:
    """Formats events as `format_event` does; records that are set aside for equal reasons are one line with a count,
    which comes again when it has doubled. Views that only move such records are minor. With parameter servers a death
    makes no new view, so it gets a line of its own."""

    def __init__(self) -> None:
        self._alike: Counter[str] = Counter()
        self._has_servers = False

    def format(self, name: str, fields: Mapping[str, Field]) -> str | None:
        why = str(fields.get("why", ""))
        self._has_servers |= str(fields.get("worker", "")).startswith("server-")
        if name == "worker.lost" and self._has_servers:
            return events.printable(f"  {fields['worker']} is lost: {why}; another one takes its place")
        if name == "view.published" and why.startswith("record") and not os.environ.get(DEBUG):
            return None
        if name != "record.set_aside":
            return format_event(name, fields)
        reason = find_reason(why)
        self._alike[reason] += 1
        count = self._alike[reason]
        if count == 1:
            return format_event(name, fields)
        return None if count & (count - 1) else events.printable(f"  {count} records are set aside for: {reason}")


def _format_metrics(fields: Mapping[str, Field]) -> dict[str, Field]:
    """`fields` with an evaluation's metrics, which are JSON, as text that marks the best so far."""
    if not isinstance(fields.get("metrics"), str):
        return dict(fields)
    named = json.loads(str(fields["metrics"]) or "{}").items()
    best = ["the best so far"] if fields.get("best") else []
    return {**fields, "metrics": ", ".join([*(f"{name} {value:.4g}" for name, value in named), *best])}


def detail(fields: Mapping[str, Field]) -> str:
    """The fields beside the count, as short text: `loss=0.31 workers=3 records_per_s=5120`."""
    shown = {key: fields[key] for key in _DETAILS if fields.get(key) is not None}
    return events.render("", shown).strip()


class StepPace:
    """Adds to the events of steps their epoch and the records a second, which take several events."""

    def __init__(self) -> None:
        self._epochs = 0
        self._marks: deque[tuple[int, int]] = deque()
        """(time in ns, records) of the steps of the last WINDOW_NS."""

    def extend(self, name: str, fields: dict[str, Field]) -> dict[str, Field]:
        epochs = fields.get("epochs")
        if name == "job.started" and isinstance(epochs, int):
            self._epochs = epochs
        if name != "step.applied":
            return fields
        step, total, at, records = (fields.get(key) for key in ("step", "total", "at_ns", "records"))
        more: dict[str, Field] = {}
        if self._epochs and isinstance(step, int) and isinstance(total, int) and total:
            more["epoch"] = f"{step * self._epochs // total + 1}/{self._epochs}"
        if isinstance(at, int) and isinstance(records, int):
            self._marks.append((at, records))
            while at - self._marks[0][0] > WINDOW_NS:
                self._marks.popleft()
            if seconds := (at - self._marks[0][0]) / 1e9:
                counted = sum(count for _, count in self._marks) * (1 - 1 / len(self._marks))
                more["records_per_s"] = round(counted / seconds)
        return fields | more


@contextlib.contextmanager
def progress(*, quiet: bool = False, stream: TextIO | None = None) -> Iterator[None]:
    """Shows the events of this process on `stream` (stderr) while the block runs."""
    stream = stream or sys.stderr
    if quiet:
        yield
    elif stream.isatty():
        with contextlib.closing(_Bars(stream)) as bars, events.listening(bars.hear):
            yield
    else:
        with events.listening(Lines(stream).hear):
            yield


class Lines:
    """Writes a line for each event; with its time of day, if `at` (seconds since 1970) is given."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._sparse, self._pace, self._text = Sparse(), StepPace(), EventText()

    def hear(self, name: str, fields: dict[str, Field], *, at: float | None = None) -> None:
        fields = self._pace.extend(name, fields)
        count = read_count(name, fields)
        if name in _ENDS:
            self._sparse = Sparse()
        if count is None:
            line = self._text.format(name, fields)
            if line is not None:
                self._write(line, at)
        elif self._sparse.due(name, count[1], count[2]):
            label, done, total = count
            self._write(f"{label} {done}{f'/{total}' if total else ''} {detail(fields)}".rstrip(), at)

    def _write(self, line: str, at: float | None) -> None:
        stamp = "" if at is None else time.strftime("%H:%M:%S ", time.localtime(at))
        with contextlib.suppress(OSError, ValueError):  # the reader is gone (`2>&1 | head`): continue
            self._stream.write(f"{stamp}{line}\n")
            self._stream.flush()


class _Bars:
    """One bar for each count; other events scroll by above them."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress: Progress = Progress(
            *columns, TextColumn("{task.fields[detail]}"), console=Console(file=stream), transient=True
        )
        self._tasks: dict[str, TaskID] = {}
        self._pace, self._text = StepPace(), EventText()

    def close(self) -> None:
        self._clear()
        self._progress.stop()

    def hear(self, name: str, fields: dict[str, Field]) -> None:
        fields = self._pace.extend(name, fields)
        count = read_count(name, fields)
        if count is None:
            if name in _ENDS:
                self._clear()
            line = self._text.format(name, fields)
            if line is not None:
                style = _STYLES.get(name, "default")
                self._progress.console.print(line, style=style, markup=False, highlight=False)
            return
        label, done, total = count
        if label not in self._tasks:
            self._progress.start()  # not before: two displays on one terminal erase each other
            self._tasks[label] = self._progress.add_task(label, total=total, detail="")
        self._progress.update(self._tasks[label], completed=done, total=total, detail=detail(fields))

    def _clear(self) -> None:
        """Replaces bars by lines."""
        for label, task in self._tasks.items():
            bar = next(bar for bar in self._progress.tasks if bar.id == task)
            total = f"/{bar.total:g}" if bar.total else ""
            line = f"  {label} {bar.completed:g}{total} {bar.fields['detail']}".rstrip()
            self._progress.console.print(line, style="dim", markup=False, highlight=False)
            self._progress.remove_task(task)
        self._tasks.clear()


@contextlib.contextmanager
def advance_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for work that reports `(done, of)`, if stderr is a terminal, without --quiet and --json."""
    from rich.console import Console
    from rich.progress import Progress

    console, options = Console(stderr=True), click.get_current_context().params
    hidden = options["quiet"] or options["as_json"] or not console.is_terminal
    with Progress(console=console, disable=hidden, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)
