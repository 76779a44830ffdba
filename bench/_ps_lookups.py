"""Lookups of a table's index with ten million ids: by NumPy, and compiled where numba is installed."""

from __future__ import annotations

import statistics
import time

import numpy as np

from trueline.ps.tables.id_index import IdIndex
from trueline.ps.tables.numba_code import find_compiled

ROWS, BATCH, BATCHES = 10_000_000, 1 << 16, 48


def fill(*, compiled: bool) -> tuple[IdIndex, np.ndarray]:
    """An index of random int64 ids."""
    ids = np.unique(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, ROWS, dtype=np.int64))
    index = IdIndex(compiled=compiled)
    for start in range(0, len(ids), BATCH):
        index.add(ids[start : start + BATCH], np.arange(start, min(start + BATCH, len(ids))))
    return index, ids


def measure_lookups(rounds: int, *, compiled: bool) -> float:
    """Millions of ids a CPU-second, of random ids that are there; 0 where there is no compiled search."""
    if compiled and find_compiled("search", wait=True) is None:
        return 0.0
    index, ids = fill(compiled=compiled)
    batches = [np.random.default_rng(n).choice(ids, BATCH) for n in range(BATCHES)]
    index.find(batches[0])
    found = []
    for _ in range(rounds):
        began = time.process_time()
        for batch in batches:
            index.find(batch)
        found.append(BATCH * BATCHES / (time.process_time() - began) / 1e6)
    return statistics.median(found)
