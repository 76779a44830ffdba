"""Records in real S3 servers, where s3fs and the servers are installed: `make test-s3`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from trueline import events, files
from trueline.data.formats.parquet import ParquetFormat
from trueline.data.open import open_records
from trueline.data.records import FileRecords
from trueline.data.tools import inspect
from trueline.data.tools.writer import RangeWriter, WritePlan
from trueline.errors import DataError
from trueline.storage import listing, object_store
from trueline.storage.cache import BlockCache
from trueline.storage.folder import StoreFolder
from worlds.records import WORLDS, flat, rows_of
from worlds.s3 import CHECKING, KEY, REFUSING, SECRET, SERVERS

pytest.importorskip("s3fs", reason="the store's package s3fs is not installed: make test-s3")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the packages' own warnings are theirs


@pytest.fixture(params=SERVERS)
def s3_endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a server, each of them in turn."""
    with SERVERS[request.param](tmp_path / "served") as url:
        yield url


@pytest.fixture
def bucket(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    from fsspec.config import conf

    monkeypatch.setitem(conf, "s3", {"key": KEY, "secret": SECRET, "endpoint_url": s3_endpoint})
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(listing, "_shared_cache", lambda: BlockCache(tmp_path / "cache", 1 << 26))
    fs, _ = object_store.open_store("s3://records/")
    fs.mkdir("records")
    return "s3://records"


def test_records_are_converted_to_s3_and_read_back_from_it(bucket: str, tmp_path: Path) -> None:
    path = WORLDS["csv"].write(tmp_path / "a", flat(200))
    facts = inspect.convert(path, f"{bucket}/flat", range_records=64)
    assert len(facts["parts"]) == 4
    assert rows_of(open_records(f"{bucket}/flat")) == flat(200)
    assert rows_of(open_records(f"{bucket}/flat/*-000000000064.parquet")) == flat(200)[:64]


def test_an_object_that_was_replaced_is_an_error_and_an_absent_one_is_named(bucket: str, tmp_path: Path) -> None:
    fs, _ = object_store.open_store(bucket)
    fs.pipe_file("records/a.parquet", WORLDS["parquet"].write(tmp_path / "a", flat(20)).read_bytes())
    uncached = object_store.ObjectStore(fs, object_store.RetryPolicy(), None)
    records = FileRecords(ParquetFormat(), listing.list_store(f"{bucket}/a.parquet", (), store=uncached))
    assert rows_of(records) == flat(20)
    fs.pipe_file("records/a.parquet", WORLDS["parquet"].write(tmp_path / "b", flat(21)).read_bytes())
    with pytest.raises(DataError, match=r"s3://records/a\.parquet was changed while it was in use"):
        rows_of(records)
    with pytest.raises(DataError, match=r"no records at .s3://records/b\.csv.: the object does not exist"):
        open_records(f"{bucket}/b.csv")


@pytest.mark.parametrize("s3_endpoint", CHECKING, indirect=True)
def test_a_store_that_refuses_the_key_is_an_error_that_names_the_object_and_no_secret(
    bucket: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.config import conf

    wrong = {"key": KEY, "secret": "another-secret-altogether", "endpoint_url": s3_endpoint}
    monkeypatch.setitem(conf, "s3", wrong)
    with pytest.raises(DataError, match=r"s3://records/a\.csv") as refused:
        open_records(f"{bucket}/a.csv")
    assert "another-secret" not in f"{refused.value} {refused.value.hint}"


def test_parts_that_were_written_before_a_death_are_not_written_again(bucket: str) -> None:
    plan = WritePlan(num_records=100, range_records=40, of="model 7")
    table = pa.table({"record": list(range(100))})
    first = RangeWriter(f"{bucket}/answers", plan)
    first.write(40, 80, table[40:80])
    again = RangeWriter(f"{bucket}/answers", plan)
    assert again.missing() == [(0, 40), (80, 100)]
    for start, stop in again.missing():
        again.write(start, stop, table[start:stop])
    again.commit()
    assert rows_of(open_records(f"{bucket}/answers")) == table.to_pylist()
    with pytest.raises(DataError, match="written with another plan"):
        RangeWriter(f"{bucket}/answers", WritePlan(num_records=100, range_records=40, of="model 8"))


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The names of the events of a test."""
    names: list[str] = []
    with events.listening(lambda name, _: names.append(name)):
        yield names


def _frozen_before_its_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks from here on saw nothing: as one that looked, was frozen, and goes on after the others."""
    fs, _ = object_store.open_store("s3://records/")
    monkeypatch.setattr(type(fs), "exists", lambda self, path: False)


@pytest.mark.parametrize("s3_endpoint", REFUSING, indirect=True)
def test_a_part_that_is_there_is_not_replaced_by_a_writer_that_was_frozen_before_its_put(
    bucket: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = WritePlan(num_records=4, range_records=4)
    late, first = RangeWriter(f"{bucket}/answers", plan), RangeWriter(f"{bucket}/answers", plan)
    first.write(0, 4, pa.table({"record": [1, 2, 3, 4]}))
    facts = first.commit()
    _frozen_before_its_put(monkeypatch)
    late.write(0, 4, pa.table({"record": [1, 2, 3, 5]}))
    assert late.commit() == facts
    assert rows_of(open_records(f"{bucket}/answers")) == [{"record": n} for n in (1, 2, 3, 4)]
    assert said == ["part.kept"]


@pytest.mark.parametrize("s3_endpoint", REFUSING, indirect=True)
def test_of_two_plans_that_begin_at_the_same_moment_one_is_refused(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = WritePlan(num_records=4, of="model 7")
    asked: list[str] = []
    get = StoreFolder.get

    def overtaken(folder: StoreFolder, name: str) -> bytes | None:
        asked.append(name)
        found = get(folder, name)
        if len(asked) == 1:  # the other one begins between the look and the PUT of this one
            RangeWriter(f"{bucket}/answers", WritePlan(num_records=4, of="model 8"))
            _frozen_before_its_put(monkeypatch)
            monkeypatch.setattr(StoreFolder, "names", lambda folder: set())
        return found

    monkeypatch.setattr(StoreFolder, "get", overtaken)
    with pytest.raises(DataError, match=r"was written with another plan: .*model 8"):
        RangeWriter(f"{bucket}/answers", plan)


@pytest.mark.parametrize("s3_endpoint", ["rclone"], indirect=True)
def test_where_a_store_overwrites_it_is_said_and_a_late_writer_that_looks_changes_nothing(
    bucket: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = WritePlan(num_records=4, range_records=4)
    late, first = RangeWriter(f"{bucket}/answers", plan), RangeWriter(f"{bucket}/answers", plan)
    first.write(0, 4, pa.table({"record": [1, 2, 3, 4]}))
    late.write(0, 4, pa.table({"record": [1, 2, 3, 5]}))
    assert rows_of(open_records(f"{bucket}/answers/part-*.parquet")) == [{"record": n} for n in (1, 2, 3, 4)]
    assert said == ["store.overwrites", "store.overwrites", "part.kept"]


@pytest.mark.parametrize("s3_endpoint", ["rclone"], indirect=True)
def test_where_a_store_overwrites_the_commit_list_shows_a_part_that_was_replaced_later(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = WritePlan(num_records=4, range_records=4)
    late, first = RangeWriter(f"{bucket}/answers", plan), RangeWriter(f"{bucket}/answers", plan)
    first.write(0, 4, pa.table({"record": [1, 2, 3, 4]}))
    (part,) = first.commit()["parts"]
    _frozen_before_its_put(monkeypatch)
    late.write(0, 4, pa.table({"record": [1, 2, 3, 5]}))
    fs, _ = object_store.open_store(f"{bucket}/")
    assert files.sha256_bytes(fs.cat_file(f"records/answers/{part['name']}")) != part["sha256"]


def test_an_epoch_is_read_from_the_cache_once_its_blocks_are_there(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect.convert(WORLDS["csv"].write(tmp_path / "a", flat(200)), f"{bucket}/flat", range_records=64)
    assert rows_of(open_records(f"{bucket}/flat")) == flat(200)
    fs, _ = object_store.open_store(bucket)
    monkeypatch.setattr(type(fs), "_cat_file", None)  # whoever would ask the store now fails
    records = open_records(f"{bucket}/flat")
    assert rows_of(records) == flat(200)
