"""A delta between two checkpoints of a table of a million rows: its bytes, and CPU seconds to make and to apply it.

    python -m bench.ps_delta [--rows 1000000]

Between them 1 % of the rows came, 2 % changed and 0.1 % went, and all dense weights changed. Both bundles are captured
and proven. More than 100 MB of weights lie in a file beside the program, fewer in the program.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench._table import report

from trueline.bundle import Bundle, open_bundle
from trueline.bundle.delta import apply_delta
from trueline.capture.api import capture
from trueline.capture.deltas import make_delta
from trueline.checkpoint import checkpoint
from trueline.ps.model.embedding import Embedding
from trueline.recipe.load import load_recipe

DIM = 16
CAME, CHANGED, WENT = 0.01, 0.02, 0.001


class Scorer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Embedding(DIM)
        self.score = torch.nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.score(self.table(ids)).squeeze(-1)


def train(ids: Any, rows: Any, random: np.random.Generator) -> tuple[Any, Any]:
    """The table some minutes later."""
    kept = random.random(len(ids)) >= WENT
    ids, rows = ids[kept], rows[kept]
    rows = rows + (random.random((len(ids), 1)) < CHANGED).astype(np.float32)
    fresh = np.setdiff1d(random.integers(-(2**63), 2**63 - 1, size=int(len(ids) * CAME)), ids)
    ids = np.concatenate((ids, fresh))
    rows = np.concatenate((rows, random.standard_normal((len(fresh), DIM), dtype=np.float32)))
    order = np.argsort(ids)
    return ids[order], rows[order]


def seal(folder: Path, step: int, ids: Any, rows: Any) -> tuple[Bundle, float]:
    """The captured checkpoint of `step`, and the seconds of a processor that this took."""
    torch.manual_seed(step)
    state = {**Scorer().state_dict(), "table.ids": torch.from_numpy(ids), "table.rows": torch.from_numpy(rows)}
    made = checkpoint.write(folder, step=step, state={"model": state}, facts={})
    blanks = {"model": Scorer, "name": "scorer", "examples": lambda: {"ids": torch.from_numpy(ids[:10].reshape(5, 2))}}
    out, began = folder / f"{step}.bundle", time.process_time()
    capture(load_recipe(blanks, needs=("model",)), made, out, formats=["onnx"])
    return open_bundle(out), time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    ids = np.unique(random.integers(-(2**63), 2**63 - 1, size=options.rows))
    rows = random.standard_normal((len(ids), DIM), dtype=np.float32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parent, capture_s = seal(folder, 1, ids, rows)
        result, _ = seal(folder, 2, *train(ids, rows, random))
        began = time.process_time()
        delta = make_delta(parent, result, folder / "2.delta")
        make_s = time.process_time() - began
        began = time.process_time()
        applied = apply_delta(open_bundle(parent.path), folder / "2.delta", folder / "applied.bundle")
        apply_s = time.process_time() - began
        whole = sum(one.size for one in result.manifest.files.values())
        size = sum(delta.sizes.values())
    report(
        ["what", "measured"],
        [
            ["capture", f"{capture_s:.1f} s"], ["the bundle", f"{whole / 1e6:.1f} MB"],
            ["the delta", f"{size / 1e6:.2f} MB"], ["making it", f"{make_s:.2f} s"],
            ["applying it", f"{apply_s:.2f} s"], ["the same bundle", f"{applied.digest == result.digest}"],
        ],
        {"capture_s": capture_s, "bundle_bytes": whole, "delta_bytes": size, "make_s": make_s, "apply_s": apply_s,
         "same": applied.digest == result.digest},
    )  # fmt: skip


if __name__ == "__main__":
    main()
