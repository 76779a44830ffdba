"""The job in numbers: for `trueline status`, for the summary, and for the certificates of its checkpoints."""

import math
from collections.abc import Sequence
from typing import Any

from trueline.ps.master.ledger import MinibatchGrid
from trueline.ps.master.shell import JobShell
from trueline.ps.messages import ServerReport
from trueline.ps.tables.applied import count, find_common

RATE_S = 10.0
COUNTED = "minibatch by minibatch at every server"


def certify(grid: MinibatchGrid, reports: Sequence[ServerReport]) -> list[dict[str, Any]]:
    """What all servers have applied of each epoch, by their own account, which is in the log of their pushes beside the
    rows. -1: records are not tallied one by one."""
    applied = find_common([one.applied for one in reports])
    return [
        {
            "epoch": epoch, "steps": grid.steps_in(runs), "records": grid.count_records(runs), "digest": 0,
            "tally_min": -1, "tally_max": -1, "reduction": "mean",
        }
        for epoch, runs in sorted(applied.items())
        if runs and epoch >= 0
    ]  # fmt: skip


def summarize(master: JobShell, reports: Sequence[ServerReport]) -> dict[str, Any]:
    """The finished job, for users and for the bundle's lineage; `reports` are of its servers at the end."""
    job, ledger = master.job, master.ledger
    assert ledger is not None
    return {
        "name": job.name, "epochs": job.epochs, "steps": ledger.steps, "records": master.num_records,
        "global_batch": job.global_batch, "workers_started": master.workers.started, "generations": 1,
        "regroups": [], "certificates": certify(master.grid, reports), "checkpoint": master.checkpoint_path,
        "evaluations": [], "best": None, "reading_s": 0.0, "steps_s": 0.0, "stopped_early": False, "set_aside": [],
        "quarantined": [], "counted": COUNTED, "servers_started": master.servers.started,
        "servers": master.meter.describe(),
    }  # fmt: skip


def describe(master: JobShell, now: float) -> dict[str, Any]:
    """The job as one JSON object."""
    job, ledger = master.job, master.ledger
    steps = ledger.steps if ledger is not None else 0
    recent = [(at, records) for at, records in master.recent if master.now() - at <= RATE_S]
    rate = sum(records for _, records in recent) / max(0.1, master.now() - recent[0][0]) if recent else 0.0
    members = [
        {
            "ref": ref, "rank": rank, "steps": master.computed.get(ref, 0), "phase": "training",
            "since": round(master.now() - master.heard.get(ref, master.now()), 3), "rate": 0.0,
        }
        for rank, ref in enumerate(master.workers.alive)
        if ref in master.computed or ref in master.memory
    ]  # fmt: skip
    return {
        "name": job.name, "phase": master.phase, "generation": 1, "workers": master.workers.count, "members": members,
        "pending": [ref for ref in master.workers.alive if ref not in {one["ref"] for one in members}],
        "quarantined": [], "set_aside": [], "careful": False, "committed": steps, "total_steps": master.total_steps,
        "epoch": ledger.epoch if ledger is not None else 0,
        "loss": master.loss if math.isfinite(master.loss) else None, "records_per_s": round(rate, 1),
        "checkpoint": master.checkpoint_path, "checkpoint_step": master.checkpoint_step,
        "evaluations": {"last": None, "best": None}, "uptime_s": round(master.now() - master.born, 1),
        "under_way": sum(count(runs) for runs in ledger.outstanding().values()) if ledger is not None else 0,
        "servers": master.meter.describe(), "hosts": list(master.hosts()), "at": now,
        "waiting": list(master.disk_room.waiting.values()),
    }  # fmt: skip
