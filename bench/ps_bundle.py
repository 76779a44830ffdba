"""A bundle with a table of 10 million rows: capture, a server that is ready, and lookups beside a plain NumPy search.

Lookups are of random ids that are in the table, the worst case for a cache, and counted by CPU time of one thread;
ONNX Runtime and NumPy take turns.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from _table import report
from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.checkpoint import checkpoint
from trueline.ps.model.embedding import Embedding
from trueline.recipe.load import load_recipe
from trueline.runtime.open import open_program
from trueline.serve.api import start

DIM, BATCH, FIELDS, ROUNDS = 16, 2048, 26, 9
CAPTURE_S, READY_S, LOOKUPS = 60.0, 2.0, 0.5
"""Targets."""


class Fields(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Embedding(DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


def make_table(rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    ids = np.unique(random.integers(-(2**63), 2**63 - 1, size=rows + rows // 1000))[:rows]
    return ids, random.standard_normal((rows, DIM), dtype=np.float32)


def search(ids: np.ndarray, rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The lookup in plain NumPy; zeros for unknown ids."""
    places = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    found = rows[places]
    found[ids[places] != wanted] = 0.0
    return found


def measure(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ids, rows = make_table(options.rows)
    blanks = {
        "model": Fields,
        "name": "fields",
        "examples": lambda: {"ids": torch.from_numpy(ids[:130].reshape(5, 26))},
    }
    recipe = load_recipe(blanks, needs=("model",))
    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        state = {**Fields().state_dict(), "table.ids": torch.from_numpy(ids), "table.rows": torch.from_numpy(rows)}
        made = checkpoint.write(Path(folder), step=1, state={"model": state}, facts={})
        began = time.monotonic()
        capture(recipe, made, Path(folder) / "fields.bundle")
        capture_s = time.monotonic() - began
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        began = time.monotonic()
        with start(Path(folder) / "fields.bundle"):
            ready_s = time.monotonic() - began
        program = open_program(open_bundle(Path(folder) / "fields.bundle"), "onnx")
        ratios = []
        for _ in range(ROUNDS):
            wanted = random.choice(ids, size=(BATCH, FIELDS))
            theirs, ours = measure(partial(search, ids, rows, wanted)), measure(partial(program.run, {"ids": wanted}))
            ratios.append(theirs / ours)
    lookups = statistics.median(ratios)
    report(
        ["what", "measured", "target"],
        [
            ["capture, onnx and torch_export", f"{capture_s:.1f} s", f"<= {CAPTURE_S:.0f} s"],
            ["memory of it at most", f"{peak_mb:.0f} MB", ""],
            ["server ready", f"{ready_s:.2f} s", f"<= {READY_S:.0f} s"],
            ["lookups, ONNX Runtime / NumPy", f"{lookups:.2f}", f">= {LOOKUPS}"],
        ],
        {"capture_s": capture_s, "peak_mb": peak_mb, "ready_s": ready_s, "lookups": lookups},
    )


if __name__ == "__main__":
    main()
