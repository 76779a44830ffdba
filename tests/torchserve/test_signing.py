"""Where keys are trusted, what none of them has signed is not served, wherever it comes from."""

from __future__ import annotations

import asyncio
import contextlib
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

from trueline import serve
from trueline.bundle import open_bundle, signing
from trueline.bundle.signing import Trusted
from trueline.bundle.write import pack
from trueline.errors import BundleError, UsageError
from trueline.registry import register, resolve
from trueline.serve.handlers.budget import Limits
from trueline.serve.handlers.loader import ArchiveLoader
from trueline.serve.models import sources
from trueline.serve.models.catalog import Models
from trueline.serve.models.controller import Fleet
from trueline.serve.models.loader import Refused, ResolvedSource, RuntimeOptions, VersionOptions
from trueline.torchserve.signing import sign
from worlds import archives, bundles, servers


def key(folder: Path, name: str) -> Path:
    """A private key, `name.pem`, and the public one beside it, `name.pub`."""
    folder.mkdir(parents=True, exist_ok=True)
    private = Ed25519PrivateKey.generate()
    path = folder / f"{name}.pem"
    path.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    path.with_suffix(".pub").write_bytes(
        private.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return path


def mar(path: Path, text: str = "def handle(data, context):\n    return data and [1] * len(data)\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    manifest = {"runtime": "python", "model": {"modelName": path.stem, "modelVersion": "1.0", "handler": "h.py"}}
    with zipfile.ZipFile(path, "w") as parts:
        parts.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        parts.writestr("h.py", text)
    return path


def test_a_signature_is_of_one_digest_by_one_key(tmp_path: Path) -> None:
    ours, others = key(tmp_path, "ours"), key(tmp_path, "others")
    both = tmp_path / "both.pub"
    both.write_bytes(ours.with_suffix(".pub").read_bytes() + others.with_suffix(".pub").read_bytes())
    trusted = Trusted.read(ours.with_suffix(".pub"))
    good = signing.make_signature("ab" * 32, ours)
    trusted.check("it", "ab" * 32, good)
    Trusted.read(both).check("it", "ab" * 32, signing.make_signature("ab" * 32, others))
    with pytest.raises(BundleError, match="not one of its digest"):
        trusted.check("it", "cd" * 32, good)
    with pytest.raises(BundleError, match="signed by no key that is trusted here"):
        trusted.check("it", "ab" * 32, signing.make_signature("ab" * 32, others))
    with pytest.raises(BundleError, match="is not signed"):
        trusted.check("it", "ab" * 32, None)
    form, name, text = good.split()
    for torn in ("", "x", f"{form} {name}", f"{form} {name} {text[:-8]}", f"{form} {name} %%%", f"other {name} {text}"):
        with pytest.raises(BundleError):
            trusted.check("it", "ab" * 32, torn)


def test_what_is_no_key_is_said_with_how_one_is_made(tmp_path: Path) -> None:
    ours = key(tmp_path, "ours")
    rsa = tmp_path / "rsa.pub"
    rsa.write_bytes(
        generate_private_key(65537, 2048)
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    for path in (tmp_path / "missing", ours, rsa):
        with pytest.raises(UsageError) as found:
            Trusted.read(path)
        assert "openssl genpkey" in found.value.hint
    for path in (tmp_path / "missing", ours.with_suffix(".pub")):
        with pytest.raises(UsageError, match="private key"):
            signing.make_signature("ab", path)


def test_what_was_changed_is_not_signed_and_a_bundle_has_one_signature_packed_or_not(tmp_path: Path) -> None:
    ours = key(tmp_path, "ours")
    bundle = bundles.double_plus(tmp_path / "tiny.bundle")
    packed = pack(bundle.path, tmp_path / "tiny.tlb")
    assert sign(bundle.path, ours).read_text() == sign(packed, ours).read_text()
    assert open_bundle(bundle.path).digest == bundle.digest, "it lies beside, not inside"
    (bundle.path / "lineage.json").write_bytes(b"{}")
    with pytest.raises(BundleError):
        sign(bundle.path, ours)


def test_a_url_brings_the_signature_that_lies_beside_its_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ours = key(tmp_path, "ours")
    bundle = bundles.double_plus(tmp_path / "tiny.bundle")
    packed = pack(bundle.path, tmp_path / "tiny.tlb")
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/signed/tiny.tlb", packed.read_bytes())
    trusted = Trusted.read(ours.with_suffix(".pub"))
    unsigned = sources.resolve("memory://signed/tiny.tlb", None, signed=True)
    with pytest.raises(BundleError, match="is not signed"):
        unsigned.check(trusted, bundle.digest)
    memory.pipe_file("/signed/tiny.tlb.sig", sign(packed, ours).read_bytes())
    sources.resolve(f"memory://signed/tiny.tlb#sha256:{bundle.digest}", None, signed=True).check(trusted, bundle.digest)


@pytest.fixture(scope="module")
def signed_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`good`, signed; `bare`, not; `theirs`, signed by others; `moved`, with the signature of `good`; two archives."""
    root = tmp_path_factory.mktemp("signed")
    ours, others = key(root, "ours"), key(root, "others")
    folder = root / "store"
    for name in ("good", "bare", "theirs", "moved"):
        bundles.double_plus(folder / f"{name}.bundle", max_rows=len(name))
    sign(folder / "good.bundle", ours)
    sign(folder / "theirs.bundle", others)
    signing.place_of(folder / "moved.bundle").write_bytes(signing.place_of(folder / "good.bundle").read_bytes())
    sign(mar(folder / "handled.mar"), ours)
    mar(folder / "wild.mar", f"open({str(root / 'ran')!r}, 'w')\n")
    return folder


@pytest.fixture(scope="module")
def signed_server(signed_store: Path) -> Iterator[serve.RunningServer]:
    keys = signed_store.parent / "ours.pub"
    with servers.running(
        store=signed_store, load="good", management_port=0, allow_code=True, trusted_keys=keys
    ) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bare", "theirs", "moved"])
def test_a_client_cannot_load_what_no_trusted_key_has_signed(signed_server: serve.RunningServer, name: str) -> None:
    for url in (
        f"{signed_server.management_url}/models?url={name}.bundle",
        f"{signed_server.url}/v2/repository/models/{name}/load",
    ):
        refused = servers.post(url)
        assert refused.status_code == 400
        assert "the bundle was refused" in refused.text
        assert "/" not in refused.json().get("message", refused.json().get("error", "")).replace("://", "")
    assert servers.get(f"{signed_server.url}/v2/models/{name}/ready").status_code == 404
    assert servers.get(f"{signed_server.url}/v2/models/good/ready").status_code == 200


@pytest.mark.slow
def test_an_archive_that_is_not_signed_runs_nothing(signed_server: serve.RunningServer, signed_store: Path) -> None:
    refused = servers.post(f"{signed_server.management_url}/models?url=wild.mar&initial_workers=1")
    assert refused.status_code == 400
    assert not (signed_store.parent / "ran").exists()
    good = servers.post(f"{signed_server.management_url}/models?url=handled.mar&initial_workers=1")
    assert good.status_code == 200
    assert servers.post(f"{signed_server.url}/predictions/handled", content=b"x").text == "1"


@pytest.mark.slow
def test_a_server_does_not_start_with_what_is_not_signed(signed_store: Path) -> None:
    with pytest.raises(BundleError, match="is not signed"):
        serve.start(signed_store / "bare.bundle", trusted_keys=str(signed_store.parent / "ours.pub"))


FUNCTIONS = """
    def first(data, context):
        return data and [bytes(row["body"]) for row in data]

    def last(data, context):
        return data and [b"<" + bytes(row["body"]) + b">" for row in data]
"""
GRAPH = """
    models:
        min-workers: 1
    dag:
        first: [last]
"""


@pytest.mark.slow
def test_a_workflow_is_signed_as_models_are(signed_server: serve.RunningServer, signed_store: Path) -> None:
    made = archives.war(signed_store / "flow.war", FUNCTIONS, GRAPH)
    url = f"{signed_server.management_url}/workflows?url=flow.war"
    refused = servers.post(url)
    assert (refused.status_code, "is not signed" in refused.json()["message"]) == (400, True)
    sign(made, signed_store.parent / "ours.pem")
    assert servers.post(url).status_code == 200
    assert servers.post(f"{signed_server.url}/wfpredict/flow", content=b"x").text == "<x>"


@pytest.mark.slow
@pytest.mark.long
def test_a_registered_version_brings_the_signature_that_lay_beside_its_bundle(
    tmp_path: Path, new_registry: Callable[[Path], str]
) -> None:
    ours, uri = key(tmp_path, "ours"), new_registry(tmp_path)
    bundle = bundles.double_plus(tmp_path / "tiny.bundle")
    trusted = Trusted.read(ours.with_suffix(".pub"))
    register(bundle.path, name="tiny", tracking_uri=uri)
    assert not resolve("models:/tiny@champion", tracking_uri=uri).signature
    sign(bundle.path, ours)
    register(bundle.path, name="tiny", tracking_uri=uri)
    sources.resolve("models:/tiny@champion", uri, signed=True).check(trusted, bundle.digest)


def loaded(found: ResolvedSource, trusted: Trusted) -> list[str]:
    """The models that a fleet serves after it was asked to load `found`, where `trusted` keys are asked for."""

    async def act() -> list[str]:
        async def in_thread(work: Callable[[], Any]) -> Any:
            return work()

        how = VersionOptions(way=RuntimeOptions(threads=1), trusted=trusted)
        loop = asyncio.get_running_loop()
        fleet = Fleet(Models(), loop, in_thread, how=how, loaders=[ArchiveLoader(how, Limits(), loop, in_thread)])
        with contextlib.suppress(Refused):
            await fleet.load(found, "tiny", "1", source="tiny")
        return fleet.models.names()

    return asyncio.run(act())


def test_a_fleet_that_trusts_keys_serves_what_they_signed_and_nothing_else(tmp_path: Path) -> None:
    ours, others = key(tmp_path, "ours"), key(tmp_path, "others")
    trusted = Trusted.read(ours.with_suffix(".pub"))
    tiny = bundles.double_plus(tmp_path / "tiny.bundle")
    other = bundles.double_plus(tmp_path / "other.bundle", max_rows=3)
    here = ResolvedSource(path=tiny.path)
    assert loaded(here, trusted) == []
    for signature in (
        signing.make_signature(tiny.digest, others),
        signing.make_signature(other.digest, ours),
        "",
        "trueline",
    ):
        signing.place_of(tiny.path).write_text(signature)
        assert loaded(here, trusted) == []
    sign(tiny.path, ours)
    assert loaded(here, trusted) == ["tiny"]


def test_what_a_registry_brings_vouches_before_what_lies_beside(tmp_path: Path) -> None:
    ours = key(tmp_path, "ours")
    trusted = Trusted.read(ours.with_suffix(".pub"))
    tiny = bundles.double_plus(tmp_path / "tiny.bundle")
    good, wrong = signing.make_signature(tiny.digest, ours), signing.make_signature("ab" * 32, ours)
    assert loaded(ResolvedSource(path=tiny.path, signature=good), trusted) == ["tiny"]
    sign(tiny.path, ours)
    assert loaded(ResolvedSource(path=tiny.path, signature=wrong), trusted) == []


def test_a_signature_has_to_be_of_what_is_here_whatever_the_registry_calls_it(tmp_path: Path) -> None:
    ours = key(tmp_path, "ours")
    trusted = Trusted.read(ours.with_suffix(".pub"))
    found = ResolvedSource(path=tmp_path, digest="ab" * 32, signature=signing.make_signature("ab" * 32, ours))
    found.check(trusted, "ab" * 32)
    with pytest.raises(BundleError, match="is not one of its digest"):
        found.check(trusted, "cd" * 32)
    found.check(None, "cd" * 32)


def test_an_archive_is_signed_before_a_line_of_its_code_runs(tmp_path: Path) -> None:
    ours, ran = key(tmp_path, "ours"), tmp_path / "ran"
    trusted = Trusted.read(ours.with_suffix(".pub"))
    evil = mar(tmp_path / "tiny.mar", f"open({str(ran)!r}, 'w')\ndef handle(data, context):\n    return []\n")
    assert loaded(ResolvedSource(path=evil), trusted) == []
    assert not ran.exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace("trueline-signature-1", "trueline-signature-2"),
        lambda text: text.replace("trueline-signature-1 ", ""),
        lambda text: text[:-6],
        lambda text: text.rpartition(" ")[0] + " ====",
        lambda text: text.rpartition(" ")[0] + " " + "A" * 88,
        lambda text: "",
    ],
)
def test_a_signature_that_was_touched_is_none(tmp_path: Path, spoil: Callable[[str], str]) -> None:
    ours = key(tmp_path, "ours")
    trusted = Trusted.read(ours.with_suffix(".pub"))
    good = signing.make_signature("ab" * 32, ours)
    trusted.check("it", "ab" * 32, good)
    with pytest.raises(BundleError):
        trusted.check("it", "ab" * 32, spoil(good))
