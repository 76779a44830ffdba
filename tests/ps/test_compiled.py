"""The compiled search finds what the search by NumPy finds."""

import numpy as np
import pytest

from trueline.ps.tables import id_index
from trueline.ps.tables.id_index import IdIndex

pytest.importorskip("numba", reason="numba is not installed: pip install 'trueline[numba]'")


def test_ids_are_found_as_by_numpy_after_growth_and_removals(monkeypatch):
    monkeypatch.setattr(id_index, "COMPILED_FROM", 1 << 11)
    draw = np.random.default_rng(0)
    ids = np.unique(np.concatenate((draw.integers(-(2**63), 2**63 - 1, 30_000), [0, -1, -2, 2**63 - 1, -(2**63)])))
    compiled, plain = IdIndex(), IdIndex(compiled=False)
    asked = np.concatenate((ids, draw.integers(-(2**63), 2**63 - 1, 20_000)))
    for start in range(0, len(ids), 1_000):
        some = ids[start : start + 1_000]
        for index in (compiled, plain):
            index.add(some, np.arange(start, start + len(some)))
            index.remove(some[::3])
        assert np.array_equal(compiled.find(asked), plain.find(asked))
    assert np.array_equal(compiled.find(ids[::2]), plain.find(ids[::2]))
    assert len(compiled.find(np.empty(0, np.int64))) == 0
