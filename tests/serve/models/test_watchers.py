"""What is served follows its source: a folder of bundles, an alias of the registry, a store of objects."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from trueline import files
from trueline.bundle import pack, schema
from trueline.bundle.read import open_bundle
from trueline.errors import BundleError, StorageError, UsageError
from trueline.registry.__main__ import watch
from trueline.registry.add import register
from trueline.serve import start
from trueline.serve.models import fetch
from trueline.serve.models.loader import ResolvedSource
from trueline.serve.models.sources import resolve
from trueline.serve.models.watchers import AliasFollower, StoreFollower, StoreHistory, stamp
from trueline.serve.settings import ServeSettings, from_arguments, to_arguments
from worlds import bundles, servers
from worlds.servers import StoreApp
from worlds.waiting import until

ROWS = json.dumps([[1, 2, 3]]).encode()


@pytest.fixture
def bundle_store(tmp_path: Path) -> Path:
    return bundles.store(tmp_path / "store", "pair/1")


def settled(app: StoreApp, follower: StoreFollower) -> None:
    """Two looks: what is new has to look the same twice."""
    for _ in range(2):
        app.run(follower.look())


# the decision


def test_a_bundle_is_taken_when_it_looks_the_same_twice() -> None:
    ledger, name = StoreHistory(), ("digits", "1")
    assert ledger.look({name: (1, 10, 7)}) == []
    assert ledger.look({name: (2, 20, 7)}) == []  # still being copied
    assert ledger.look({name: (2, 20, 7)}) == [("load", name)]
    ledger.note_loaded(name, (2, 20, 7))
    assert ledger.look({name: (2, 20, 7)}) == []


def test_one_that_was_refused_is_tried_again_only_when_it_changes() -> None:
    ledger, name = StoreHistory(), ("digits", "1")
    ledger.refused[name] = (1, 10, 7)
    assert [ledger.look({name: (1, 10, 7)}) for _ in range(3)] == [[], [], []]
    assert [ledger.look({name: (2, 10, 8)}) for _ in range(2)] == [[], [("load", name)]]


def test_one_that_is_away_for_one_look_is_not_taken_away() -> None:
    ledger, name = StoreHistory(), ("digits", "1")
    ledger.note_loaded(name, (1, 10, 7))
    ledger.look({name: (1, 10, 7)})
    assert ledger.look({}) == []
    assert ledger.look({}) == [("retire", name)]
    ledger.loaded.pop(name)
    assert ledger.look({}) == []


# the store


def test_a_new_version_in_the_store_takes_over_and_a_removed_one_leaves(bundle_store: Path) -> None:
    app = StoreApp(bundle_store)
    follower = StoreFollower(app.fleet, app.store, "all")
    settled(app, follower)
    assert app.models.default("pair") == "1"
    bundles.double_plus(bundle_store / "pair" / "2.bundle")
    bundles.double_plus(bundle_store / "other.bundle")
    settled(app, follower)
    assert (app.models.default("pair"), sorted(app.models.names())) == ("2", ["other", "pair"])
    shutil.rmtree(bundle_store / "pair" / "2.bundle")
    shutil.rmtree(bundle_store / "other.bundle")
    settled(app, follower)
    assert (app.models.versions("pair"), app.models.names()) == (["1"], ["pair"])
    assert app.ask("POST", "/predictions/pair", ROWS) == (200, [[3, 5, 7]])
    app.close()


def test_a_default_that_somebody_chose_stays_when_a_version_arrives(bundle_store: Path) -> None:
    bundles.double_plus(bundle_store / "pair" / "2.bundle")
    app = StoreApp(bundle_store)
    follower = StoreFollower(app.fleet, app.store, "pair")
    settled(app, follower)
    app.fleet.set_default("pair", "1")
    bundles.double_plus(bundle_store / "pair" / "3.bundle")
    settled(app, follower)
    assert app.models.versions("pair") == ["1", "2", "3"]
    assert app.models.default("pair") == "1"
    app.close()


def test_a_bundle_that_fails_leaves_what_was_there_serving_until_it_is_mended(bundle_store: Path) -> None:
    app = StoreApp(bundle_store)
    follower = StoreFollower(app.fleet, app.store, "all")
    settled(app, follower)
    bundles.double_plus(bundle_store / "pair" / "2.bundle", wrong=True)
    settled(app, follower)
    assert (app.models.default("pair"), app.models.find("pair", "2").state) == ("1", "failed")
    shutil.rmtree(bundle_store / "pair" / "2.bundle")
    bundles.double_plus(bundle_store / "pair" / "2.bundle")
    settled(app, follower)
    assert app.models.default("pair") == "2"
    app.close()


def test_a_name_that_was_not_asked_for_is_left_alone(bundle_store: Path) -> None:
    bundles.double_plus(bundle_store / "other.bundle")
    app = StoreApp(bundle_store)
    settled(app, StoreFollower(app.fleet, app.store, "pair"))
    assert app.models.names() == ["pair"]
    app.close()


def test_what_was_loaded_at_start_is_known_and_not_loaded_again(bundle_store: Path) -> None:
    app = StoreApp(bundle_store)
    entry = app.store.of("pair")[0]
    made = app.run(app.fleet.load(ResolvedSource(path=entry.path), "pair", "1", source=entry.source))
    settled(app, StoreFollower(app.fleet, app.store, "all"))
    assert app.models.find("pair", "1") is made
    app.close()


def test_the_stamp_of_a_bundle_changes_with_its_seal(tmp_path: Path) -> None:
    made = bundles.double_plus(tmp_path / "b").path
    before = stamp(made)
    shutil.rmtree(made)
    assert stamp(made) is None
    bundles.double_plus(tmp_path / "b", max_rows=4)
    assert stamp(made) not in (before, None)


# the alias


def test_when_an_alias_moves_its_version_takes_over_and_the_one_before_leaves(bundle_store: Path) -> None:
    app = StoreApp(bundle_store)
    first, second = bundles.double_plus(bundle_store / "a"), bundles.double_plus(bundle_store / "b", max_rows=9)
    app.run(app.fleet.load(ResolvedSource(path=first.path), "digits", "3", source="models:/digits/3"))
    follower = AliasFollower(app.fleet, "models:/digits@champion", "digits", "3")
    told = ResolvedSource(path=second.path, name="digits", version="4", digest=second.digest)
    app.run(follower.move_to(told))
    app.run(follower.move_to(told))  # said again: nothing happens
    assert (app.models.default("digits"), app.models.versions("digits")) == ("4", ["4"])
    assert app.fleet.desired_state().models["digits"].versions["4"].source == "models:/digits/4"
    app.close()


def test_an_alias_that_moves_to_a_wrong_bundle_moves_nobody(bundle_store: Path) -> None:
    app = StoreApp(bundle_store)
    first, wrong = bundles.double_plus(bundle_store / "a"), bundles.double_plus(bundle_store / "b", wrong=True)
    app.run(app.fleet.load(ResolvedSource(path=first.path), "digits", "3", source="models:/digits/3"))
    follower = AliasFollower(app.fleet, "models:/digits@champion", "digits", "3")
    app.run(follower.move_to(ResolvedSource(path=wrong.path, name="digits", version="4", digest=wrong.digest)))
    assert (app.models.default("digits"), app.models.versions("digits")) == ("3", ["3"])
    app.run(follower.move_to(ResolvedSource(path=first.path, name="digits", version="5", digest=first.digest)))
    assert app.models.versions("digits") == ["5"]
    app.close()


def test_a_watch_says_what_is_new_and_nothing_twice(capsys: pytest.CaptureFixture[str]) -> None:
    seen = iter([{"version": 3}, {"version": 3}, {"error": "registry"}, {"error": "registry"}, {"version": 4}])
    ends = iter([False, False, False, False, True])
    watch(lambda: dict(next(seen)), lambda: next(ends))
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"version": 3},
        {"error": "registry"},
        {"version": 4},
    ]


@pytest.mark.slow
@pytest.mark.long
def test_a_server_follows_an_alias_that_moves_in_a_real_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_registry: Callable[[Path], str]
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = new_registry(tmp_path)
    register(bundles.double_plus(tmp_path / "a.bundle").path, name="tiny", tracking_uri=uri)
    with start("models:/tiny@champion", tracking_uri=uri, follow_s=0.5) as server:
        assert server.version == "1"
        register(bundles.double_plus(tmp_path / "b.bundle", max_rows=9).path, name="tiny", tracking_uri=uri)

        def changed() -> bool:
            assert servers.post(f"{server.url}/predictions/tiny", content=ROWS).status_code == 200
            return bool(servers.get(f"{server.url}/v2/models/tiny").json()["versions"] == ["2"])

        until(changed, "the second version is served alone")


# a store of objects


@pytest.fixture
def uploaded(tmp_path: Path) -> str:
    """A bundle as a packed file and as a folder in a store in memory; the URL of the folder that holds both."""
    made = bundles.double_plus(tmp_path / "digits.bundle")
    pack(made.path, tmp_path / "digits.tlb")
    fs = fsspec.filesystem("memory")
    root = f"/bundles-{tmp_path.name}"
    fs.put(str(tmp_path / "digits.tlb"), f"{root}/digits.tlb")
    fs.put(str(made.path), f"{root}/digits.bundle", recursive=True)
    return f"memory:/{root}"


@pytest.mark.parametrize("name", ["digits.tlb", "digits.bundle"])
def test_a_bundle_of_a_store_arrives_verified_and_is_brought_once(uploaded: str, name: str, tmp_path: Path) -> None:
    found = fetch.fetch(f"{uploaded}/{name}", tmp_path / "cache")
    assert found.digest == open_bundle(tmp_path / "digits.bundle").digest
    fsspec.filesystem("memory").store.clear()
    again = fetch.fetch(f"{uploaded}/{name}#sha256:{found.digest}", tmp_path / "cache")
    assert again.path == found.path
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [found.digest]


def test_what_a_killed_server_had_begun_to_download_is_deleted_and_a_download_under_way_is_not(
    uploaded: str, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    (cache / "trueline-download-left" / "bundle").mkdir(parents=True)
    with files.TemporaryFolder("download", cache) as under_way:
        found = fetch.fetch(f"{uploaded}/digits.tlb", cache)
        assert {path.name for path in cache.iterdir()} == {found.digest, under_way.name}


def test_the_server_takes_a_url_where_it_takes_a_path(
    uploaded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    found = resolve(f"{uploaded}/digits.tlb", None)
    assert found.digest == open_bundle(found.path).digest


def test_a_bundle_that_was_exchanged_in_the_store_is_refused(uploaded: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="expected 000000000000"):
        fetch.fetch(f"{uploaded}/digits.tlb#sha256:{'0' * 64}", tmp_path / "cache")
    with pytest.raises(UsageError, match="is no digest of a bundle"):
        fetch.fetch(f"{uploaded}/digits.tlb#md5:abc", tmp_path / "cache")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("digits.tlb", b"PK\x03\x04 torn", "torn or no packed bundle"),
        ("digits.bundle/programs/model.onnx", b"short", "has 5 bytes, sealed were"),
        ("digits.bundle/bundle.json", b"{}", "torn or no bundle manifest"),
    ],
)
def test_a_damaged_object_is_refused_and_leaves_nothing_in_the_cache(
    uploaded: str, file: str, content: bytes, words: str, tmp_path: Path
) -> None:
    fsspec.filesystem("memory").pipe_file(f"{uploaded.removeprefix('memory:/')}/{file}", content)
    with pytest.raises(BundleError, match=words):
        fetch.fetch(f"{uploaded}/{file.split('/')[0]}", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_bundle_that_was_damaged_in_the_cache_is_downloaded_again(uploaded: str, tmp_path: Path) -> None:
    found = fetch.fetch(f"{uploaded}/digits.bundle", tmp_path / "cache")
    for source in ("", f"#sha256:{found.digest}"):
        (found.path / "lineage.json").write_bytes(b"")
        assert fetch.fetch(f"{uploaded}/digits.bundle{source}", tmp_path / "cache").digest == found.digest


def test_another_bundle_in_the_cache_under_the_expected_digest_is_never_served(uploaded: str, tmp_path: Path) -> None:
    found = fetch.fetch(f"{uploaded}/digits.bundle", tmp_path / "cache")
    planted = tmp_path / "cache" / ("0" * 64)
    found.path.rename(planted)
    with pytest.raises(BundleError, match="expected 000000000000"):
        fetch.fetch(f"{uploaded}/digits.bundle#sha256:{'0' * 64}", tmp_path / "cache")
    assert not planted.exists()


def test_a_url_that_leads_to_no_bundle_says_so(uploaded: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="there is no bundle at"):
        fetch.fetch(f"{uploaded}/nobody.tlb", tmp_path / "cache")
    with pytest.raises(StorageError, match="opening nowhere://x failed"):
        fetch.fetch("nowhere://x", tmp_path / "cache")


def test_what_is_followed_is_said_alike_in_a_call_and_in_a_command_line() -> None:
    settings = ServeSettings(model_store="bundles", load="all", watch=True, follow_s=2.5)
    assert from_arguments(to_arguments(settings)) == settings


def test_a_bundle_in_the_cache_is_verified_whenever_it_is_taken_from_there(uploaded: str, tmp_path: Path) -> None:
    found = fetch.fetch(f"{uploaded}/digits.tlb", tmp_path / "cache")
    named = f"{uploaded}/digits.tlb#sha256:{found.digest}"
    assert fetch.fetch(named, tmp_path / "cache").path == found.path
    program = found.program_path()
    sealed = program.read_bytes()
    program.write_bytes(sealed[:-1] + bytes([sealed[-1] ^ 1]))
    assert fetch.fetch(named, tmp_path / "cache").digest == found.digest
    assert program.read_bytes() == sealed
    with pytest.raises(BundleError, match="expected"):
        fetch.fetch(f"{uploaded}/digits.bundle#sha256:{'0' * 64}", tmp_path / "cache")


def test_a_manifest_in_a_store_may_have_its_bound_and_not_a_byte_more(
    uploaded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (tmp_path / "digits.bundle" / "bundle.json").stat().st_size
    monkeypatch.setattr(schema, "MANIFEST_BYTES", size)
    assert fetch.fetch(f"{uploaded}/digits.bundle", tmp_path / "fits").name == "tiny"
    monkeypatch.setattr(schema, "MANIFEST_BYTES", size - 1)
    with pytest.raises(BundleError, match=f"bundle.json has more than {size - 1} bytes"):
        fetch.fetch(f"{uploaded}/digits.bundle", tmp_path / "cache")
