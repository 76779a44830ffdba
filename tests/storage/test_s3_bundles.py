"""Bundles in real S3 servers, where s3fs and the servers are installed: `make test-s3`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from trueline.bundle import Bundle, Dim, Golden, Signature, pack
from trueline.errors import BundleError, StorageError
from trueline.serve.models import fetch
from worlds import bundles
from worlds.s3 import CHECKING, KEY, SECRET, SERVERS

pytest.importorskip("s3fs", reason="the store's package s3fs is not installed: make test-s3")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the packages' own warnings are theirs


@pytest.fixture(params=SERVERS)
def s3_endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a server, each of them in turn."""
    with SERVERS[request.param](tmp_path / "served") as url:
        yield url


@pytest.fixture
def bundle_bucket(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Bundle]:
    """A bucket that holds a bundle as a folder and packed, each with a signature beside it; and the bundle."""
    import fsspec
    from fsspec.config import conf

    monkeypatch.setitem(conf, "s3", {"key": KEY, "secret": SECRET, "endpoint_url": s3_endpoint})
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fs = fsspec.filesystem("s3", skip_instance_cache=True)
    x, ones = bundles.spec("x", "batch", 3), np.ones((2, 3), np.float32)
    signature = Signature(inputs=(x,), outputs=(x,), dims={"batch": Dim()})
    golden = [Golden(case="2", inputs={"x": ones}, outputs={"x": ones})]
    bundle = bundles.bundle(tmp_path / "digits.bundle", b"program" * 100_000, signature, golden, name="digits")
    packed = pack(bundle.path, tmp_path / "digits.tlb")
    fs.mkdir("models")
    fs.put_file(str(packed), "models/digits.tlb")
    for name in ("bundle.json", *bundle.manifest.files):
        fs.put_file(str(bundle.path / name), f"models/digits.bundle/{name}")
    fs.pipe_file("models/digits.tlb.sig", b"trueline-signature-1 a b\n")
    return "s3://models", bundle


@pytest.mark.parametrize("name", ["digits.tlb", "digits.bundle"])
def test_a_bundle_comes_from_s3_verified_and_only_the_one_of_its_digest(
    bundle_bucket: tuple[str, Bundle], name: str, tmp_path: Path
) -> None:
    root, bundle = bundle_bucket
    found = fetch.fetch(f"{root}/{name}#sha256:{bundle.digest}", tmp_path / "cache")
    assert found.digest == bundle.digest
    assert found.program_path().read_bytes() == bundle.program_path().read_bytes()
    with pytest.raises(BundleError, match="expected 000000000000"):
        fetch.fetch(f"{root}/{name}#sha256:{'0' * 64}", tmp_path / "other")
    with pytest.raises(BundleError, match="there is no bundle at"):
        fetch.fetch(f"{root}/nobody.tlb", tmp_path / "other")


def test_what_vouches_for_a_bundle_in_s3_lies_beside_it(bundle_bucket: tuple[str, Bundle]) -> None:
    root, _ = bundle_bucket
    assert fetch.signature_of(f"{root}/digits.tlb") == "trueline-signature-1 a b\n"
    assert fetch.signature_of(f"{root}/digits.bundle/") is None


@pytest.mark.parametrize("s3_endpoint", CHECKING, indirect=True)
def test_a_store_that_refuses_the_key_is_an_error_and_names_no_secret(
    bundle_bucket: tuple[str, Bundle], s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs
    from fsspec.config import conf

    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setitem(conf, "s3", {"key": KEY, "secret": "another-secret-altogether", "endpoint_url": s3_endpoint})
    with pytest.raises((StorageError, BundleError)) as refused:
        fetch.fetch(f"{bundle_bucket[0]}/digits.tlb", tmp_path / "cache")
    assert "another-secret" not in str(refused.value)
