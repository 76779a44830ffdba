"""The cost of checkpoints: ten steps that begin with a checkpoint, compared with the ten after them without one.

An MLP of 5.3 million parameters with Adam (61 MiB of state), trained alone through `trueline.Elastic`. The two kinds of
windows alternate in one job, so other load affects both; the ratio is the median over successive pairs.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import trueline
from _table import report
from trueline.train.step.checkpointer import Checkpointer

WIDTH, LAYERS, BATCH = 1024, 5, 512
EVERY, PAIRS = 10, 16
TARGET = 1.05


class Noise(Dataset):
    """Always the same records: reading is not measured."""

    def __init__(self) -> None:
        self.inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return BATCH * (2 * EVERY * (PAIRS + 1) + 1)

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(self.inputs[i % BATCH], self.inputs[(i + 1) % BATCH, :1]) for i in indices]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.__getitems__([index])[0]


class Timed(Checkpointer):
    """A Checkpointer that records for how long it stalls the steps."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {}, every=2 * EVERY)
        self.held_ms: list[float] = []

    def _begin(self, replica: Any, link: Any) -> None:
        began = time.perf_counter()
        super()._begin(replica, link)
        self.held_ms.append(1e3 * (time.perf_counter() - began))


def train(checkpointer: Checkpointer) -> list[float]:
    """Seconds of each ten steps, from the first checkpoint on; every other ten begin with a checkpoint."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))
    job = trueline.Elastic(
        model, torch.optim.Adam(model.parameters()), Noise(), global_batch=BATCH, checkpointer=checkpointer
    )
    marks = []
    for batch in job:
        loss = torch.nn.functional.mse_loss(model(batch.inputs), batch.labels)
        if job.steps % EVERY == EVERY - 1:
            marks.append(time.perf_counter())  # the step that follows ends in a checkpoint, or in none
        job.step(loss)
    return [later - earlier for earlier, later in itertools.pairwise(marks)][1:]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="trueline-bench-") as folder:
        checkpointer = Timed(Path(folder))
        times = train(checkpointer)
    pairs = list(zip(times[::2], times[1::2], strict=False))
    with_ms, without_ms = (statistics.median(kind) / EVERY * 1e3 for kind in zip(*pairs, strict=True))
    result = {
        "step_ms": round(without_ms, 2),
        "step_ms_with_checkpoints": round(with_ms, 2),
        "ratio": round(statistics.median(with_s / without_s for with_s, without_s in pairs), 4),
        "held_ms": round(statistics.median(checkpointer.held_ms), 2),
        "every": EVERY,
        "pairs": len(pairs),
        "target": TARGET,
    }
    rows = [["no checkpoint", without_ms, 0.0], [f"one in {EVERY} steps", with_ms, result["held_ms"]]]
    report(["ten steps with", "step ms", "held ms"], rows, result)
    sys.exit(0 if result["ratio"] <= TARGET else 1)


if __name__ == "__main__":
    main()
