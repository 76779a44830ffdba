from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from conformance.source import COUNT, SourceConformance
from trueline.data.formats import parquet
from trueline.data.formats.parquet import ParquetFormat
from trueline.data.loading.tensors import tensor
from trueline.data.open import as_source, open_source
from trueline.data.source import Mode, Source
from trueline.data.sources.table_source import CACHE_BYTES, TableSource
from trueline.errors import DataError


def write(path: Path, start: int = 0, stop: int = COUNT, group: int = 7) -> Path:
    numbers = np.arange(start, stop)
    table = pa.table({"a": numbers.astype(np.float32), "b": 2 * numbers.astype(np.float32), "label": numbers})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group, write_page_checksum=True)
    return path


def feed(records: pa.Table, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    columns = [torch.from_numpy(records[name].to_numpy().copy()) for name in ("a", "b")]
    return torch.stack(columns, dim=1), torch.from_numpy(records["label"].to_numpy().copy())


def parquet_source(uris: Any, feed: Callable[..., Any], *, mode: Mode, cache_bytes: int = CACHE_BYTES) -> TableSource:
    return open_source(uris, feed, mode=mode, format="parquet", cache_bytes=cache_bytes)


class TestOneFile(SourceConformance):
    @pytest.fixture
    def source(self, tmp_path: Path) -> Source:
        return as_source(str(write(tmp_path / "one.parquet")), mode="training", feed=feed, recipe="r")


class TestFolderOfFiles(SourceConformance):
    @pytest.fixture
    def source(self, tmp_path: Path) -> Source:
        write(tmp_path / "b.parquet", 60, 100, group=9)
        write(tmp_path / "a" / "a.parquet", 0, 60, group=100)
        (tmp_path / "_SUCCESS.parquet").touch()
        return as_source(tmp_path, mode="training", feed=feed, recipe="r")


class TestFileUris(SourceConformance):
    @pytest.fixture
    def source(self, tmp_path: Path) -> Source:
        first, second = write(tmp_path / "z 1.parquet", 0, 30), write(tmp_path / "a 2.parquet", 30, 100)
        return as_source([first.as_uri(), second.as_uri()], mode="training", feed=feed, recipe="r")


class TestGlobWithACacheThatHoldsOneGroup(SourceConformance):
    @pytest.fixture
    def source(self, tmp_path: Path) -> Source:
        write(tmp_path / "part-0.parquet", 0, 50)
        write(tmp_path / "part-1.parquet", 50, 100)
        return parquet_source(str(tmp_path / "part-*.parquet"), feed, mode="training", cache_bytes=1)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The row groups that are decoded whole from now on."""
    decoded: list[int] = []
    original = ParquetFormat.load

    def load(self: ParquetFormat, file: Any, part: Any, start: int, stop: int) -> pa.Table:
        decoded.append(part.at)
        return original(self, file, part, start, stop)

    monkeypatch.setattr(ParquetFormat, "load", load)
    return decoded


def test_a_row_group_is_a_unit_and_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = counted(monkeypatch)
    source = parquet_source(write(tmp_path / "one.parquet", group=25), feed, mode="training")
    assert [unit.count for unit in source.units] == [25] * 4
    for _ in range(3):
        source.read(np.array([99, 0, 98, 1, 1]))
    assert sorted(decoded) == [0, 3]


@pytest.mark.parametrize("batch", [1, 3, 7, 8, 50, 100])
@pytest.mark.parametrize("piece_bytes", [1, 200, 1 << 20])
def test_who_reads_in_order_gets_every_record_and_no_row_group_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, piece_bytes: int
) -> None:
    monkeypatch.setattr(parquet, "_PIECE_BYTES", piece_bytes)
    decoded = counted(monkeypatch)
    write(tmp_path / "a.parquet", 0, 52)
    write(tmp_path / "b.parquet", 52, COUNT, group=20)
    source = parquet_source(tmp_path, feed, mode="evaluation", cache_bytes=1)
    for _ in range(2):
        reads = [np.arange(at, min(at + batch, COUNT)) for at in range(0, COUNT, batch)]
        assert [label for read in reads for label in source.read(read).labels.tolist()] == list(range(COUNT))
    assert not decoded


def test_what_fits_the_cache_is_kept_when_it_is_read_in_order_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = counted(monkeypatch)
    source = parquet_source(write(tmp_path / "one.parquet", group=25), feed, mode="evaluation")
    reads = [np.arange(at, at + 10) for at in range(0, COUNT, 10)]
    kept = []
    for _ in range(4):
        assert [label for read in reads for label in source.read(read).labels.tolist()] == list(range(COUNT))
        kept.append(list(decoded))
    assert kept == [[], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_a_reader_that_turns_back_or_jumps_gets_what_it_asks_for(tmp_path: Path) -> None:
    source = parquet_source(write(tmp_path / "one.parquet", group=20), feed, mode="training", cache_bytes=1)
    chance = np.random.default_rng(0)
    at = 0
    for _ in range(200):
        at = int(chance.choice([at, at, at, chance.integers(COUNT), 0])) % COUNT
        stop = min(at + int(chance.integers(1, 30)), COUNT)
        assert source.read(np.arange(at, stop)).labels.tolist() == list(range(at, stop))
        at = stop if chance.random() < 0.8 else at
        if chance.random() < 0.1:
            assert source.read(np.array([5, 99, 7])).labels.tolist() == [5, 99, 7]


@pytest.mark.parametrize("cache_bytes", [1, 1 << 20])
def test_a_tensor_that_is_written_to_changes_no_later_read(tmp_path: Path, cache_bytes: int) -> None:
    def views(records: pa.Table, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor(records["a"]), tensor(records["label"])

    source = parquet_source(write(tmp_path / "one.parquet"), views, mode="training", cache_bytes=cache_bytes)
    reads = (
        [np.arange(at, at + 10) for at in range(0, COUNT, 10)] * 3 + [np.array([4, 90, 3])] * 5 + [np.array([8])] * 3
    )
    held = []
    for read in reads:
        batch = source.read(read)
        assert batch.inputs.tolist() == batch.labels.tolist() == read.tolist()
        batch.inputs.fill_(-1)
        batch.labels.fill_(-1)
        held.append(batch)


def test_a_file_that_is_cut_short_in_place_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    path = write(tmp_path / "one.parquet", 0, COUNT, group=20)
    source = parquet_source(path, feed, mode="training", cache_bytes=1)
    source.read(np.arange(10))
    with path.open("r+b") as file:
        file.truncate(100)
    assert source.read(np.arange(10, 20)).labels.tolist() == list(range(10, 20)), "decoded before"
    for at in (20, 30, 90):
        with pytest.raises(DataError, match=r"one\.parquet"):
            source.read(np.arange(at, at + 10))


def test_damage_that_is_met_in_passing_is_named_and_met_again(tmp_path: Path) -> None:
    path = write(tmp_path / "one.parquet", group=50)
    place = pq.read_metadata(path).row_group(1).column(0).data_page_offset + 60
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)
    source = parquet_source(path, feed, mode="training", cache_bytes=1)
    for _ in range(2):
        assert source.read(np.arange(50)).labels.tolist() == list(range(50))
        with pytest.raises(DataError, match=r"one\.parquet is torn in row group 1"):
            source.read(np.arange(50, 60))


def test_the_fingerprint_changes_when_a_file_does(tmp_path: Path) -> None:
    path = write(tmp_path / "one.parquet")
    before = parquet_source(path, feed, mode="training").fingerprint()
    os.utime(path, ns=(1, 1))
    assert parquet_source(path, feed, mode="training").fingerprint() != before


def test_missing_foreign_and_torn_files_are_errors_that_name_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.parquet': the file does not exist"):
        parquet_source(tmp_path / "absent.parquet", feed, mode="training")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no \.parquet, \.pq files"):
        parquet_source(tmp_path / "empty", feed, mode="training")
    foreign = tmp_path / "foreign.parquet"
    foreign.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"foreign\.parquet is not a Parquet file"):
        parquet_source(foreign, feed, mode="training")
    whole = write(tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "head.parquet").write_bytes(b"NOPE" + whole[4:])
    with pytest.raises(DataError, match=r"head\.parquet is not a Parquet file: it begins with b'NOPE'"):
        parquet_source(tmp_path / "head.parquet", feed, mode="training")
    (tmp_path / "torn.parquet").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"torn\.parquet is torn"):
        parquet_source(tmp_path / "torn.parquet", feed, mode="training")
    with pytest.raises(DataError, match="holds no records"):
        parquet_source(write(tmp_path / "none.parquet", 0, 0), feed, mode="training")


def test_damaged_pages_and_exchanged_files_are_errors_when_they_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "one.parquet")
    content = bytearray(path.read_bytes())
    content[60:64] = bytes(byte ^ 0xFF for byte in content[60:64])
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"one\.parquet is torn in row group 0"):
        parquet_source(path, feed, mode="training").read(np.array([0]))
    source = parquet_source(write(tmp_path / "two.parquet"), feed, mode="training")
    write(tmp_path / "two.parquet", 0, 90)
    with pytest.raises(DataError, match="was changed while it was in use"):
        source.read(np.array([0]))
    (tmp_path / "two.parquet").unlink()
    with pytest.raises(DataError, match="cannot read"):
        source.read(np.array([0]))


def test_files_of_different_columns_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": [1.5]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet has other columns than"):
        parquet_source(tmp_path, feed, mode="training")


def broken(records: pa.Table, mode: str) -> Any:
    return records["absent"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (broken, r"fails on 2 records with columns a, b, label: KeyError"),
        (lambda records, mode: torch.ones(2), r"returned a Tensor, expected \(inputs, labels\)"),
        (lambda records, mode: (1, 2, 3), r"returned a tuple of 3"),
        (
            lambda records, mode: (torch.ones(3, 2), torch.ones(2)),
            r"inputs of feed.*shape \[3, 2\], expected 2 records",
        ),
        (lambda records, mode: (torch.ones(2), torch.tensor(1)), r"labels of feed"),
        (
            lambda records, mode: ({"x": np.ones(2)}, torch.ones(2)),
            r"'x' in inputs of feed.*a ndarray, expected tensors",
        ),
        (lambda records, mode: (torch.ones(2), None), r"labels of feed.*NoneType"),
    ],
)
def test_a_feed_that_gives_the_wrong_thing_is_named(tmp_path: Path, wrong: Any, words: str) -> None:
    source = parquet_source(write(tmp_path / "one.parquet"), wrong, mode="training")
    with pytest.raises(DataError, match=words):
        source.read(np.array([3, 4]))


def test_prediction_needs_no_labels(tmp_path: Path) -> None:
    source = parquet_source(write(tmp_path / "one.parquet"), lambda t, m: (feed(t, m)[0], None), mode="prediction")
    assert source.read(np.array([3])).labels is None


def test_strings_and_missing_values_come_back_in_order(tmp_path: Path) -> None:
    words = [None if i % 5 == 0 else f"word {i}" for i in range(40)]
    pq.write_table(pa.table({"w": words}), tmp_path / "w.parquet", row_group_size=6)
    source = parquet_source(tmp_path / "w.parquet", feed, mode="training")
    indices = np.array([39, 0, 12, 12, 25])
    assert source.table(indices)["w"].to_pylist() == [words[i] for i in indices]


@pytest.mark.slow
def test_listing_needs_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path / "one.parquet")
    code = (
        "import sys; from trueline.data.open import open_source;"
        f"s = open_source({str(path)!r}, None, mode='training'); s.table([1, 2]); s.fingerprint();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_prefetched_is_read_once_and_what_is_not_asked_for_is_let_go_of(tmp_path: Path) -> None:
    source = as_source(str(write(tmp_path / "one.parquet")), mode="training", feed=feed, recipe="r")
    assert isinstance(source, TableSource)
    taken: list[list[int]] = []
    take = source._tables.take

    def noted(indices: Any) -> pa.Table:
        taken.append(np.asarray(indices).tolist())
        return take(indices)

    source._tables.take = noted  # type: ignore[method-assign]
    one, two, three = (np.array(ids) for ids in ([3, 1], [9], [5]))
    source.prefetch(one)
    source.prefetch(one)
    assert source.read(one).labels.tolist() == [3, 1]
    assert taken == [[3, 1]]
    for expected in (one, two, three):
        source.prefetch(expected)
    assert source.read(np.array([7])).labels.tolist() == [7]
    assert not source._coming, "other records were asked for: nothing is kept"
    assert [5] not in taken, "two batches ahead at most"


def test_a_prefetch_of_what_cannot_be_read_fails_where_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "one.parquet")
    source = as_source(str(path), mode="training", feed=feed, recipe="r")
    assert isinstance(source, TableSource)
    path.unlink()
    source.prefetch(np.array([1, 2]))
    with pytest.raises(DataError, match=r"one\.parquet"):
        source.read(np.array([1, 2]))
