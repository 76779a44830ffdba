"""What every Source promises. A test class inherits `SourceConformance` and gives the fixture `source`.

The source under test holds 100 records: record i has the input [i, 2 i] (float32) and the label i (int64).
"""

from __future__ import annotations

import numpy as np
import pytest

from trueline.data.source import Source
from trueline.errors import DataError
from worlds.steps import step_records

COUNT = 100


class SourceConformance:
    def test_it_is_a_source_and_knows_its_records(self, source: Source) -> None:
        assert isinstance(source, Source)
        assert source.num_records == COUNT

    def test_its_units_lie_one_after_the_other_and_hold_all_records(self, source: Source) -> None:
        assert source.units[0].offset == 0
        ends = [unit.offset + unit.count for unit in source.units]
        assert [unit.offset for unit in source.units[1:]] == ends[:-1]
        assert ends[-1] == COUNT
        assert all(unit.count > 0 and unit.uri for unit in source.units)

    @pytest.mark.parametrize("indices", [[0], [99], [3, 2, 1], [99, 0, 50, 49, 51], [7, 7, 7], list(range(99, -1, -1))])
    def test_it_reads_any_records_in_the_order_asked_for(self, source: Source, indices: list[int]) -> None:
        batch = source.read(np.array(indices, np.int64))
        assert batch.labels.tolist() == indices
        assert batch.inputs.tolist() == [[index, 2 * index] for index in indices]

    def test_an_epoch_in_steps_is_every_record_once(self, source: Source) -> None:
        seen: list[int] = []
        for step in range(13):
            found = step_records(step, seed=1, num_records=COUNT, global_batch=8)
            seen += source.read(found).labels.tolist()
        assert sorted(seen) == list(range(COUNT))

    @pytest.mark.parametrize("wrong", [[-1], [100], [5, 2**40]])
    def test_a_record_that_is_not_there_is_an_error_that_names_it(self, source: Source, wrong: list[int]) -> None:
        with pytest.raises(DataError, match=f"no record {wrong[-1]}"):
            source.read(np.array(wrong, np.int64))

    def test_reading_nothing_is_an_error(self, source: Source) -> None:
        with pytest.raises(DataError, match="at least one"):
            source.read(np.array([], np.int64))

    def test_its_fingerprint_stays_while_the_records_do(self, source: Source) -> None:
        before = source.fingerprint()
        source.read(np.array([1, 2], np.int64))
        assert source.fingerprint() == before
        assert len(before) == 64
