"""Containers in buckets: what is fetched, what is pushed, and what is said when that fails."""

import uuid

import fsspec
import pytest

from trueline.errors import DataError
from trueline.train.learners.buckets import ResultsPush, fetch_objects


@pytest.fixture
def bucket():
    """A bucket of fsspec's store in memory, with its file system."""
    name = uuid.uuid4().hex
    fs = fsspec.filesystem("memory")
    fs.mkdir(f"/{name}")
    return fs, f"/{name}"


def test_what_is_missing_or_has_another_size_is_fetched_and_the_rest_stays(bucket, tmp_path):
    fs, top = bucket
    fs.pipe(f"{top}/data/a", b"one")
    fs.pipe(f"{top}/b", b"two")
    noted = []
    fetch_objects(fs, top, tmp_path, lambda count, size: noted.append((count, size)))
    assert (tmp_path / "data/a").read_bytes() == b"one"
    fs.pipe(f"{top}/b", b"longer")
    fetch_objects(fs, top, tmp_path, lambda count, size: noted.append((count, size)))
    assert (tmp_path / "b").read_bytes() == b"longer"
    assert noted == [(2, 6), (1, 6)]


def test_what_is_new_or_changed_is_pushed_once(bucket, tmp_path):
    fs, top = bucket
    push = ResultsPush(fs, tmp_path, f"{top}/job-1")
    (tmp_path / "learner-1").mkdir()
    (tmp_path / "learner-1/training-log.txt").write_text("a")
    (tmp_path / "model.partial").write_text("half")
    assert push.push() == 1
    assert push.push() == 0
    (tmp_path / "learner-1/training-log.txt").write_text("ab")
    assert push.push() == 1
    assert fs.cat(f"{top}/job-1/learner-1/training-log.txt") == b"ab"
    assert not fs.exists(f"{top}/job-1/model.partial")


class AwayStore:
    def __init__(self, error):
        self.error = error

    def find(self, prefix, detail):
        raise self.error

    def put_file(self, path, key):
        raise self.error


def test_a_bucket_that_is_missing_or_away_is_named_and_what_was_not_pushed_is_tried_again(tmp_path):
    with pytest.raises(DataError, match="there is no bucket 'pictures'"):
        fetch_objects(AwayStore(FileNotFoundError("404")), "pictures/x", tmp_path, lambda count, size: None)
    with pytest.raises(DataError, match="cannot list pictures: ValueError: password=") as caught:
        fetch_objects(AwayStore(ValueError("password=abc")), "pictures", tmp_path, lambda count, size: None)
    assert "abc" not in caught.value.message
    (tmp_path / "a").write_text("a")
    push = ResultsPush(AwayStore(OSError("refused")), tmp_path, "models/x")
    for _ in range(2):
        with pytest.raises(DataError, match="cannot write to models/x: OSError: refused"):
            push.push()
