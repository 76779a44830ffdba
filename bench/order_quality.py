"""Draws docs/img/order.png: how far records move, and how many units a batch touches, for windows of several sizes.

python -m bench.order_quality
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from bench._table import report

mpl.use("Agg")
import matplotlib.pyplot as plt

from trueline.data.order.permutation import record_at
from trueline.data.order.record_orders import WindowOrder
from trueline.data.source import Unit

RECORDS, GROUP, BATCH, CLASSES = 1 << 20, 4096, 256, 64


def label_spread(order: np.ndarray) -> float:
    """Files sorted by class, the worst case: how uneven classes are in a batch, 1 being random drawing."""
    labels = order * CLASSES // RECORDS
    counts = np.stack([np.bincount(batch, minlength=CLASSES) for batch in labels.reshape(-1, BATCH)[::16]])
    return float(counts.var() / (BATCH / CLASSES * (1 - 1 / CLASSES)))


def main() -> None:
    units = [Unit(uri="u", offset=at, count=GROUP) for at in range(0, RECORDS, GROUP)]
    positions = np.arange(RECORDS)
    windows = [GROUP * 2**power for power in range(9)]
    spread, touched = [], []
    for window in windows:
        order = WindowOrder(units, seed=0, window_records=window).at(positions, epoch=0)
        spread.append(label_spread(order))
        touched.append(np.mean([len(np.unique(batch // GROUP)) for batch in order.reshape(-1, BATCH)[::16]]))
    full = record_at(positions, seed=0, epoch=0, num_records=RECORDS)
    best = label_spread(full)
    most = np.mean([len(np.unique(batch // GROUP)) for batch in full.reshape(-1, BATCH)[::16]])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for axis, values, limit, what in (
        (left, spread, best, "variance of a class's share of a batch\n(1: as by chance)"),
        (right, touched, most, "row groups that a batch of 256 touches"),
    ):
        axis.plot(windows, values, "o-", label="windows")
        axis.axhline(limit, color="gray", linestyle="--", label="full permutation")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("records in a window")
        axis.set_title(what, fontsize=9)
        axis.legend(fontsize=8)
    left.set_yscale("log")
    figure.tight_layout()
    figure.savefig(Path(__file__).parents[1] / "docs" / "img" / "order.png", dpi=100)
    rows = [
        [str(window), f"{one:.2f}", f"{other:.1f}"] for window, one, other in zip(windows, spread, touched, strict=True)
    ]
    rows.append(["full", f"{best:.2f}", f"{most:.1f}"])
    found = {str(window): round(one, 3) for window, one in zip(windows, spread, strict=True)}
    report(
        ["records in a window", "spread of classes", "row groups a batch"],
        rows,
        {"spread": found, "full": round(best, 3)},
    )


if __name__ == "__main__":
    main()
