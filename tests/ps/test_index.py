"""The index of a table finds what a dict would, however long its chains of slots are and whatever was removed."""

import numpy as np
import pytest

from trueline.ps.tables import id_index
from trueline.ps.tables.id_index import IdIndex
from trueline.ps.tables.slab import put_rows, reserve, take_rows


@pytest.mark.parametrize("queries", [100, 5_000], ids=["few ids at once", "many ids at once"])
def test_ids_are_found_at_their_places_after_removals(queries):
    random = np.random.default_rng(0)
    index, there = IdIndex(compiled=False), {}
    for _ in range(4):
        ids = np.setdiff1d(random.integers(-(2**63), 2**63 - 1, 6_000, dtype=np.int64), list(there))
        places = len(there) + np.arange(len(ids))
        index.add(ids, places)
        there.update(zip(ids.tolist(), places.tolist(), strict=True))
        gone = random.choice(list(there), 3_000, replace=False)
        assert index.remove(gone).tolist() == [there.pop(one) for one in gone.tolist()]
        known = random.choice([*there, *gone.tolist()], queries)
        wanted = np.concatenate((known, random.integers(-(2**63), 2**63 - 1, queries, dtype=np.int64)))
        assert index.find(wanted).tolist() == [there.get(one, -1) for one in wanted.tolist()]


def test_ids_that_are_entered_in_pieces_are_all_found():
    ids = np.unique(np.random.default_rng(2).integers(-(2**63), 2**63 - 1, 3 * id_index._PIECE, dtype=np.int64))[:-7]
    index = IdIndex(compiled=False)
    index.add(ids, np.arange(len(ids)))
    assert index.count == len(ids)
    assert np.array_equal(index.find(ids), np.arange(len(ids)))


def test_a_chain_that_is_longer_than_a_look_and_goes_round_the_end_is_followed():
    index = IdIndex(compiled=False)
    ids = np.arange(1_000_000)
    last = ids[index._home(ids) >= index._mask - 1][:100]  # of the last two slots of 1,024
    index.add(last, np.arange(len(last)))
    assert len(last) == 100
    assert index.find(last).tolist() == list(range(100))
    index.remove(last[:60])
    assert index.find(last).tolist() == [-1] * 60 + list(range(60, 100))


@pytest.mark.parametrize("columns", [1, 2, 16])
def test_rows_are_taken_as_they_were_put(columns):
    array = reserve(columns, np.float32)
    places = np.array([5, 0, 2**20, 7])
    rows = np.random.default_rng(1).standard_normal((4, columns), dtype=np.float32)
    put_rows(array, places, rows)
    assert np.array_equal(take_rows(array, places), rows)
    assert np.array_equal(take_rows(array, np.array([-1])), rows[1:2])
    assert take_rows(array, places[:0]).shape == (0, columns)
