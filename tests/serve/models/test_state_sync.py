"""Several servers and one state file: what one is told reaches the others, and none writes over another."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trueline.serve.models import desired_state
from trueline.serve.models.catalog import Models
from trueline.serve.models.controller import Fleet
from trueline.serve.models.loader import ResolvedSource
from trueline.serve.models.watchers import StateFollower
from worlds import bundles, servers


class Town:
    """Two fleets that share one state file, on one loop, and a store of two versions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "served.json"
        self.loop = asyncio.new_event_loop()
        self.pool = ThreadPoolExecutor(1)
        bundles.double_plus(folder / "1.bundle")
        shutil.copytree(folder / "1.bundle", folder / "2.bundle")
        bundles.double_plus(folder / "wrong.bundle", wrong=True)
        self.fleets = [Fleet(Models(), self.loop, self._in_thread, state=self.state) for _ in range(2)]
        self.followers = [StateFollower(fleet, self.state, self.find) for fleet in self.fleets]

    def _in_thread(self, work: Callable[[], Any]) -> Any:
        return self.loop.run_in_executor(self.pool, work)

    async def find(self, source: str) -> ResolvedSource:
        return ResolvedSource(path=self.folder / source)

    def load(self, fleet: int, model: str, version: str) -> None:
        source = f"{version}.bundle"
        found = ResolvedSource(path=self.folder / source)
        self.run(self.fleets[fleet].load(found, model, version, source=source))

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def look(self) -> None:
        for one in self.followers:
            self.run(one.look())

    def served(self, fleet: int) -> dict[str, list[str]]:
        models = self.fleets[fleet].models
        return {name: models.versions(name) for name in models.names()}

    def close(self) -> None:
        self.pool.shutdown()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    made = Town(tmp_path)
    yield made
    made.close()


def test_what_one_process_is_told_reaches_the_other(town: Town) -> None:
    town.load(0, "a", "1")
    town.load(0, "a", "2")
    town.fleets[0].set_default("a", "2")
    town.look()
    assert town.served(1) == {"a": ["2", "1"]}
    assert town.fleets[1].models.default("a") == "2"
    town.fleets[1].set_split("a", {"1": 1.0, "2": 3.0})
    town.look()
    split = town.fleets[0].models.split("a")
    assert split is not None
    assert dict(split.weights) == {"1": 1.0, "2": 3.0}
    town.fleets[0].set_default("a", "1")
    town.run(town.fleets[0].retire("a", "2"))
    town.look()
    assert town.served(1) == {"a": ["1"]}
    assert town.fleets[1].models.split("a") is None
    assert town.fleets[0].scale("a", "1", 3) == 3
    town.look()
    assert town.fleets[1].models.find("a").policy.lanes == 3
    town.run(town.fleets[1].retire("a"))
    town.look()
    assert town.served(0) == {}


def test_acts_at_the_same_time_on_different_models_are_both_kept(town: Town) -> None:
    town.load(0, "a", "1")
    town.load(1, "b", "2")
    assert set(desired_state.read(town.state).models) == {"a", "b"}
    town.look()
    assert town.served(0) == {"a": ["1"], "b": ["2"]}
    assert town.served(1) == {"b": ["2"], "a": ["1"]}
    before = town.state.read_bytes()
    town.look()
    assert town.state.read_bytes() == before


def test_a_version_that_cannot_be_followed_leaves_what_is_served_and_what_is_wanted(town: Town) -> None:
    town.load(0, "a", "1")
    town.look()
    told = desired_state.read(town.state)
    bad = desired_state.DesiredVersion(source="wrong.bundle", digest="0" * 64)
    one = desired_state.DesiredModel(versions=told.models["a"].versions | {"9": bad}, default="9")
    desired_state.write(town.state, desired_state.DesiredState(models={"a": one}))
    town.look()
    assert town.served(1) == {"a": ["1"]}
    assert town.fleets[1].models.default("a") == "1"
    assert desired_state.read(town.state).models["a"].default == "9"


def test_a_file_that_is_none_is_not_followed(town: Town) -> None:
    town.load(0, "a", "1")
    town.look()
    town.state.write_bytes(b"{")
    town.look()
    assert town.served(0) == town.served(1) == {"a": ["1"]}


@pytest.mark.slow
def test_processes_share_a_port_follow_each_other_and_are_replaced_when_they_die(tmp_path: Path) -> None:
    import psutil

    store = tmp_path / "store"
    bundles.double_plus(store / "tiny" / "1.bundle")
    shutil.copytree(store / "tiny" / "1.bundle", store / "tiny" / "2.bundle")

    def ask(port: int, path: str = "/predictions/tiny/2") -> int:
        return servers.post(f"http://127.0.0.1:{port}{path}", json=[1, 2, 3]).status_code

    with servers.running(store=store, load="tiny", management_port=0, processes=2) as running:
        parent = psutil.Process(running.pid)
        assert len(parent.children()) == 2
        assert {ask(running.port) for _ in range(10)} == {200}
        assert servers.delete(f"{running.management_url}/models/tiny/1").status_code == 200
        servers.eventually(lambda: {ask(running.port, "/predictions/tiny/1") for _ in range(10)} == {404})
        victim = parent.children()[0]
        victim.kill()
        told: set[int] = set()

        def listening() -> int:
            found = [one.net_connections("tcp") for one in parent.children() if one != victim]
            return sum(any((at.status, at.laddr.port) == ("LISTEN", running.port) for at in one) for one in found)

        servers.eventually(lambda: told.add(ask(running.port)) or listening() == 2)
        assert told | {ask(running.port) for _ in range(10)} == {200}, "who is not ready yet is asked by nobody"
        assert {ask(running.port, "/predictions/tiny/1") for _ in range(10)} == {404}
        children = parent.children()
        assert running.stop() == 0
    assert not [one for one in children if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
