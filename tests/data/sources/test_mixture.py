"""Weighted, mixed and bucketed records are a Source like any other, exact whoever shares the steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from trueline.data.loading.seeding import SeededReader
from trueline.data.loading.tensors import tensor
from trueline.data.loading.worker_pool import ReaderPool, make_reader
from trueline.data.open import as_source
from trueline.data.sources.map_style import DatasetSource
from trueline.data.sources.mixture import (
    ConcatSource,
    SampledDataset,
    SampledSource,
    bucket_by_length,
    describe_record,
    mix,
    record_lookup,
    sample_by_weight,
)
from trueline.errors import DataError, UsageError
from trueline.train.step.options import Options
from trueline.train.step.plan import JobPlan


def numbers(path: Path, start: int, stop: int) -> Path:
    found = np.arange(start, stop)
    pq.write_table(pa.table({"x": found.astype(np.float32), "label": found}), path, row_group_size=64)
    return path


def feed(records: pa.Table, mode: str) -> Any:
    return {"x": tensor(records["x"])}, tensor(records["label"])


def opened(drawn: SampledDataset) -> SampledSource:
    source = as_source(drawn, mode="training", feed=feed, recipe="r")
    assert isinstance(source, SampledSource)
    return source


def trained(source: SampledSource, *, epoch: int, batch: int = 32, workers: tuple[int, ...] = (1,)) -> list[list[int]]:
    """The labels of each step of an epoch, shared by as many workers as `workers` says in turn."""
    blocks = Options(shuffle="none").blocks(source)
    plan = JobPlan(num_records=source.num_records, global_batch=batch, epochs=9, seed=3, blocks=blocks)
    readers = [SeededReader(source, seed=3) for _ in range(max(workers))]
    steps = []
    for step in range(epoch * plan.epoch_steps, (epoch + 1) * plan.epoch_steps):
        count = workers[step * len(workers) // (9 * plan.epoch_steps)] if step % 5 else workers[step % len(workers)]
        weights = tuple(1.0 + rank % 3 for rank in range(count))
        labels: list[int] = []
        for rank in range(count):
            for piece in plan.pieces(step, rank=rank, weights=weights):
                readers[rank].prefetch(piece.records, epoch=epoch)
                labels += readers[rank].read(piece.records, epoch=epoch).labels.tolist()
        steps.append(labels)
    return steps


def worlds(folder: Path) -> dict[str, SampledDataset]:
    first, second = numbers(folder / "a.parquet", 0, 300), numbers(folder / "b.parquet", 1000, 2100)
    chance = np.random.default_rng(0)
    return {
        "mixed": mix([first, second], [3, 1], seed=1, num_records=2000),
        "weighted": sample_by_weight(first, chance.random(300), seed=1, num_draws=1000),
        "bucketed": bucket_by_length([first, second], chance.integers(1, 50, 1400), batch=32, seed=1, pool_batches=10),
    }


@pytest.mark.parametrize("kind", ["mixed", "weighted", "bucketed"])
def test_what_a_step_holds_does_not_depend_on_who_shares_it(tmp_path: Path, kind: str) -> None:
    drawn = worlds(tmp_path)[kind]
    source = opened(drawn)
    for epoch in (0, 1):
        alone = trained(source, epoch=epoch)
        assert trained(source, epoch=epoch, workers=(4, 3, 5, 8)) == alone
        assert sum(map(len, alone)) == source.num_records
    assert trained(source, epoch=0) != trained(source, epoch=1)
    assert source.fingerprint() == opened(drawn).fingerprint()


def test_sources_are_mixed_in_exactly_their_ratio_and_no_record_is_skipped(tmp_path: Path) -> None:
    source = opened(worlds(tmp_path)["mixed"])
    seen: Counter[int] = Counter()
    for epoch in range(3):
        labels = [label for step in trained(source, epoch=epoch) for label in step]
        for at in (0, 1000):
            assert sum(label < 300 for label in labels[at : at + 1000]) == 750
        seen.update(labels)
    assert set(seen) >= set(range(300)), "4500 draws of 300"
    assert {seen[record] for record in range(300)} == {15}
    assert {seen[record] for record in range(1000, 2100)} == {1, 2}, "1500 draws of 1100"


def test_records_come_as_often_as_their_weights_say(tmp_path: Path) -> None:
    source = opened(sample_by_weight(numbers(tmp_path / "a.parquet", 0, 4), [1, 0, 2.5, 1.5], num_draws=100))
    assert Counter(label for step in trained(source, epoch=2) for label in step) == {0: 20, 2: 50, 3: 30}


def test_batches_are_of_like_length_and_hold_every_record_once(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 640)
    source = opened(bucket_by_length(numbers(tmp_path / "a.parquet", 0, 640), lengths, batch=32, seed=1))
    steps = trained(source, epoch=1)
    assert sorted(label for step in steps for label in step) == list(range(640))
    assert np.mean([np.ptp(lengths[step]) for step in steps]) < 100, "of 1000"


def test_tensors_of_several_parts_come_in_the_order_asked_for_or_not_at_all(tmp_path: Path) -> None:
    parts = [torch.utils.data.TensorDataset(torch.arange(n, n + 5.0), torch.arange(n, n + 5)) for n in (0, 10)]
    batch = ConcatSource([DatasetSource(part, mode="training") for part in parts]).read(np.array([7, 0, 9, 9, 4, 5]))
    assert batch.inputs.tolist() == batch.labels.tolist() == [12, 0, 14, 14, 4, 10]
    other = torch.utils.data.TensorDataset(torch.zeros(5, 3), torch.arange(5))
    source = as_source(mix([parts[0], other], [1, 1]), mode="training", feed=None, recipe="r")
    with pytest.raises(DataError, match="records of 2 of the 2 parts do not make a batch"):
        source.read(np.arange(10))


def test_an_order_of_its_own_is_not_shuffled_again_and_needs_a_value_for_each_record(tmp_path: Path) -> None:
    path = numbers(tmp_path / "a.parquet", 0, 100)
    source = opened(sample_by_weight(path, np.ones(100)))
    for shuffle in ("full", "windows"):
        with pytest.raises(UsageError, match=f"shuffle is '{shuffle}', and the data set has an order of its own"):
            Options(shuffle=shuffle).blocks(source)
    with pytest.raises(DataError, match=r"weights of shape \[99\] for 100 records"):
        opened(sample_by_weight(path, np.ones(99)))
    with pytest.raises(DataError, match=r"lengths of shape \[101\] for 100 records"):
        opened(bucket_by_length(path, np.ones(101), batch=8))


def test_without_shuffling_records_come_as_they_lie(tmp_path: Path) -> None:
    source = as_source(numbers(tmp_path / "a.parquet", 0, 100), mode="training", feed=feed, recipe="r")
    plan = JobPlan(num_records=100, global_batch=32, epochs=2, seed=3, blocks=Options(shuffle="none").blocks(source))
    assert [record for step in range(4) for record in plan.records(step).tolist()] == list(range(100))
    assert plan.records(4).tolist() == list(range(32))


def test_processes_read_files_of_this_machine_ahead_and_the_batches_are_the_same(tmp_path: Path) -> None:
    drawn = worlds(tmp_path)["mixed"]
    readers = make_reader(opened(drawn), 3, readers=2)
    assert isinstance(readers, ReaderPool)
    alone = SeededReader(opened(drawn), 3)
    try:
        for start in range(0, 2000, 250):
            wanted = np.arange(start, start + 250)
            readers.prefetch(wanted, epoch=1)
            found, expected = readers.read(wanted, epoch=1), alone.read(wanted, epoch=1)
            assert torch.equal(found.inputs["x"], expected.inputs["x"])
            assert torch.equal(found.labels, expected.labels)
    finally:
        readers.close()


def test_a_database_is_read_by_processes_each_with_connections_of_its_own(tmp_path: Path) -> None:
    import sqlite3

    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute("create table t (id integer primary key, x real, label integer)")
        connection.executemany("insert into t values (?, ?, ?)", [(i, i, i) for i in range(100)])
    source = as_source(f"sqlite:///{tmp_path}/t.db?table=t&key=id", mode="training", feed=feed, recipe="r")
    assert source.read(np.array([1])).labels.tolist() == [1], "this process has had a connection"
    readers = make_reader(source, 0, readers=2)
    assert isinstance(readers, ReaderPool)
    try:
        asked = [np.array([start, 99 - start, 7]) for start in range(20)]
        for at, wanted in enumerate(asked):
            for later in asked[at : at + 3]:
                readers.prefetch(later, epoch=0)
            assert readers.read(wanted, epoch=0).labels.tolist() == wanted.tolist()
            assert source.read(wanted).labels.tolist() == wanted.tolist()
    finally:
        readers.close()
    whole = DatasetSource([(torch.zeros(1), 0)], mode="training")
    readers = make_reader(whole, 0, readers=1)
    assert isinstance(readers, ReaderPool)
    readers.close()


def test_parts_of_one_size_are_shuffled_each_in_its_own_way(tmp_path: Path) -> None:
    parts = [str(numbers(tmp_path / f"{start}.parquet", start, start + 500)) for start in (0, 500)]
    drawn = opened(mix(parts, [1, 1], seed=4)).order.at(np.arange(1000), epoch=0)
    assert [int(one) for one in drawn if one < 500] != [int(one) - 500 for one in drawn if one >= 500]


def test_what_stands_at_a_position_is_asked_of_the_epoch(tmp_path: Path) -> None:
    source = opened(sample_by_weight(str(numbers(tmp_path / "a.parquet", 0, 50)), np.arange(50.0), seed=2))
    by = record_lookup(source)
    assert by is not None
    for epoch in (0, 3):
        assert by(np.arange(50), epoch).tolist() == source.order.at(np.arange(50), epoch=epoch).tolist()
    assert by(np.arange(50), 0).tolist() != by(np.arange(50), 3).tolist()
    assert record_lookup(source.records.parts[0]) is None


def test_a_record_is_placed_in_its_part_and_its_file(tmp_path: Path) -> None:
    one, two = (str(numbers(tmp_path / f"{start}.parquet", start, start + 100)) for start in (0, 100))
    both = opened(mix([one, two], [1, 1], seed=1))
    assert describe_record(both, 3).endswith("0.parquet#0, part 1 of 2")
    assert describe_record(both, 165).startswith("record 1 of ")
    assert describe_record(both, 165).endswith("100.parquet#1, part 2 of 2")
    assert ", part" not in describe_record(opened(sample_by_weight(one, np.ones(100))), 3)


def test_another_order_or_other_records_are_another_source(tmp_path: Path) -> None:
    one, two = (str(numbers(tmp_path / f"{start}.parquet", start, start + 100)) for start in (0, 100))
    ones, growing = np.ones(100), np.arange(100)
    made = [
        sample_by_weight(one, ones),
        sample_by_weight(one, growing),
        sample_by_weight(one, ones, seed=1),
        sample_by_weight(one, ones, num_draws=7),
        sample_by_weight(two, ones),
        bucket_by_length(one, ones, batch=4),
        bucket_by_length(one, ones, batch=5),
        bucket_by_length(one, growing, batch=4),
        mix([one, two], [1, 1]),
        mix([one, two], [1, 2]),
        mix([two, one], [1, 1]),
        mix([one, two], [1, 1], num_records=50),
    ]
    assert len({opened(drawn).fingerprint() for drawn in made}) == len(made)
    assert opened(made[0]).fingerprint() == opened(sample_by_weight(one, np.ones(100))).fingerprint()
