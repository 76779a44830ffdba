"""The job as one JSON object, for `trueline status` and for programs."""

from __future__ import annotations

from typing import Any

from trueline.train.master.progress import JobProgress
from trueline.train.membership.state import State
from trueline.train.settings import JobSettings


def describe_job(
    job: JobSettings, state: State, account: JobProgress, *, now: float, uptime_s: float
) -> dict[str, Any]:
    """`since` is for how many seconds a member has been in its phase, `rate` the records a second it computes."""
    generation, rates = account.rates
    known = rates if generation == state.generation and len(rates) == len(state.view) else ()
    people = [
        {
            "ref": member.ref,
            "rank": member.rank,
            "steps": member.steps,
            "phase": member.phase,
            "since": round(member.phase_s + now - member.seen_at, 3),
            "rate": round(known[member.rank] if known and member.rank >= 0 else member.rate, 1),
        }
        for member in state.members.values()
    ]
    evaluations = account.list_evaluations()
    epoch_steps = max(1, account.total_steps // max(1, job.epochs))
    return {
        "name": job.name,
        "phase": state.phase,
        "generation": state.generation,
        "workers": state.workers,
        "members": people,
        "pending": list(state.pending),
        "quarantined": [{"slot": slot, "why": why} for slot, why in sorted(state.quarantined.items())],
        "set_aside": state.list_set_aside(),
        "careful": state.careful,
        "committed": state.committed,
        "total_steps": account.total_steps,
        "epoch": min(state.committed // epoch_steps, job.epochs - 1),
        "loss": account.loss,
        "records_per_s": round(account.records_per_s(now), 1),
        "checkpoint": state.checkpoint,
        "checkpoint_step": state.checkpoint_step,
        "evaluations": {"last": evaluations[-1] if evaluations else None, "best": account.find_best()},
        "uptime_s": round(uptime_s, 1),
    }


def format_set_aside(aside: dict[str, Any]) -> str:
    """A record that was set aside, in a line.

    >>> format_set_aside({"record": 17, "where": "record 5 of b.parquet#1", "why": "worker-0.0: OSError: torn"})
    'set aside: record 17 (record 5 of b.parquet#1): worker-0.0: OSError: torn'
    """
    where = f" ({aside['where']})" if aside.get("where") else ""
    return f"set aside: record {aside['record']}{where}: {aside['why']}"
