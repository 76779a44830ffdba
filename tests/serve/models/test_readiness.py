"""Ready says whether a request would be answered now: of a version, a model and the server, in every protocol."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trueline.errors import BundleError, NotFound, RegistryError, RequestError, ServerFault, StorageError
from trueline.serve import server
from trueline.serve.assembly import assemble
from trueline.serve.faults import find_fault
from trueline.serve.models.loader import ResolvedSource
from trueline.serve.models.watchers import StoreFollower
from trueline.serve.protocols.oip.grpc import OipService
from trueline.serve.settings import ServeSettings
from trueline.torchserve.extension import TorchServe
from trueline.torchserve.responses import is_healthy
from trueline.wire import inference_pb2 as pb
from worlds import bundles
from worlds.servables import FakeWorker, fake_workers, handler
from worlds.servers import StoreApp

ROW = b"[1, 2, 3]"


@pytest.fixture(scope="module")
def bundle_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.store(tmp_path_factory.mktemp("store"), "tiny", "pair/1", "pair/2")


@pytest.fixture
def app(bundle_store: Path) -> Iterator[StoreApp]:
    with StoreApp(bundle_store) as made:
        made.manage("POST", "/models?url=tiny.bundle&initial_workers=1")
        made.manage("POST", "/models?url=pair/1.bundle&initial_workers=1")
        made.models.started = True
        yield made


def readiness(app: StoreApp, model: str) -> set[bool]:
    """What all interfaces say of a model."""
    grpc = OipService(app.routes, None)
    asked = app.run(grpc._model_ready(pb.ModelReadyRequest(name=model), None))  # type: ignore[arg-type]
    index = app.ask("POST", "/v2/repository/index")[1]
    states = {one["state"] for one in index if one["name"] == model}
    return {
        app.ask("GET", f"/v2/models/{model}/ready")[0] == 200,
        app.ask("GET", f"/v1/models/{model}")[0] == 200,
        app.manage("GET", f"/v1/models/{model}")[1]["ready"],
        bool(app.manage("GET", f"/models/{model}")[1][0]["workers"]),
        states == {"READY"},
        asked.ready,
        app.ask("POST", f"/predictions/{model}", ROW)[0] == 200,
    }


def server_readiness(app: StoreApp) -> set[bool]:
    """What all interfaces say of the server."""
    asked = app.run(OipService(app.routes, None)._ready(pb.ServerReadyRequest(), None))  # type: ignore[arg-type]
    pages = ("/v2/health/ready", "/health", "/ping")
    found = {app.respond(app.routes, "GET", page, b"", {}).status == 200 for page in pages}
    return found | {asked.ready, app.models.ready}


def test_a_model_without_workers_is_not_ready_and_neither_is_its_server_until_it_has_some(app: StoreApp) -> None:
    assert (readiness(app, "tiny"), server_readiness(app)) == ({True}, {True})
    app.manage("PUT", "/models/tiny?min_worker=0&max_worker=0")
    assert (readiness(app, "tiny"), readiness(app, "pair"), server_readiness(app)) == ({False}, {True}, {False})
    assert "no worker" in app.ask("GET", "/v2/models/tiny/versions/1/ready")[1]["reason"]
    app.manage("PUT", "/models/tiny?min_worker=1")
    assert (readiness(app, "tiny"), server_readiness(app)) == ({True}, {True})


def test_a_model_that_is_registered_before_its_workers_does_not_take_the_others_out_of_service(app: StoreApp) -> None:
    app.manage("POST", "/models?url=tiny.bundle&model_name=new")
    assert (readiness(app, "new"), server_readiness(app)) == ({False}, {True})
    app.manage("PUT", "/models/new?min_worker=1")
    app.manage("PUT", "/models/new?min_worker=0")
    assert (readiness(app, "new"), server_readiness(app)) == ({False}, {False})


def test_a_server_of_which_no_model_answers_is_not_ready(bundle_store: Path) -> None:
    with StoreApp(bundle_store) as app:
        app.models.started = True
        assert server_readiness(app) == {True}
        app.manage("POST", "/models?url=tiny.bundle")
        assert server_readiness(app) == {False}


def test_a_model_is_ready_when_every_version_that_takes_its_requests_is(app: StoreApp) -> None:
    app.manage("POST", "/models?url=pair/2.bundle&initial_workers=1")
    assert app.manage("PUT", "/models/pair/split?1=50&2=50")[0] == 200
    assert readiness(app, "pair") == {True}
    app.manage("PUT", "/models/pair/2?min_worker=0&max_worker=0")
    for _ in range(20):  # however the split chooses
        assert app.ask("GET", "/v2/models/pair/ready")[0] == app.ask("GET", "/v1/models/pair")[0] == 503
    assert app.ask("GET", "/v2/models/pair/versions/1/ready")[0] == 200


@pytest.mark.parametrize("target", ["2/set-default", "split?1=50&2=50", "2/canary?weight=10"])
def test_no_traffic_moves_to_a_version_that_has_no_worker(app: StoreApp, target: str) -> None:
    app.manage("POST", "/models?url=pair/2.bundle")
    status, told = app.manage("PUT", f"/models/pair/{target}")
    assert (status, told["type"]) == (409, "ConflictStatusException")
    assert "PUT /models/pair/2?min_worker=1" in told["message"]
    assert {app.ask("POST", "/predictions/pair", ROW)[0] for _ in range(20)} == {200}
    app.manage("PUT", "/models/pair/2?min_worker=1")
    assert app.manage("PUT", f"/models/pair/{target}")[0] == 200


def test_a_version_that_replaces_one_with_workers_has_workers(app: StoreApp) -> None:
    app.fleet.how = app.fleet.how.__class__(usual={"pair/1": {"minWorkers": 0}})
    app.fleet._loaders[-1].how.usual["pair/1"] = {"minWorkers": 0}  # type: ignore[index]
    status, told = app.ask("POST", "/v2/repository/models/pair/load")
    assert status == 200, told  # version 2 is another version, and has workers
    entry = app.store.of("tiny")[0]
    app.fleet._loaders[-1].how.usual["tiny/1"] = {"minWorkers": 0}  # type: ignore[index]
    with pytest.raises(RequestError, match="has no worker") as refused:
        app.run(app.fleet.load(ResolvedSource(path=entry.path), "tiny", "1", source=entry.source, replace_it=True))
    assert refused.value.status == 409
    assert app.ask("POST", "/predictions/tiny", ROW)[0] == 200


def test_with_torchserves_rules_a_version_without_workers_becomes_the_default_and_ping_is_healthy(
    bundle_store: Path,
) -> None:
    with StoreApp(bundle_store) as app:
        app.fleet._strict = app.management._strict = True
        app.models.started = True
        app.manage("POST", "/models?url=pair/1.bundle&initial_workers=1")
        app.manage("POST", "/models?url=pair/2.bundle")
        assert app.manage("PUT", "/models/pair/2/set-default")[0] == 200
        assert is_healthy(app.routes.dispatch, strict=True)
        assert not is_healthy(app.routes.dispatch, strict=False)
        assert app.ask("GET", "/v2/health/ready")[0] == 503


def test_workers_of_a_handler_count_once_they_have_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        gate = asyncio.Event()

        async def start(worker: FakeWorker) -> None:
            await gate.wait()
            worker.ready = True

        with fake_workers(monkeypatch) as workers:
            monkeypatch.setattr(FakeWorker, "wait_started", start)
            pool = handler()
            pool.scale(1)
            assert pool.obstacle == "its workers are starting"
            gate.set()
            await pool.wait_ready()
            assert pool.obstacle == ""
            gate.clear()
            workers[0].kill("died")
            await asyncio.sleep(0)
            assert pool.obstacle == "its workers are starting"
            gate.set()
            pool.scale(0)
            assert "no worker" in pool.obstacle
            await pool.close()

    asyncio.run(scene())


# what is known and not served yet


def test_what_is_not_loaded_yet_is_503_with_retry_after_and_what_is_unknown_404(app: StoreApp) -> None:
    app.fleet.expect("soon", "1", "soon.bundle", optional=True)
    for path in ("/v2/models/soon/infer", "/predictions/soon", "/v1/models/soon:predict", "/v2/models/soon"):
        method = "GET" if path.endswith("/soon") and "v2" in path else "POST"
        found = app.respond(app.routes, method, path, b"{}", {})
        assert (found.status, b"retry-after: 1\r\n" in found.headers) == (503, True), path
    assert app.ask("POST", "/v2/models/never/infer", b"{}")[0] == 404
    assert server_readiness(app) == {True}
    app.models.locating = True  # the names of what is loaded are not known yet
    found = app.respond(app.routes, "POST", "/v2/models/never/infer", b"{}", {})
    assert (found.status, b"retry-after: 1\r\n" in found.headers) == (503, True)
    assert server_readiness(app) == {False}


def test_a_version_that_waits_for_another_load_of_its_model_is_known(app: StoreApp) -> None:
    async def scene() -> int:
        entry = app.store.of("pair")[1]
        async with app.fleet.lock("pair"):
            loading = asyncio.ensure_future(
                app.fleet.load(ResolvedSource(path=entry.path), "pair", "2", source=entry.source)
            )
            await asyncio.sleep(0)
            status = app.models.find("pair", "2").state
            assert status == "loading"
        await loading
        cancelled = asyncio.ensure_future(
            app.fleet.load(ResolvedSource(path=entry.path), "pair", "3", source=entry.source)
        )
        async with app.fleet.lock("pair"):
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait([cancelled])
        return app.models.get("pair", "3") is None

    assert app.run(scene())
    assert app.ask("POST", "/v2/models/pair/versions/2/infer", b"{}")[0] == 400


def test_what_a_state_file_lists_is_known_before_any_of_it_is_restored(bundle_store: Path, tmp_path: Path) -> None:
    state = tmp_path / "served.json"
    with StoreApp(bundle_store, state=state) as first:
        first.manage("POST", "/models?url=tiny.bundle&initial_workers=1")
        first.manage("POST", "/models?url=pair/1.bundle&initial_workers=1")
        kept = first.fleet.desired_state()
    seen: list[int] = []
    with StoreApp(bundle_store) as second:

        async def find(source: str) -> ResolvedSource:
            response = second.routes.handle_uncached(request("/v2/models/pair/infer"))
            seen.append(response.status)
            raise RegistryError("the registry is away")

        assert len(second.run(second.fleet.restore(kept, find))) == 2
        second.models.started = True
        assert seen == [503, 503]
        assert server_readiness(second) == {False}
        assert second.fleet.desired_state() == kept


def request(path: str) -> Any:
    from trueline.web.messages import Request

    return Request("POST", path.encode(), {}, b"{}")


# what is damaged


def settle(app: StoreApp, follower: StoreFollower) -> None:
    for _ in range(3):
        app.run(follower.look())


def damage(folder: Path) -> None:
    (folder / "programs" / "model.onnx").write_bytes(b"torn")


def begin(settings: ServeSettings) -> tuple[Any, Exception | None]:
    """The parts of a server after its start, and how that failed."""

    async def start() -> tuple[Any, Exception | None]:
        parts = assemble(settings)
        try:
            await server._begin(parts)
        except Exception as error:  # noqa: BLE001 - the test compares it
            return parts, error
        parts.core.fleet.models.started = True
        return parts, None

    return asyncio.run(start())


def test_one_damaged_bundle_of_a_store_keeps_no_other_from_being_served(tmp_path: Path) -> None:
    store = bundles.store(tmp_path, "good", "bad", "pair/1", "pair/2")
    damage(store / "bad.bundle")
    damage(store / "pair" / "2.bundle")
    parts, error = begin(ServeSettings(model_store=str(store), load="all", port=0))
    models = parts.core.fleet.models
    assert error is None
    assert {(one.model, one.version, one.state) for one in models.all()} == {
        ("good", "1", "ready"), ("bad", "1", "failed"), ("pair", "1", "ready"), ("pair", "2", "failed")
    }  # fmt: skip
    assert models.default("pair") == "1"
    assert models.ready
    assert "refused" in models.find("bad").reason
    assert str(tmp_path) not in models.find("bad").reason


def test_a_damaged_bundle_that_was_named_makes_the_server_unready_and_serves_the_others(tmp_path: Path) -> None:
    store = bundles.store(tmp_path, "good", "bad")
    damage(store / "bad.bundle")
    parts, error = begin(ServeSettings(model_store=str(store), load="bad,good", port=0))
    models = parts.core.fleet.models
    assert error is None
    assert (models.obstacle("good"), models.ready) == ("", False)


def test_a_start_of_which_nothing_can_be_served_ends_with_the_first_error(tmp_path: Path) -> None:
    store = bundles.store(tmp_path, "bad")
    damage(store / "bad.bundle")
    parts, error = begin(ServeSettings(model_store=str(store), load="all", port=0))
    assert isinstance(error, RequestError)
    parts, error = begin(ServeSettings(model_store=str(store), load="all", watch=True, port=0))
    assert error is None, "it may be mended"
    assert not parts.core.fleet.models.ready


def test_a_new_damaged_bundle_of_a_watched_store_is_listed_with_its_reason_until_it_is_gone(tmp_path: Path) -> None:
    store = bundles.store(tmp_path, "good")
    with StoreApp(store) as app:
        app.models.started = True
        follower = StoreFollower(app.fleet, app.store, "all")
        bundles.store(store, "bad")
        damage(store / "bad.bundle")
        app.run(follower.look())
        assert app.models.find("bad").state == "loading", "seen, and not settled yet"
        settle(app, follower)
        (bad,) = [one for one in app.ask("POST", "/v2/repository/index")[1] if one["name"] == "bad"]
        assert (bad["state"], bool(bad["reason"])) == ("UNAVAILABLE", True)
        assert (readiness(app, "good"), server_readiness(app)) == ({True}, {True})
        shutil.rmtree(store / "bad.bundle")
        settle(app, follower)
        assert app.models.names() == ["good"]


def test_a_bundle_that_could_not_be_loaded_for_want_of_room_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bundles.store(tmp_path, "good")
    with StoreApp(store) as app:
        follower = StoreFollower(app.fleet, app.store, "all")

        async def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

        with monkeypatch.context() as patched:
            patched.setattr(type(app.fleet._loaders[-1]), "load", full)
            settle(app, follower)
        assert app.models.find("good").state == "failed"
        settle(app, follower)
        assert app.models.find("good").state == "ready"


def test_an_entry_of_the_store_that_cannot_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StoreApp(bundles.store(tmp_path, "good", "locked/1")) as app:
        inside = app.store._visible

        def visible(folder: Path) -> list[Path]:
            if folder.name == "locked":
                raise PermissionError(errno.EACCES, "Permission denied", str(folder))
            return inside(folder)

        monkeypatch.setattr(app.store, "_visible", visible)
        assert [entry.model for entry in app.store.entries()] == ["good"]


# whose fault it is


def wrapped(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OSError(errno.ENOSPC, "full", "/x"), 507),
        (OSError(errno.EDQUOT, "quota", "/x"), 507),
        (MemoryError(), 507),
        (OSError(errno.ENOMEM, "memory"), 507),
        (OSError(errno.EMFILE, "files"), 503),
        (OSError(errno.EROFS, "read-only", "/x"), 503),
        (PermissionError(errno.EACCES, "denied", "/x"), 503),
        (OSError(errno.ESTALE, "the store is away", "/x"), 503),
        (FileNotFoundError(errno.ENOENT, "gone while it was loaded", "/x"), 503),
        (wrapped(BundleError("torn"), OSError(errno.ENOSPC, "full")), 507),
        (wrapped(BundleError("torn"), OSError(errno.EIO, "disk")), 503),
        (wrapped(RequestError("no"), wrapped(BundleError("torn"), OSError(errno.EMFILE, "files"))), 503),
        (StorageError("cannot write"), 503),
        (RegistryError("no answer"), 503),
    ],
)
def test_an_error_of_the_servers_machine_is_never_the_clients_fault(error: Exception, status: int) -> None:
    found = find_fault(error)
    assert found is not None
    assert found.status == status
    assert found.hint
    assert "/x" not in found.message


@pytest.mark.parametrize(
    "error",
    [
        BundleError("torn"),
        NotFound("no such model"),
        wrapped(BundleError("a name that is too long"), OSError(errno.ENAMETOOLONG, "long")),
        wrapped(RequestError("no gzip"), OSError("Not a gzipped file")),
        wrapped(BundleError("no manifest"), FileNotFoundError(errno.ENOENT, "gone")),
        ValueError("a bug"),
    ],
)
def test_what_the_content_of_a_request_or_a_bundle_causes_is_no_fault_of_the_server(error: Exception) -> None:
    assert find_fault(error) is None


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EMFILE, 503), (errno.EROFS, 503)])
def test_a_registration_that_the_servers_disk_ends_is_507_or_503_and_leaves_nothing(
    app: StoreApp, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    async def fail(*_: Any) -> None:
        raise wrapped(BundleError("'x.mar' cannot be read or unpacked"), OSError(number, "no"))

    monkeypatch.setattr(type(app.fleet._loaders[-1]), "load", fail)
    found = app.manage("POST", "/models?url=tiny.bundle&model_name=new&initial_workers=1")
    assert (found[0], found[1]["code"]) == (status, status)
    assert app.ask("POST", "/v2/repository/models/pair/load")[0] == status
    assert "new" not in app.models.names()


def test_a_state_file_that_cannot_be_written_is_the_servers_fault_for_every_operation(
    app: StoreApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.manage("POST", "/models?url=pair/2.bundle&initial_workers=1")

    def full() -> None:
        raise wrapped(StorageError("no room left"), OSError(errno.ENOSPC, "full"))

    monkeypatch.setattr(app.fleet, "_keep", full)
    for method, path in (
        ("POST", "/models?url=tiny.bundle&model_name=new&initial_workers=1"),
        ("PUT", "/models/pair/2/set-default"),
        ("PUT", "/models/pair/split?1=1&2=1"),
        ("PUT", "/models/pair/1?min_worker=3"),
        ("DELETE", "/models/tiny"),
    ):
        assert app.manage(method, path)[0] == 507, path
    assert (app.models.default("pair"), app.models.split("pair")) == ("1", None)
    assert sorted(app.models.names()) == ["pair", "tiny"]


def test_a_store_that_is_away_is_503_not_an_unknown_model(bundle_store: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bundle_store, tmp_path / "store")
    with StoreApp(folder) as app:
        folder.rename(tmp_path / "away")
        assert app.manage("POST", "/models?url=tiny.bundle")[0] == 503
        assert app.ask("POST", "/v2/repository/models/tiny/load")[0] == 503
        with pytest.raises(ServerFault):
            app.store.find("tiny.bundle")


def test_torchserves_ping_is_of_the_extension_that_serves_it(app: StoreApp) -> None:
    strict = TorchServe(strict=True).routes(app.routes.dispatch).match(["ping"])
    assert strict is not None
    app.manage("PUT", "/models/tiny?min_worker=0&max_worker=0")
    answer: Any = strict(type(request("/ping"))("GET", b"/ping", {}, b""))
    assert answer.status == 200
