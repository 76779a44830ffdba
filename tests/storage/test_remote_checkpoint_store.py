"""A folder of an object store is a place of checkpoints: in memory here, and on S3 where a server says so.

TRUELINE_TEST_S3 names a bucket's folder to test against, e.g. s3://bucket/tests; s3fs and credentials are then needed.
"""

import os
import uuid

import fsspec
import pytest

from conformance.checkpoint_store import *  # noqa: F403  the shared tests
from conformance.checkpoint_store import PARTS
from trueline.errors import StorageError
from trueline.storage.checkpoint_store import open_checkpoint_store
from trueline.storage.location import join_location, parse_location, split_location

STORES = ["memory://tests", *filter(None, [os.environ.get("TRUELINE_TEST_S3")])]


@pytest.fixture(params=STORES)
def url(request):
    return join_location(request.param, uuid.uuid4().hex)


@pytest.fixture
def place(url):
    return open_checkpoint_store(url, seal="seal")


def test_a_url_keeps_both_slashes_wherever_it_goes():
    assert parse_location("s3://bucket/folder/") == "s3://bucket/folder"
    assert join_location("s3://bucket/folder", "step-1") == "s3://bucket/folder/step-1"
    assert split_location("s3://bucket/folder/step-1") == ("s3://bucket/folder", "step-1")


def test_without_its_seal_a_name_does_not_exist_and_is_left_for_the_sweeper(place, url):
    fs, root = fsspec.url_to_fs(url)
    fs.pipe_file(f"{root}/step-7/body", b"of a writer that died")
    place.write("step-8", PARTS)
    assert (place.names(), place.names(unfinished=True)) == (["step-8"], ["step-7"])
    place.remove("step-7")
    assert place.names(unfinished=True) == []


def test_the_seal_is_gone_before_anything_of_a_name_is_written_again(place, url):
    place.write("step-1", PARTS)
    fs, root = fsspec.url_to_fs(url)

    def parts():
        assert not fs.exists(f"{root}/step-1/seal")
        yield from PARTS

    place.write("step-1", parts())
    assert place.names() == ["step-1"]


def test_the_seal_goes_first_when_a_name_is_removed(place, url, monkeypatch):
    place.write("step-1", PARTS)
    fs, root = fsspec.url_to_fs(url)
    remove, sealed = type(fs).rm, []

    def watched(self, path, **how):
        sealed.append(self.exists(f"{root}/step-1/seal"))
        remove(self, path, **how)

    monkeypatch.setattr(type(fs), "rm", watched)
    place.remove("step-1")
    assert (sealed, place.names()) == ([False], [])


def test_what_another_process_has_written_is_seen_though_a_store_keeps_its_listings(place, url, monkeypatch):
    fs, _ = fsspec.url_to_fs(url)
    kept: dict[str, list[str]] = {}
    find = type(fs).find
    monkeypatch.setattr(type(fs), "find", lambda self, path: kept.setdefault(path, find(self, path)))
    monkeypatch.setattr(type(fs), "invalidate_cache", lambda self, path=None: kept.clear())
    assert place.names() == []
    open_checkpoint_store(url, seal="seal").write("step-1", PARTS)
    assert place.names() == ["step-1"]


class NoCredentialsError(Exception):
    """As botocore's, which is no OSError."""


@pytest.mark.parametrize(
    ("error", "said", "hint"),
    [
        (NoCredentialsError("Unable to locate credentials"), "Unable to locate credentials", "credentials"),
        (PermissionError("Access Denied"), "Access Denied", "credentials"),
        (FileNotFoundError("The specified bucket does not exist"), "bucket does not exist", "create the bucket"),
        (OSError(16, "Please reduce your request rate."), "reduce your request rate", "at its next checkpoint"),
        (TimeoutError(), "TimeoutError: no reason given", "at its next checkpoint"),
    ],
)
def test_whatever_a_store_raises_is_a_storage_error_in_words(monkeypatch, error, said, hint):
    place = open_checkpoint_store("memory://failing", seal="seal")

    def fail(*_, **__):
        raise error

    for method in ("open", "find"):
        monkeypatch.setattr(type(fsspec.filesystem("memory")), method, fail)
    for act in (lambda: place.write("step-1", PARTS), place.names):
        with pytest.raises(StorageError, match=said) as caught:
            act()
        assert "memory://failing" in caught.value.message
        assert hint in caught.value.hint


def test_an_unknown_scheme_is_told_what_can_be_written(monkeypatch):
    with pytest.raises(StorageError) as caught:
        open_checkpoint_store("s4://bucket", seal="seal")
    assert "s3://BUCKET" in caught.value.hint


def test_a_missing_library_is_named_with_the_extra_that_brings_it(monkeypatch):
    def missing(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", missing)
    with pytest.raises(StorageError) as caught:
        open_checkpoint_store("s3://bucket", seal="seal")
    assert caught.value.hint == "pip install 'trueline[s3]'"
