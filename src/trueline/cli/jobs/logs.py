"""`trueline logs`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trueline import events
from trueline.cli._progress import Lines, progress
from trueline.cli.jobs import _stores
from trueline.cli.options import job_argument, verb

if TYPE_CHECKING:
    from trueline.train.cluster.store import JobStore
    from trueline.train.job_dir import JobDir

_EXAMPLES = """
trueline logs digits-1
    the events of runs/digits-1, and a line for each tenth of its steps

trueline logs -f digits-1
    follows it to its end, with a bar on a terminal

trueline logs runs/digits-1 --worker worker-1.0
    the output of the first worker of slot 1; also: master, agent, launcher, events
"""
POLL_S = 0.2


@verb("logs", examples=_EXAMPLES)
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Continue until the job ends.")
@click.option("--worker", "which", metavar="REF|NAME", help="The log of one process, or the events as JSON.")
@_stores.store_option
def command(job: str, follow: bool, which: str | None, store: str | None) -> None:
    """Show the events of a job, or the output of one of its processes.

    Without --worker: workers that came and went and why, checkpoints, evaluations, progress. JOB is a job's folder, or
    its name under ./runs, or in a store; it may wait, run or have ended. --json prints the events, one JSON object on
    each line.
    """
    from trueline.train.job_dir import JobDir, parse_events
    from trueline.train.launch.jobs import find_job

    if (where := _stores.find_stored(job, store)) is not None:
        show_stored(where, follow, which)
        return
    folder = JobDir(find_job(job))
    is_running: Callable[[], bool] = folder.is_held if follow else (lambda: False)
    if click.get_current_context().params["as_json"] and which is None:
        which = "events"
    if which is not None:
        for line in read_lines(log_of(folder, which), is_running):
            click.echo(line, nl=False)
        return
    parsed = parse_events(read_lines(folder.events, is_running))
    if follow:
        with progress(stream=sys.stdout):
            for name, fields, _ in parsed:
                events.emit(name, **fields)
        return
    writer = Lines(sys.stdout)
    for name, fields, at in parsed:
        writer.hear(name, fields, at=at)


def show_stored(where: JobStore, follow: bool, which: str | None) -> None:
    """The log of a submitted job, and while there is none why it waits."""
    from trueline.train.job_dir import parse_events

    as_json = click.get_current_context().params["as_json"] and which is None
    if which is None and not as_json and where.read_job().manifest:
        show_learners(where, follow)
        return
    name = "events" if which is None else find_stored_log(where, which)
    lines = read_stored(where, f"logs/{name}.log", follow)
    if which is not None or as_json:
        for line in lines:
            click.echo(line, nl=False)
        return
    writer = Lines(sys.stdout)
    for event, fields, at in parse_events(lines):
        writer.hear(event, fields, at=at)
    if not follow:
        say_state(where, "")


def show_learners(where: JobStore, follow: bool) -> None:
    """The events of a job of scripts, and between them what its learners print, each line after their number."""
    from trueline.train.job_dir import parse_events

    writer = Lines(sys.stdout)
    for name, line in read_together(where, follow):
        if name != "events":
            click.echo(f"[{name.removeprefix('learner-')}] {line}", nl=False)
            continue
        for event, fields, at in parse_events([line]):
            if event != "loop.logged":  # the line that it is from is here
                writer.hear(event, fields, at=at)
    if not follow:
        say_state(where, "")


def read_together(where: JobStore, follow: bool) -> Iterator[tuple[str, str]]:
    """Whole lines of the events and of each learner, with the name of the log, until the launch has ended."""
    at: dict[str, int] = {}
    said = ""
    while True:
        launch = where.last_launch()
        more = follow and launch is not None and where.read_end(launch.number) is None
        moved = False
        logs = {name.partition(".log")[0] for name in where.names("logs")}
        for name in ["events", *sorted(name for name in logs if name.startswith("learner-"))]:
            data, start = where.read_log(f"logs/{name}.log"), at.get(name, 0)
            at[name] = data.rfind(b"\n") + 1
            moved = moved or at[name] > start
            for line in data[start : at[name]].decode(errors="replace").splitlines(keepends=True):
                yield name, line
        if not more:
            return
        if not moved:
            said = say_state(where, said)
            if said.startswith("dead"):
                return
            time.sleep(POLL_S)  # as tail -f does


def read_stored(where: JobStore, name: str, follow: bool) -> Iterator[str]:
    """Whole lines of a log in a store, until the launch has ended."""
    at, said = 0, ""
    while True:
        launch = where.last_launch()
        more = follow and launch is not None and where.read_end(launch.number) is None
        data = where.read_log(name)
        end = data.rfind(b"\n") + 1
        yield from data[at:end].decode(errors="replace").splitlines(keepends=True)
        if not more:
            return
        if end == at:
            said = say_state(where, said)
            if said.startswith("dead"):
                return
        at = end
        time.sleep(POLL_S)  # as tail -f does


def say_state(where: JobStore, before: str) -> str:
    """Tells the state of a job that does not run, if it is another one than `before`; returns it."""
    from trueline.train.cluster import operate

    job = operate.read(where)
    said = f"{job.state}: {job.why}" if job.state != "running" or job.why else job.state
    if said != before and said != "running":
        click.echo(f"  {job.name} is {said}")
    return said


def find_stored_log(where: JobStore, which: str) -> str:
    """The name of a log in a store. Raises UsageError that lists the logs."""
    from trueline.errors import UsageError, join_names

    files = {name.partition(".log")[0] for name in where.names("logs")}
    name = f"worker-{which}" if which[:1].isdecimal() else which
    name = name if name in files or not which.isdecimal() else f"learner-{which}"
    alike = [other for other in files if other.rpartition(".")[0] == name or other.endswith(f".{name}")]
    name = name if name in files else max(alike, default=name)
    if name not in files:
        raise UsageError(f"{where.name} has no log of '{which}' (has: {join_names(sorted(files))})")
    return name


def read_lines(path: Path, is_running: Callable[[], bool]) -> Iterator[str]:
    """Whole lines of a file that may grow, until its end once the job has ended."""
    while not path.exists() and is_running():
        time.sleep(POLL_S)  # a process that has not written yet
    if not path.exists():
        return
    with path.open(errors="replace") as file:
        part = ""
        while True:
            more = is_running()  # before reading: lines written before the end are read
            for text in file:
                part += text
                if part.endswith("\n"):
                    yield part
                    part = ""
            if not more:
                break
            time.sleep(POLL_S)  # as tail -f does
        if part:
            yield part


def log_of(folder: JobDir, which: str) -> Path:
    """The file of `master`, `agent`, `launcher`, `events`, `worker-1.0`, or the newest of `worker-1`.

    Raises UsageError that lists the logs.
    """
    from trueline.errors import UsageError, closest, join_names

    files = {path.stem: path for path in folder.logs.glob("*.log")} | {"events": folder.events}
    name = f"worker-{which}" if which[:1].isdecimal() else which
    if name not in files:
        incarnations = [other for other in files if other.rpartition(".")[0] == name]
        name = max(incarnations, key=lambda other: int(other.rpartition(".")[2]), default=name)
    if name not in files:
        near = closest(name, files)
        raise UsageError(
            f"{folder.path.name} has no log of '{which}' (has: {join_names(sorted(files))})",
            hint=f"did you mean '{near}'?" if near else "",
        )
    return files[name]
