"""Random numbers of a record are its own: of seed, epoch and record, and of nothing else."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from trueline.data.loading.seeding import SeededReader, seed_all
from trueline.data.open import open_training
from trueline.data.order.record_orders import WeightedOrder
from trueline.data.source import Batch
from trueline.data.sources.mixture import SampledDataset, SampledSource
from trueline.errors import DataError, UsageError

RECORDS = 20


class Drawing:
    """Each record is its number and a draw of each of the three generators."""

    num_records = RECORDS
    units = ()

    def __init__(self, draws: bool = True) -> None:
        self.draws, self.asked = draws, list[list[int]]()

    def read(self, indices: Any) -> Batch:
        self.asked.append(indices.tolist())
        rows = [[float(index), *(drawn() if self.draws else ())] for index in indices]
        return Batch(torch.tensor(rows, dtype=torch.float64), None)

    def fingerprint(self) -> str:
        return "drawing"


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(1, dtype=torch.float64).item()]


def read(reader: SeededReader, *records: int, epoch: int = 0) -> list[list[float]]:
    return reader.read(np.array(records, np.int64), epoch=epoch).inputs.tolist()


def expected(record: int, *, seed: int = 5, epoch: int = 0) -> list[float]:
    seed_all(seed, epoch, record)
    return [float(record), *drawn()]


def test_each_record_draws_by_seed_epoch_and_its_number_whoever_is_beside_it() -> None:
    reader = SeededReader(Drawing(), 5)  # type: ignore[arg-type]
    assert read(reader, 3, 7) == [expected(3), expected(7)]
    assert read(reader, 7, 3, 7) == [expected(7), expected(3), expected(7)]
    assert read(reader, 7, epoch=2) == [expected(7, epoch=2)]
    assert read(SeededReader(Drawing(), 6), 7) == [expected(7, seed=6)]  # type: ignore[arg-type]
    draws = {tuple(expected(record, seed=seed, epoch=epoch)[1:])
             for record in (0, 1) for seed in (-1, 0, 1) for epoch in (0, 1)}  # fmt: skip
    assert len({number for row in draws for number in row}) == 36, "none is another's"


def test_reading_leaves_the_generators_where_they_were_once_it_is_known_to_draw() -> None:
    reader = SeededReader(Drawing(), 5)  # type: ignore[arg-type]
    read(reader, 1)
    assert reader.drawing
    seed_all(1)
    before = drawn()
    seed_all(1)
    read(reader, 2, 3)
    assert drawn() == before


def test_an_error_of_the_device_is_passed_on_and_not_blamed_on_records_that_draw() -> None:
    lost = torch.AcceleratorError("CUDA error: unspecified launch failure")

    def place(batch: Batch) -> Batch:
        raise lost

    with pytest.raises(torch.AcceleratorError) as raised:
        read(SeededReader(Drawing(), 5, place), 3, 7)  # type: ignore[arg-type]
    assert raised.value is lost


def test_a_source_that_draws_nothing_is_read_as_it_is() -> None:
    source = Drawing(draws=False)
    reader = SeededReader(source, 5)  # type: ignore[arg-type]
    assert read(reader, 3, 7) == [[3.0], [7.0]]
    assert (source.asked, reader.drawing) == ([[3, 7]], False)


def test_what_was_read_ahead_is_for_the_same_records_of_the_same_epoch() -> None:
    source = Drawing(draws=False)
    reader = SeededReader(source, 5)  # type: ignore[arg-type]
    for records, epoch, asked in (([1, 2], 0, 0), ([1, 2], 1, 1), ([2, 1], 0, 1), ([1, 2, 3], 0, 1), ([1], 0, 1)):
        reader.read_ahead(np.array([1, 2], np.int64), epoch=0)
        source.asked.clear()
        assert read(reader, *records, epoch=epoch) == [[float(record)] for record in records]
        assert len(source.asked) == asked
    source.asked.clear()
    reader.read_ahead(np.array([1, 2], np.int64), epoch=0)
    assert [read(reader, 1, 2), read(reader, 1, 2)] == [[[1.0], [2.0]]] * 2
    assert len(source.asked) == 2, "it is handed out once"


@pytest.mark.parametrize("parts", [(1,), (-1,), (2**64 - 1, 0), (0,), (0, 0), (0, 1), (1, 0)])
def test_seeds_of_other_parts_are_other_seeds(parts: tuple[int, ...]) -> None:
    seed_all(*parts)
    mine = drawn()
    seed_all(*parts)
    assert drawn() == mine
    for others in ((3,), (0, 2), (1, 1)):
        seed_all(*others)
        assert drawn() != mine
    if parts == (-1,):
        seed_all(1)
        assert drawn() != mine


def test_positions_of_an_order_are_looked_up_in_the_epoch_and_draw_by_their_position() -> None:
    def order(sizes: Any) -> WeightedOrder:
        return WeightedOrder(np.ones(RECORDS), seed=3, num_draws=RECORDS)

    source = SampledSource([Drawing()], SampledDataset((None,), order, "x"))  # type: ignore[list-item]
    reader = SeededReader(source, 5)
    for epoch in (0, 1):
        ((record, *numbers),) = read(reader, 4, epoch=epoch)
        assert record == source.order.at([4], epoch=epoch)[0]
        assert numbers == expected(4, epoch=epoch)[1:]


class Kept(Drawing):
    """A record, or what all of them have in common (`shared`), is drawn when it is read first."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.shared, self.kept = shared, dict[int, list[float]]()

    def read(self, indices: Any) -> Batch:
        places = [-1 if self.shared else int(index) for index in indices]
        rows = [[float(index), *self.kept.setdefault(at, drawn() if at not in self.kept else [])]
                for index, at in zip(indices, places, strict=True)]  # fmt: skip
        return Batch(torch.tensor(rows, dtype=torch.float64), None)


def test_numbers_that_are_drawn_for_a_record_once_and_kept_are_refused_in_every_batch() -> None:
    reader = SeededReader(Kept(shared=False), 5)
    for records in ([3, 4, 5], [3, 4, 5], [6]):
        with pytest.raises(UsageError, match="reading it again draws none"):
            reader.read(np.array(records), epoch=0)


def test_numbers_that_are_drawn_once_for_all_records_are_no_draws_of_each() -> None:
    reader = SeededReader(Kept(shared=True), 5)
    first, again = (read(reader, 3, 4, 5) for _ in range(2))
    assert first == again
    assert not reader.drawing


class Flaky(torch.utils.data.Dataset):
    """Records that draw; `failures`: how often the next reads of record 3 fail, after it has drawn."""

    def __init__(self):
        self.failures = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        drawn = torch.rand(2)
        if index == 3 and self.failures:
            self.failures -= 1
            raise OSError(5, "failed")
        return drawn, index


def test_records_that_cannot_be_read_for_a_moment_are_read_again_with_the_numbers_that_they_would_have_drawn():
    flaky = Flaky()
    reader, ids = SeededReader(open_training(flaky), 7), np.array([1, 3, 5])
    wanted = reader.read(ids, epoch=2)
    flaky.failures = 1
    found = reader.read(ids, epoch=2)
    assert flaky.failures == 0
    assert torch.equal(found.inputs, wanted.inputs)
    flaky.failures = 5
    with pytest.raises(DataError, match="record 3 of dataset"):
        reader.read(ids, epoch=2)
    assert flaky.failures == 5 - 2 * 2, "each time alone too, for its name"
