"""Records in real S3 servers, where s3fs and the servers are installed: `make test-s3`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from s3_worlds import KEY, SECRET, SERVERS
from worlds import WORLDS, flat

from trueline.data import look, remote
from trueline.data.cache import BlockCache
from trueline.data.open import open_records
from trueline.data.parquet import ParquetFormat
from trueline.data.records import FileRecords, Records
from trueline.data.write import Plan, RangeWriter
from trueline.errors import DataError

pytest.importorskip("s3fs", reason="the store's package s3fs is not installed: make test-s3")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the packages' own warnings are theirs


def rows_of(records: Records) -> list[object]:
    return [row for number, unit in enumerate(records.units) for row in records.load(number, 0, unit.count).to_pylist()]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a server, each of them in turn."""
    with SERVERS[request.param](tmp_path / "served") as url:
        yield url


@pytest.fixture
def bucket(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    from fsspec.config import conf

    monkeypatch.setitem(conf, "s3", {"key": KEY, "secret": SECRET, "endpoint_url": server})
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(remote, "_shared_cache", lambda: BlockCache(tmp_path / "cache", 1 << 26))
    fs, _ = remote.opened("s3://records/")
    fs.mkdir("records")
    return "s3://records"


def test_records_are_converted_to_s3_and_read_back_from_it(bucket: str, tmp_path: Path) -> None:
    path = WORLDS["csv"].write(tmp_path / "a", flat(200))
    facts = look.convert(path, f"{bucket}/flat", range_records=64)
    assert len(facts["parts"]) == 4
    assert rows_of(open_records(f"{bucket}/flat")) == flat(200)
    assert rows_of(open_records(f"{bucket}/flat/*-000000000064.parquet")) == flat(200)[:64]


def test_an_object_that_was_replaced_is_an_error_and_an_absent_one_is_named(bucket: str, tmp_path: Path) -> None:
    fs, _ = remote.opened(bucket)
    fs.pipe_file("records/a.parquet", WORLDS["parquet"].write(tmp_path / "a", flat(20)).read_bytes())
    uncached = remote.Store(fs, remote.Patience(), None)
    records = FileRecords(ParquetFormat(), remote.list_store(f"{bucket}/a.parquet", (), store=uncached))
    assert rows_of(records) == flat(20)
    fs.pipe_file("records/a.parquet", WORLDS["parquet"].write(tmp_path / "b", flat(21)).read_bytes())
    with pytest.raises(DataError, match=r"s3://records/a\.parquet was changed while it was in use"):
        rows_of(records)
    with pytest.raises(DataError, match=r"no records at .s3://records/b\.csv.: the object does not exist"):
        open_records(f"{bucket}/b.csv")


@pytest.mark.parametrize("server", ["rclone"], indirect=True)
def test_a_store_that_refuses_the_key_is_an_error_that_names_the_object_and_no_secret(
    bucket: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.config import conf

    wrong = {"key": KEY, "secret": "another-secret-altogether", "endpoint_url": server}
    monkeypatch.setitem(conf, "s3", wrong)
    with pytest.raises(DataError, match=r"s3://records/a\.csv") as refused:
        open_records(f"{bucket}/a.csv")
    assert "another-secret" not in f"{refused.value} {refused.value.hint}"


def test_parts_that_were_written_before_a_death_are_not_written_again(bucket: str) -> None:
    plan = Plan(num_records=100, range_records=40, of="model 7")
    table = pa.table({"record": list(range(100))})
    first = RangeWriter(f"{bucket}/answers", plan)
    first.write(40, 80, table[40:80])
    again = RangeWriter(f"{bucket}/answers", plan)
    assert again.missing() == [(0, 40), (80, 100)]
    for start, stop in again.missing():
        again.write(start, stop, table[start:stop])
    again.commit()
    assert rows_of(open_records(f"{bucket}/answers")) == table.to_pylist()
    with pytest.raises(DataError, match="made of something else"):
        RangeWriter(f"{bucket}/answers", Plan(num_records=100, range_records=40, of="model 8"))


def test_an_epoch_is_read_from_the_cache_once_its_blocks_are_there(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look.convert(WORLDS["csv"].write(tmp_path / "a", flat(200)), f"{bucket}/flat", range_records=64)
    assert rows_of(open_records(f"{bucket}/flat")) == flat(200)
    fs, _ = remote.opened(bucket)
    monkeypatch.setattr(type(fs), "_cat_file", None)  # whoever would ask the store now fails
    records = open_records(f"{bucket}/flat")
    assert rows_of(records) == flat(200)
