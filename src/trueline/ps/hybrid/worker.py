"""The worker process of a hybrid job: that of train, with tables on servers."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trueline.parallel.exchange import GradientExchange
from trueline.ps.client import PsClient
from trueline.ps.hybrid.calls import HybridLink
from trueline.ps.hybrid.checkpoints import TableCheckpointer
from trueline.ps.hybrid.exchange import TableExchange
from trueline.ps.hybrid.rows import HybridTables
from trueline.ps.messages import Routing
from trueline.recipe.contract import Recipe
from trueline.train.job_dir import JobDir
from trueline.train.settings import JobSettings
from trueline.train.step.group import WorkerGroup
from trueline.train.worker.main import WorkerParts
from trueline.train.worker.main import main as run_worker


def main() -> int:
    """Trains in the job that the environment names (TRUELINE_JOB, _MASTER, _SECRET, _REF); returns the exit code."""
    return run_worker(_replace_parts)


def _replace_parts(recipe: Recipe, settings: JobSettings) -> WorkerParts:
    job_dir, secret = Path(os.environ["TRUELINE_JOB"]), os.environ["TRUELINE_SECRET"].encode()
    link = HybridLink(os.environ["TRUELINE_REF"])
    weights = JobDir(job_dir).weights if settings.weights else None
    tables = HybridTables(settings.seed, settings.ema, tables_above=settings.tables_above, weights=weights)

    def connect(routing: Routing) -> PsClient:
        return PsClient(link.find_servers(job_dir), routing, secret, half=settings.half_rows, outstanding=1,
                        on_routing=lambda: link.open(tables.spec))  # fmt: skip

    def checkpointer(settings: JobSettings, job_dir: Path, facts: dict[str, Any]) -> TableCheckpointer:
        made = TableCheckpointer.of(settings, job_dir, facts)
        made.tables, made.link = tables, link
        return made

    def surround(inner: GradientExchange, group: WorkerGroup, at: Callable[[], int]) -> GradientExchange:
        return TableExchange(inner, group, at, tables=tables, link=link, connect=connect,
                             clip_norm=settings.clip_norm)  # fmt: skip

    return WorkerParts(tables.watch(recipe), checkpointer, surround, clips=True)
