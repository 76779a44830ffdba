"""Ids are counted until they get a row: as a dictionary would, in less memory."""

import numpy as np
import pytest

from trueline.ps.tables.sights import SightCounter


@pytest.mark.parametrize("least", [1, 3])
def test_ids_ripen_as_in_a_dictionary(least):
    draw, counter, seen = np.random.default_rng(0), SightCounter(), dict[int, int]()
    for _ in range(60):
        ids = np.unique(draw.integers(-300, 300, 90)) * 2**54
        expected = []
        for one in ids.tolist():
            count = seen.pop(one, 0)
            expected.append(count >= least)
            if count < least:
                seen[one] = count + 1
        assert counter.note(ids, least).tolist() == expected
        assert len(counter) == len(seen)
    found = counter.list()
    assert dict(zip(*(one.tolist() for one in found), strict=True)) == seen
    other = SightCounter()
    for _ in range(2):
        other.take(*found)
    assert other.note(ids, least).tolist() == counter.note(ids, least).tolist()


def test_a_million_ids_take_at_most_80_bytes_each_and_are_counted_among_the_tables_bytes():
    counter = SightCounter()
    for start in range(0, 1_000_000, 100_000):
        counter.note(np.arange(start, start + 100_000), 5)
    assert counter.nbytes / len(counter) < 80
