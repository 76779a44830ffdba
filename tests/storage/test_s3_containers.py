"""Containers of FfDL's manifests in real S3 servers, where s3fs and the servers are installed: `make test-s3`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from trueline.errors import DataError
from trueline.train.learners.buckets import ResultsPush, fetch_objects, open_bucket
from trueline.train.learners.manifest.read import DataStore
from worlds.s3 import CHECKING, KEY, SECRET, SERVERS

pytest.importorskip("s3fs", reason="the store's package s3fs is not installed: make test-s3")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the packages' own warnings are theirs


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Name and URL of each server in turn."""
    with SERVERS[request.param](tmp_path / "served") as url:
        yield request.param, url


def describe(url: str, password: str = SECRET) -> DataStore:
    return DataStore(type="mount_cos", data="pictures", results="models", endpoint=url, user=KEY, password=password)


def test_data_come_from_a_bucket_and_results_go_to_one(server: tuple[str, str], tmp_path: Path) -> None:
    fs = open_bucket(describe(server[1]))
    for name in ("pictures", "models"):
        fs.mkdir(name)
    fs.pipe_file("pictures/train/a.bin", b"a" * 1000)
    noted = []
    fetch_objects(fs, "pictures", tmp_path / "data", lambda count, size: noted.append((count, size)))
    assert (tmp_path / "data/train/a.bin").read_bytes() == b"a" * 1000
    assert noted == [(1, 1000)]
    fetch_objects(fs, "models/job-1", tmp_path / "results", lambda count, size: None)  # nothing is there yet
    (tmp_path / "results").mkdir(exist_ok=True)
    (tmp_path / "results/model.pt").write_bytes(b"model")
    assert ResultsPush(fs, tmp_path / "results", "models/job-1").push() == 1
    assert fs.cat_file("models/job-1/model.pt") == b"model"


def test_a_bucket_that_is_missing_and_a_wrong_key_are_told_in_words(server: tuple[str, str], tmp_path: Path) -> None:
    name, url = server
    with pytest.raises(DataError, match="there is no bucket 'nowhere'"):
        fetch_objects(open_bucket(describe(url)), "nowhere", tmp_path, lambda count, size: None)
    if name in CHECKING:
        fs = open_bucket(describe(url, password="a-wrong-secret-of-some-length"))
        with pytest.raises(DataError, match="cannot list nowhere") as caught:
            fetch_objects(fs, "nowhere", tmp_path, lambda count, size: None)
        assert "a-wrong-secret" not in caught.value.message
