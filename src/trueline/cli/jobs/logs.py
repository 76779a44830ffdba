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
from trueline.cli.options import job_argument, json_option, verb

if TYPE_CHECKING:
    from trueline.train.job_dir import JobDir

_EXAMPLES = """
trueline logs digits-1
    what happened in runs/digits-1, a line for each event and for each tenth of the way

trueline logs -f digits-1
    follows it to its end, with a bar on a terminal

trueline logs runs/digits-1 --worker worker-1.0
    what worker 1, the first of that place, wrote; also: master, agent, launcher, events
"""
POLL_S = 0.2


@verb("logs", examples=_EXAMPLES)
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.option("--worker", "which", metavar="REF|NAME", help="The log of one process, or the events as JSON.")
@json_option
def command(job: str, follow: bool, which: str | None, as_json: bool) -> None:
    """Show what happened in a job, or what a process of it wrote.

    Without --worker it is the job's story: who came and went and why, checkpoints, evaluations, progress. JOB
    is a job's folder, or its name under ./runs; it may run or have ended. --json prints the events, one JSON object
    on each line.
    """
    from trueline.train.job_dir import JobDir, parse_events
    from trueline.train.launch.jobs import find_job

    folder = JobDir(find_job(job))
    going_on: Callable[[], bool] = folder.is_held if follow else (lambda: False)
    if as_json and which is None:
        which = "events"
    if which is not None:
        for line in lines(log_of(folder, which), going_on):
            click.echo(line, nl=False)
        return
    story = parse_events(lines(folder.events, going_on))
    if follow:
        with progress(stream=sys.stdout):
            for name, fields, _ in story:
                events.emit(name, **fields)
        return
    tell = Lines(sys.stdout)
    for name, fields, at in story:
        tell.hear(name, fields, at=at)


def lines(path: Path, going_on: Callable[[], bool]) -> Iterator[str]:
    """Whole lines of a file that may be appended to, until it is at its end and nothing goes on."""
    while not path.exists() and going_on():
        time.sleep(POLL_S)  # a process that has not written yet
    if not path.exists():
        return
    with path.open(errors="replace") as file:
        part = ""
        while True:
            more = going_on()  # asked before reading: what was written before the end is read
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

    Raises UsageError with what there is.
    """
    from trueline.errors import UsageError, closest, join_names

    files = {path.stem: path for path in folder.logs.glob("*.log")} | {"events": folder.events}
    wanted = f"worker-{which}" if which[:1].isdecimal() else which
    same_place = [name for name in files if name.rpartition(".")[0] == wanted]
    found = wanted if wanted in files else max(same_place, key=lambda name: int(name.rpartition(".")[2]), default="")
    if not found:
        near = closest(wanted, files)
        raise UsageError(
            f"{folder.path.name} has no log of '{which}' (has: {join_names(sorted(files))})",
            hint=f"did you mean '{near}'?" if near else "",
        )
    return files[found]
