"""`trueline status`."""

from __future__ import annotations

import time
from typing import Any

from trueline.cli.jobs.jobs import age, table
from trueline.cli.options import job_argument, json_option, say, verb

_EXAMPLES = """
trueline status digits-1
    state, step, loss, and each worker of runs/digits-1: its steps, what it does, records a second

trueline status runs/digits-1 --json
    the same for a script
"""
_EVALUATIONS = {"evaluation": "last evaluation", "best": "best evaluation"}


@verb("status", examples=_EXAMPLES)
@job_argument
@json_option
def command(job: str, as_json: bool) -> None:
    """Show how a job is.

    A running job's master is asked; when it is away, and for a job that has ended, the job's folder tells as
    much as it knows. JOB is a job's folder, or its name under ./runs.
    """
    from trueline.train.job_dir import JobDir
    from trueline.train.launch import jobs

    folder = jobs.find_job(job)
    found = jobs.read_job(folder)
    live = jobs.status(folder) if found.state == "running" else None
    master = JobDir(folder).read_master()
    facts = {**found.as_dict(), "page": "" if master is None else master.page, "live": live}
    say(text_of(facts, time.time()), facts, as_json=as_json)


def text_of(facts: dict[str, Any], now: float) -> str:
    """The facts for people."""
    from trueline.train.launch.jobs import format_set_aside

    live = facts["live"] or {}
    why = f" ({facts['why']})" if facts["why"] else ""
    lines = [f"{facts['name']}: {facts['state']}{why}, began {age(now - facts['started'])} ago", _where(facts, live)]
    if facts["state"] == "running" and not live:
        lines.append("the master does not answer; training goes on without it, and the launcher starts it again")
    if facts["state"] == "running" and facts["page"]:
        lines.append(f"page: {facts['page']}")
    lines += [_evaluation(label, live[key]) for key, label in _EVALUATIONS.items() if live.get(key)]
    lines += [f"quarantined: worker {one['slot']}: {one['why']}" for one in live.get("quarantined", ())]
    lines += map(format_set_aside, live.get("set_aside", ()))
    members = live.get("members")
    if members:
        head = ("WORKER", "STEPS", "DOES", "FOR", "RECORDS/S")
        lines.append(table([head, *(_member(member) for member in members)]))
    if live.get("pending"):
        lines.append(f"starting: {', '.join(live['pending'])}")
    if facts["state"] in ("dead", "failed", "stopped"):
        lines.append(f"go on with: trueline resume {facts['folder']}")
    return "\n".join(lines)


def _where(facts: dict[str, Any], live: dict[str, Any]) -> str:
    loss = live.get("loss", facts["loss"])
    parts = [
        f"step {live.get('committed', facts['step'])} of {facts['total'] or '?'}",
        f"epoch {live['epoch'] + 1}" if live else "",
        f"loss {loss:.4g}" if loss is not None else "",
        f"{live['records_per_s']:.0f} records/s" if live else "",
        f"{len(live['members'])} of {live['workers']} workers, generation {live['generation']}" if live else "",
        f"checkpoint of step {facts['checkpoint']}" if facts["checkpoint"] else "no checkpoint yet",
    ]
    return ", ".join(part for part in parts if part)


def _evaluation(label: str, found: dict[str, Any]) -> str:
    metrics = [f"{name} {value:.4g}" for name, value in found["metrics"].items()]
    return f"{label}: " + ", ".join([f"step {found['step']}", f"loss {found['loss']:.4g}", *metrics])


def _member(member: dict[str, Any]) -> tuple[str, ...]:
    rate = f"{member['rate']:.0f}" if member["rate"] else "-"
    return (member["ref"], str(member["steps"]), member["phase"] or "-", f"{member['since']:.1f} s", rate)
