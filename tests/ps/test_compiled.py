"""The compiled search finds what the search by NumPy finds; compiled steps, and unique ids, have the same bits."""

import os
import threading

import numpy as np
import pytest

from trueline.ps.messages import OptimizerSpec, TableSpec
from trueline.ps.partition import buckets_of
from trueline.ps.tables import id_index, numba_code, slab, table, unique
from trueline.ps.tables.id_index import IdIndex
from trueline.ps.tables.table import ServerTable

pytest.importorskip("numba", reason="numba is not installed: pip install 'trueline[numba]'")


@pytest.fixture(autouse=True)
def loaded():
    """All of it is there: what is not yet is done by NumPy."""
    for what in ("insert", "lie_in", "search", "take", "sum", "sgd", "adagrad", "unique"):
        assert numba_code.find_compiled(what, wait=True) is not None


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


def test_the_rows_of_buckets_are_those_that_numpy_finds(monkeypatch):
    monkeypatch.setattr(id_index, "COMPILED_FROM", 1 << 11)
    ids = np.unique(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 9_000))
    spec = TableSpec(name="items", dim=2, group=0)
    held = ServerTable(spec, OptimizerSpec(kind="sgd"), seed=0)
    held.apply(ids, np.zeros((len(ids), 2), np.float32), lr=0.1)
    assert held._index.is_large
    for buckets in ([], [0, 1023], range(0, 1024, 3), range(1024)):
        wanted = ids[np.isin(buckets_of(ids, "items"), list(buckets))]
        assert np.array_equal(np.sort(held.find(buckets)), wanted)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 500])
@pytest.mark.parametrize("dim", [1, 3, 16])
def test_compiled_copies_of_rows_are_numpys_with_the_first_row_where_there_is_none(dim, count):
    draw = np.random.default_rng(count)
    rows = draw.standard_normal((400, dim)).astype(np.float32)
    places, taken = draw.integers(-1, 400, count), np.full((count, dim), np.nan, np.float32)
    numba_code.find_compiled("take")(rows, places, taken)
    assert np.array_equal(taken, slab.take_rows(rows, places))


@pytest.mark.parametrize("dim", [1, 3, 16])
@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_compiled_steps_compute_the_bits_of_numpys(monkeypatch, kind, dim):
    monkeypatch.setattr(id_index, "COMPILED_FROM", 1 << 11)
    draw, compiled = np.random.default_rng(0), []
    find = table.find_step

    def count(spec):
        compiled.append(find(spec))
        return compiled[-1]

    monkeypatch.setattr(table, "find_step", count)
    spec, optimizer = TableSpec(name="users", dim=dim, group=0, init="normal"), OptimizerSpec(kind=kind)
    tables = [ServerTable(spec, optimizer, seed=0) for _ in range(2)]
    tables[1]._index = IdIndex(compiled=False)
    for _ in range(40):
        ids = np.unique(draw.integers(0, 5_000, 900))
        gradients = (draw.standard_normal((len(ids), dim)) * 10.0 ** draw.integers(-20, 15)).astype(np.float32)
        for one in tables:
            one.apply(ids, gradients.copy(), lr=0.1)
    ids = np.arange(5_000)
    assert tables[0].get(ids).tobytes() == tables[1].get(ids).tobytes()
    assert len(compiled) > 30
    assert None not in compiled
    places = [one._index.find(ids) for one in tables]
    for slots in zip(*(one._state for one in tables), strict=True):
        assert slots[0][places[0]].tobytes() == slots[1][places[1]].tobytes()


@pytest.mark.parametrize("more", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"maximize": True}])
def test_a_step_that_is_not_compiled_is_numpys(monkeypatch, more):
    monkeypatch.setattr(id_index, "COMPILED_FROM", 1 << 10)
    one = ServerTable(TableSpec(name="users", dim=2, group=0), OptimizerSpec(kind="sgd", **more), seed=0)
    one.apply(np.arange(700), np.ones((700, 2), np.float32), lr=0.1)
    one.apply(np.arange(700), np.ones((700, 2), np.float32), lr=0.1)
    assert one._index.is_large
    assert table.find_step(one.optimizer) is None


@pytest.mark.parametrize("count", [1, 2, 700, 9000])
@pytest.mark.parametrize("factor", [1, 3, 10**12, 2**48])
@pytest.mark.parametrize("bounds", [(-(2**63), 2**63 - 1), (-300, 300), (0, 2**40), (5, 6)])
def test_unique_ids_and_their_positions_are_those_of_numpy(monkeypatch, bounds, factor, count):
    monkeypatch.setattr(unique, "COMPILED_FROM", 1)
    draw = np.random.default_rng(0)
    with np.errstate(over="ignore"):
        ids = draw.integers(*bounds, count) * np.int64(factor) + draw.integers(0, 40, count)  # in groups, far apart
    before = ids.copy()
    for given in (ids, np.repeat(ids, 2)[::2]):  # also one that is not contiguous
        found, expected = unique.find_unique(given), np.unique(ids, return_inverse=True)
        assert [one.tobytes() for one in found] == [one.tobytes() for one in expected]
    assert np.array_equal(ids, before)


def test_what_is_still_being_loaded_is_done_by_numpy_and_a_fork_loads_it_for_itself(monkeypatch):
    monkeypatch.setattr(numba_code, "_loaded", {})
    begin, load = threading.Event(), numba_code._load
    monkeypatch.setattr(numba_code, "_load", lambda *given: (begin.wait(), load(*given)))
    monkeypatch.setattr(unique, "COMPILED_FROM", 1)
    ids = np.array([3, 1, 3])
    assert numba_code.find_compiled("unique") is None
    assert [one.tolist() for one in unique.find_unique(ids)] == [[1, 3], [1, 0, 1]]
    child = os.fork()
    if child == 0:
        begin.set()
        os._exit(0 if numba_code.find_compiled("unique", wait=True) is not None else 1)
    assert os.waitpid(child, 0)[1] == 0
    begin.set()
    assert numba_code.find_compiled("unique", wait=True) is not None
