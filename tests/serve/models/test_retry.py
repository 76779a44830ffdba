"""What failed for a reason of the server that may pass is loaded again; what is wrong by itself is not."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trueline.errors import RegistryError
from trueline.serve import server
from trueline.serve.models.desired_state import DesiredState
from trueline.serve.models.loader import ResolvedSource
from trueline.serve.models.watchers import StateFollower
from trueline.web.messages import Request, Response
from worlds import bundles
from worlds.servers import StoreApp

FULL = OSError(errno.ENOSPC, "No space left on device", "/x")


@pytest.fixture(scope="module")
def bundle_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.store(tmp_path_factory.mktemp("store"), "tiny", "pair/1", "pair/2")


@pytest.fixture
def kept(bundle_store: Path, tmp_path: Path) -> DesiredState:
    """A state of two models, one of which has a split."""
    with StoreApp(bundle_store, state=tmp_path / "served.json") as app:
        for entry in ("tiny", "pair/1", "pair/2"):
            app.manage("POST", f"/models?url={entry}.bundle&initial_workers=1")
        assert app.manage("PUT", "/models/pair/split?1=50&2=50")[0] == 200
        return app.fleet.desired_state()


class Away:
    """Finds sources, except while there is an error."""

    def __init__(self, app: StoreApp) -> None:
        self.app, self.error = app, None

    error: Exception | None

    async def find(self, source: str) -> ResolvedSource:
        if self.error is not None and source != "tiny.bundle":
            raise self.error
        return ResolvedSource(path=self.app.store.find(source))


@pytest.fixture
def app(bundle_store: Path, tmp_path: Path, kept: DesiredState) -> Iterator[StoreApp]:
    """A server beside the state file, with nothing loaded."""
    assert kept.models
    with StoreApp(bundle_store, state=tmp_path / "served.json") as made:
        yield made


def ask(app: StoreApp) -> Response:
    found = app.routes.handle_uncached(Request("POST", b"/predictions/pair", {}, b"[1, 2, 3]"))
    return found if isinstance(found, Response) else app.run(found)


@pytest.mark.parametrize("error", [FULL, MemoryError(), RegistryError("the registry is away")])
def test_a_restored_version_that_failed_for_a_passing_reason_is_loaded_again_with_its_split(
    app: StoreApp, kept: DesiredState, error: Exception
) -> None:
    source = Away(app)
    source.error = error
    follower = StateFollower(app.fleet, app.fleet._keeper._state, source.find)  # type: ignore[arg-type]
    assert len(app.run(app.fleet.restore(kept, source.find))) == 3
    app.models.started = True
    app.run(follower.look())
    for _ in range(2):
        response = ask(app)
        assert (response.status, response.headers.endswith(b"retry-after: 10\r\n")) == (503, True)
        assert app.routes.dispatch.ready is False
        app.run(follower.retry())
        app.run(follower.look())
    source.error = None
    app.run(follower.retry())
    app.run(follower.look())
    assert ask(app).status == 200
    assert app.routes.dispatch.ready is True
    assert app.fleet.desired_state() == kept, "the split, too"


def test_a_restored_version_that_is_wrong_by_itself_is_not_loaded_again(
    app: StoreApp, kept: DesiredState, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[object] = []
    loader = type(app.fleet._loaders[-1])
    real = loader.load
    torn = kept.models["pair"].versions["1"].digest

    async def load(self: Any, made: Any, found: Any, how: Any, digest: Any) -> Any:
        loads.append(made.model)
        return await real(self, made, found, how, "0" * 64 if digest == torn and made.model == "pair" else digest)

    monkeypatch.setattr(loader, "load", load)
    app.run(app.fleet.restore(kept, Away(app).find))
    assert sorted(loads) == ["pair", "pair", "tiny"]
    assert app.run(app.fleet.retry(Away(app).find)) == []
    assert sorted(loads) == ["pair", "pair", "tiny"]
    response = ask(app)
    assert (response.status, b"retry-after" in response.headers) == (503, False)


def test_an_entry_that_failed_for_a_passing_reason_at_the_start_is_loaded_again_without_a_state_file(
    bundle_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StoreApp(bundle_store) as app:
        loader = type(app.fleet._loaders[-1])

        async def full(*_: Any) -> None:
            raise FULL

        for version in ("1", "2"):
            app.fleet.expect("pair", version, f"pair/{version}.bundle", optional=True)
        with monkeypatch.context() as patched:
            patched.setattr(loader, "load", full)
            parts: Any = type("Parts", (), {"core": type("Core", (), {"fleet": app.fleet, "settings": None})})
            parts.core.settings = type("Settings", (), {"watch": True})
            app.run(server._load_entries(parts, app.store.entries()[:2]))
        assert {one.state for one in app.models.of("pair")} == {"failed"}
        assert app.run(app.fleet.retry(Away(app).find)) == ["pair", "pair"]
        assert ask(app).status == 200


def test_a_process_that_could_not_follow_the_state_file_for_a_passing_reason_tries_again(
    app: StoreApp, kept: DesiredState
) -> None:
    source = Away(app)
    source.error = FULL
    follower = StateFollower(app.fleet, app.fleet._keeper._state, source.find)  # type: ignore[arg-type]
    app.run(follower.look())
    assert app.models.names() == ["tiny"]
    app.run(follower.look())
    source.error = None
    app.run(follower.look())
    assert app.models.names() == ["tiny"], "not at every look"
    app.run(follower.retry())
    app.run(follower.look())
    assert app.fleet.desired_state() == kept


def test_an_operator_who_acts_meanwhile_comes_first(app: StoreApp, kept: DesiredState) -> None:
    source = Away(app)
    source.error = FULL
    app.run(app.fleet.restore(kept, source.find))

    async def scene() -> None:
        retrying = asyncio.ensure_future(app.fleet.retry(source.find))
        await asyncio.sleep(0)
        app.models.remove("pair", "2")
        await retrying

    source.error = None
    app.run(scene())
    assert [one.state for one in app.models.of("pair")] == ["ready"] * len(app.models.of("pair"))
