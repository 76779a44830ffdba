"""Three parameter servers become five while a job trains: `python bench/ps_scaling.py [--gb 1.0] [--epochs 8]`.

The job's recipe is this file: each record has 26 ids of its own, so that the tables grow until they hold `--gb`; the
table `seen` counts how often each record was applied, outside of all that the job says of itself. Then the job gets
five servers, and its steps are counted meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import trueline
from trueline import events
from trueline.checkpoint import checkpoint
from trueline.train.api import train
from trueline.train.launch import jobs

DIM, FIELDS, BATCH = 16, 26, 1024
ROW_BYTES = 100
"""Of an id with its row."""
BEFORE, AFTER, MOST_S_PER_GB = 3, 5, 5.0
POLL_S = 0.05

name = "scaling"
global_batch = BATCH
RECORDS = int(os.environ.get("BENCH_RECORDS", "4096"))
_PRIME, _WORD = 0x9E3779B97F4A7C15, 2**64


class OwnIds(Dataset[Any]):
    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        records = torch.tensor(indices)
        step = _PRIME - _WORD  # hashed ids are anywhere in int64
        ids = (records[:, None] * FIELDS + torch.arange(FIELDS)) * step
        return list(zip(zip(ids, records, strict=True), (records % 2).float(), strict=True))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = trueline.Embedding(DIM, name="items")
        self.seen = trueline.Embedding(1, name="seen", init="zeros")
        self.classify = torch.nn.Linear(FIELDS * DIM, 1)

    def forward(self, ids: torch.Tensor, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.classify(self.items(ids).flatten(1)).squeeze(1), self.seen(records)


def model() -> Model:
    return Model()


def dataset(mode: str) -> OwnIds:
    return OwnIds()


def loss(outputs: tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    logits, seen = outputs
    own = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    return own - seen.sum() + seen.sum().detach()  # with a learning rate of 1 each record adds 1 to its row


def optimizer(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    counting = [one for one in params if one.shape == (0, 1)]
    others = [one for one in params if one.shape != (0, 1)]
    return trueline.JointOptimizer(torch.optim.SGD(others, lr=0.05), torch.optim.SGD(counting, lr=1.0))


class Scaling:
    """Asks the job for more servers once they hold enough, and watches its steps until it has them."""

    def __init__(self, job_dir: Path, gb: float) -> None:
        self.job_dir, self.gb = job_dir, gb
        self.began = self.ended = self.held = 0.0
        self.steps: list[tuple[float, int]] = []
        self.over = threading.Event()

    def __call__(self, event: str, _: Mapping[str, Any]) -> None:
        if event == "servers.scaling":
            self.began = time.monotonic()
        elif event == "servers.scaled":
            self.ended = time.monotonic()

    def run(self) -> None:
        asked = False
        while not self.over.wait(POLL_S) and not self.ended:
            if not self.job_dir.exists() or (shown := jobs.status(self.job_dir)) is None:
                continue
            held = sum(one["bytes"] for one in shown["servers"]) / 1e9
            if not asked and held >= self.gb:
                jobs.scale(self.job_dir, servers=AFTER)
                asked, self.held = True, held
            if asked:
                self.steps.append((time.monotonic(), shown["committed"]))

    @property
    def longest_pause_s(self) -> float:
        """Without a further committed step, as seen every `POLL_S`."""
        changes = [at for (at, step), (_, before) in zip(self.steps[1:], self.steps, strict=False) if step > before]
        return max((b - a for a, b in itertools.pairwise(changes)), default=float("inf"))


def measure(folder: Path, gb: float, epochs: int) -> tuple[Scaling, int, int]:
    """The scaling of one job; records lost and repeated."""
    watched = Scaling(folder / "job", gb)
    thread = threading.Thread(target=watched.run)
    with events.listening(watched):
        thread.start()
        try:
            found = train(__file__, job_dir=folder / "job", strategy="ps", workers=2, servers=BEFORE, epochs=epochs,
                          checkpoint_every=10**6)  # fmt: skip
        finally:
            watched.over.set()
            thread.join()
    state = checkpoint.read(found.checkpoint).state["model"]
    seen = torch.zeros(RECORDS)
    seen[state["seen.ids"]] = state["seen.rows"][:, 0]
    return watched, int((epochs - seen).clamp(min=0).sum()), int((seen - epochs).clamp(min=0).sum())


def main() -> None:
    from _table import mark, report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="held by all servers together")
    parser.add_argument("--epochs", type=int, default=8)
    given = parser.parse_args()
    global RECORDS
    RECORDS = int(1.1 * given.gb * 1e9 / FIELDS / ROW_BYTES) // BATCH * BATCH
    os.environ["BENCH_RECORDS"] = str(RECORDS)
    with tempfile.TemporaryDirectory(prefix="tl-ps-scaling-") as scratch:
        watched, lost, repeated = measure(Path(scratch), given.gb, given.epochs)
    if not watched.ended:
        sys.exit(f"the job ended before it had {AFTER} servers: more --epochs, or less --gb than {given.gb}")
    took, steps = watched.ended - watched.began, watched.steps[-1][1] - watched.steps[0][1]
    each = took / watched.held
    rows = [
        (f"{BEFORE} -> {AFTER} servers, live", f"{each:.2f} s", f"<= {MOST_S_PER_GB:g} s",
         f"for each GB; {watched.held:.2f} GB in {took:.2f} s"),
        ("steps meanwhile", f"{steps}", ">= 1", f"the longest pause {watched.longest_pause_s:.2f} s"),
        ("records lost / repeated", f"{lost} / {repeated}", "0 / 0", f"{RECORDS} records, {given.epochs} epochs"),
    ]  # fmt: skip
    report(("what", "measured", "target", "", "detail"), mark(rows),
           {"scale_s_per_gb": each, "held_gb": watched.held, "scale_s": took, "steps": steps,
            "longest_pause_s": watched.longest_pause_s, "lost": lost, "repeated": repeated})  # fmt: skip


if __name__ == "__main__":
    main()
