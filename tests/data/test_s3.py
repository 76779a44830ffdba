"""Records in a real S3 server (moto's, in this process), where s3fs and moto are installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds import WORLDS, flat

from trueline.data import look, remote
from trueline.data.cache import BlockCache
from trueline.data.open import open_records
from trueline.data.records import Records
from trueline.errors import DataError

pytest.importorskip("s3fs", reason="the store's package s3fs is not installed")
server = pytest.importorskip("moto.server", reason="the S3 server moto is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the packages' own warnings are theirs


def rows_of(records: Records) -> list[object]:
    return [row for number, unit in enumerate(records.units) for row in records.load(number, 0, unit.count).to_pylist()]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from fsspec.config import conf

    started = server.ThreadedMotoServer(port=0)
    started.start()
    host, port = started.get_host_and_port()
    monkeypatch.setitem(conf, "s3", {"key": "anybody", "secret": "hunter2", "endpoint_url": f"http://{host}:{port}"})
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(remote, "_shared_cache", lambda: BlockCache(tmp_path / "cache", 1 << 26))
    fs, _ = remote.opened("s3://records/")
    fs.mkdir("records")
    yield "s3://records"
    started.stop()


def test_records_are_converted_to_s3_and_read_back_from_it(bucket: str, tmp_path: Path) -> None:
    path = WORLDS["csv"].write(tmp_path / "a", flat(200))
    facts = look.convert(path, f"{bucket}/flat", range_records=64)
    assert len(facts["parts"]) == 4
    assert rows_of(open_records(f"{bucket}/flat")) == flat(200)
    assert rows_of(open_records(f"{bucket}/flat/*-000000000064.parquet")) == flat(200)[:64]


def test_an_object_that_was_replaced_is_an_error_and_an_absent_one_is_named(bucket: str, tmp_path: Path) -> None:
    fs, _ = remote.opened(bucket)
    fs.pipe_file("records/a.csv", WORLDS["csv"].write(tmp_path / "a", flat(20)).read_bytes())
    records = open_records(f"{bucket}/a.csv")
    fs.pipe_file("records/a.csv", WORLDS["csv"].write(tmp_path / "a", flat(21)).read_bytes())
    remote._shared_cache()._mapped.clear()
    for block in (tmp_path / "cache").glob("??/*-*"):
        block.unlink()
    with pytest.raises(DataError, match=r"s3://records/a\.csv was changed while it was in use"):
        rows_of(records)
    with pytest.raises(DataError, match=r"no records at .s3://records/b\.csv.: the object does not exist"):
        open_records(f"{bucket}/b.csv")
