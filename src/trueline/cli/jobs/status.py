"""`trueline status`."""

import time
from typing import Any

from trueline.cli.jobs import _stores
from trueline.cli.jobs.jobs import format_age, format_stored, format_table
from trueline.cli.options import Output, job_argument, verb

_EXAMPLES = """
trueline status digits-1
    state, step, loss, and each worker of runs/digits-1: its steps, phase, records a second

trueline status runs/digits-1 --json
    the same for a script
"""
HOST_HEAD = ("HOST", "ADDRESS", "STATE", "CORES", "LOAD", "WORKERS")
SERVER_HEAD = ("SERVER", "ROWS", "TABLES", "MEMORY", "PULLS/S", "PUSHES/S", "REPEATED", "STALENESS", "SLOWEST TABLE")
_EVALUATIONS = {"evaluation": "last evaluation", "best": "best evaluation"}


@verb("status", examples=_EXAMPLES)
@job_argument
@_stores.store_option
def command(job: str, store: str | None) -> Output:
    """Show a job's state, step, loss and workers.

    A running job's master sends them; when it does not answer, and for a job that has ended, they come from the job's
    folder as far as it has them. JOB is a job's folder, its name under ./runs, or in a store.
    """
    from trueline.train.job_dir import JobDir
    from trueline.train.launch import jobs

    if (where := _stores.find_stored(job, store)) is not None:
        from trueline.train.cluster import operate

        stored = operate.read(where)
        rows = [(host.role, host.state, str(host.workers), host.reason) for host in stored.hosts]
        hosts = "\n" + format_table([("HOST", "STATE", "WORKERS", "WHY"), *rows]) if rows else ""
        return Output(format_stored(stored.store, [stored], time.time()) + hosts, stored.as_dict())
    folder = jobs.find_job(job)
    found = jobs.read_job(folder)
    live = jobs.status(folder) if found.state == "running" else None
    master = JobDir(folder).read_master()
    facts = {**found.as_dict(), "page": "" if master is None else master.page, "live": live}
    return Output(format_status(facts, time.time()), facts)


def format_status(facts: dict[str, Any], now: float) -> str:
    from trueline.train.launch.jobs import format_set_aside

    live = facts["live"] or {}
    why = f" ({facts['why']})" if facts["why"] else ""
    began = format_age(now - facts["started"])
    lines = [f"{facts['name']}: {facts['state']}{why}, began {began} ago", _where(facts, live)]
    if facts["state"] == "running" and not live:
        lines.append("the master does not answer; training continues without it, and the launcher restarts it")
    if facts["state"] == "running" and facts["page"]:
        lines.append(f"page: {facts['page']}")
    for one in live.get("waiting", ()):
        text = f"the disk is full: {one['path']} cannot be written ({one['free']} free): {one['effect']}"
        lines.append(text + f", since {format_age(now - one['since'])}")
    lines += [_evaluation(label, live[key]) for key, label in _EVALUATIONS.items() if live.get(key)]
    lines += map(_quarantine, live.get("quarantined", ()))
    lines += format_set_aside(live.get("set_aside") or [])
    if members := live.get("members"):
        head = ("WORKER", "STEPS", "DOES", "FOR", "RECORDS/S")
        lines.append(format_table([head, *(_member(member) for member in members)]))
    if len(hosts := live.get("hosts", ())) > 1:
        lines.append(format_table([HOST_HEAD, *map(_host, hosts)]))
    if servers := live.get("servers"):
        lines += [
            f"{one['ref']} waits, with {one['queued']} pushes: {one['lacking']}" for one in servers if one["lacking"]
        ]
        lines.append(format_table([SERVER_HEAD, *map(_server, servers)]))
    if live.get("pending"):
        lines.append(f"starting: {', '.join(live['pending'])}")
    if facts["state"] in ("dead", "failed", "stopped"):
        lines.append(f"continue it with: trueline resume {facts['folder']}")
    return "\n".join(lines)


def _server(one: dict[str, Any]) -> tuple[str, ...]:
    busy = f", {one['busy']:.1%} of a core" if one["busy"] else ""
    total = sum(one["stale"])
    zero = f", {one['stale'][0] / total:.0%} are 0" if total else ""
    return (
        one["ref"], f"{one['rows']:,}", f"{one['bytes'] / 1e6:,.1f} MB", f"{one['memory'] / 1e6:,.0f} MB",
        f"{one['pulls_per_s']:,.1f}", f"{one['pushes_per_s']:,.1f}", str(one["duplicates"]),
        f"{one['staleness']:.2f}{zero}", f"{one['slowest'] or '-'}{busy}",
    )  # fmt: skip


def _quarantine(one: dict[str, Any]) -> str:
    again = f" (tried again in {one['retry_s']:.0f} s)" if "retry_s" in one else ""
    return f"quarantined: worker {one['slot']}: {one['why']}{again}"


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


def _evaluation(label: str, evaluation: dict[str, Any]) -> str:
    metrics = [f"{name} {value:.4g}" for name, value in evaluation["metrics"].items()]
    return f"{label}: " + ", ".join([f"step {evaluation['step']}", f"loss {evaluation['loss']:.4g}", *metrics])


def _host(host: dict[str, Any]) -> tuple[str, ...]:
    state = f"away for {host['silent_s']:.1f} s" if host["state"] == "away" else host["state"]
    state = ", ".join(filter(None, [state, host.get("clock")]))
    numbers = str(host["cores"]), f"{host['load']:.1f}"
    return (host["host"], host["address"] or "-", state, *numbers, ", ".join(host["workers"]) or "-")


def _member(member: dict[str, Any]) -> tuple[str, ...]:
    rate = f"{member['rate']:.0f}" if member["rate"] else "-"
    return (member["ref"], str(member["steps"]), member["phase"] or "-", f"{member['since']:.1f} s", rate)
