"""Random kills at jobs with parameter servers: `make chaos-ps KILLS=200`.

With `BENCH="--strategy hybrid"` at hybrid jobs, after their first checkpoint: before, a job dies with its workers.
Workers, servers and the master get SIGKILL at random moments, a second apart on average. A table with SGD and a
gradient of -1 for each record counts how often each record was applied, outside of all that the job says of itself.
Jobs follow each other until the kills are used up. Last comes one line of JSON.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from _table import mark, report
from trueline import events
from trueline.checkpoint import checkpoint
from trueline.train.api import train
from trueline.train.job_dir import JobDir

RECIPES = Path(__file__).parents[1] / "tests" / "ps" / "recipes"
JOBS: dict[str, dict[str, Any]] = {
    "ps": {"recipe": RECIPES / "counting.py", "checkpoint_every": 400},
    "hybrid": {"recipe": RECIPES / "hybrid.py", "checkpoint_every": 50},
}
RECORDS, EPOCHS = 20_000, 2


class Storm:
    """Kills processes of one job until it ends, or `most` are killed."""

    def __init__(self, job_dir: Path, most: int, dice: random.Random, *, waits: bool = False) -> None:
        """`waits`: for the first checkpoint."""
        self.job, self.most, self.dice, self.waits = JobDir(job_dir), most, dice, waits
        self.pids: dict[str, int] = {}
        self.killed: list[str] = []
        self.ended = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, name: str, fields: Mapping[str, Any]) -> None:
        with self._lock:
            if name == "worker.running":
                self.pids[fields["worker"]] = fields["pid"]
            elif name in ("worker.lost", "worker.killed"):
                self.pids.pop(fields["worker"], None)
            elif name == "checkpoint.saved":
                self.waits = False

    def run(self) -> None:
        while not self.ended.wait(self.dice.expovariate(1.0)) and len(self.killed) < self.most:
            with self._lock:
                master = self.job.read_master()
                known = {ref: pid for ref, pid in self.pids.items() if not ref.startswith("saver")}
                if self.waits or not known or master is None or not master.pid:
                    continue
                what = self.dice.choice(["worker", "server", "server", "master"])
                chosen = master.pid if what == "master" and self.dice.random() < 0.4 else None
                refs = sorted(ref for ref in known if ref.startswith(what)) or sorted(known)
                ref = "master" if chosen else self.dice.choice(refs)
                try:
                    os.kill(chosen or known[ref], signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.killed.append(ref.partition("-")[0])


def strike(folder: Path, number: int, most: int, dice: random.Random, strategy: str) -> tuple[list[str], int, int, int]:
    """One job: what was killed, records lost and repeated, and its steps."""
    job_dir = folder / f"job-{number}"
    storm = Storm(job_dir, most, dice, waits=strategy == "hybrid")
    thread = threading.Thread(target=storm.run, daemon=True)
    with events.listening(storm):
        thread.start()
        try:
            found = train(job_dir=job_dir, strategy=strategy, workers=3, servers=2, epochs=EPOCHS, seed=number,
                          max_failures=50, **JOBS[strategy])  # fmt: skip
        finally:
            storm.ended.set()
    thread.join()
    state = checkpoint.read(found.checkpoint).state["model"]
    seen = torch.zeros(RECORDS)
    seen[state["seen.ids"]] = state["seen.rows"][:, 0]
    lost, repeated = (EPOCHS - seen).clamp(min=0).sum(), (seen - EPOCHS).clamp(min=0).sum()
    return storm.killed, int(lost), int(repeated), found.summary.facts["steps"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strategy", choices=sorted(JOBS), default="ps")
    arguments = parser.parse_args()
    os.environ["PS_RECORDS"] = str(RECORDS)
    dice, killed, lost, repeated, steps, number = random.Random(arguments.seed), list[str](), 0, 0, 0, 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tl-ps-") as scratch:
        while len(killed) < arguments.kills:
            now, *counted = strike(Path(scratch), number, arguments.kills - len(killed), dice, arguments.strategy)
            lost, repeated, steps = (a + b for a, b in zip((lost, repeated, steps), counted, strict=True))
            killed += now
            number += 1
            print(f"job {number}: {len(killed)} kills, {lost} lost, {repeated} repeated", file=sys.stderr, flush=True)
    kinds = {kind: killed.count(kind) for kind in ("worker", "server", "master")}
    figures = {"kills": len(killed), **kinds, "lost": lost, "repeated": repeated, "jobs": number, "steps": steps,
               "seconds": round(time.monotonic() - began)}  # fmt: skip
    rows = [
        ("records lost / repeated", f"{lost} / {repeated}", "0 / 0", f"{len(killed)} kills in {number} jobs: {kinds}")
    ]
    report(("what", "measured", "goal", "", "detail"), mark(rows), figures)


if __name__ == "__main__":
    main()
