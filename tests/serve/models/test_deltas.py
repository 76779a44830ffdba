"""A server that follows a store applies deltas, and what they make is served only when its golden examples hold."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueline import events
from trueline.bundle import open_bundle
from trueline.bundle.delta import CHANGES
from trueline.capture.deltas import make_delta
from trueline.serve.models.deltas import KEPT, DeltaApplier
from trueline.serve.models.watchers import StoreFollower
from worlds import bundles
from worlds.servers import StoreApp

IDS = np.arange(0, 2000, 2)
ROWS = np.arange(8000, dtype=np.float32).reshape(1000, 8)


class Publisher:
    """Trains a table, and publishes deltas of it: row 3 is `version` everywhere."""

    def __init__(self, folder: Path, store: Path) -> None:
        self._folder, self.store, self.last = folder, store, 1
        folder.mkdir()
        self._bundle = bundles.tabled(store / "clicks" / "1.bundle", IDS, self.rows(1))

    def rows(self, version: int) -> Any:
        rows = ROWS.copy()
        rows[3] = version
        return rows

    def publish(self, *, wrong: bool = False, to: Path | None = None) -> Path:
        self.last += 1
        made = bundles.tabled(self._folder / f"{self.last}.bundle", IDS, self.rows(self.last), wrong=wrong)
        out = (to or self.store / "clicks") / f"{self.last}.delta"
        make_delta(self._bundle, made, out)
        self._bundle = made
        return out


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path / "job", tmp_path / "store")


@pytest.fixture
def told() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    with events.listening(lambda name, fields: found.append((name, fields))):
        yield found


def follow(app: StoreApp, follower: StoreFollower) -> None:
    for _ in range(2):
        app.run(follower.look())


def ask(app: StoreApp) -> Any:
    status, answer = app.ask("POST", "/predictions/clicks", b"[3]")
    return answer[0][0] if status == 200 else status


def test_a_delta_is_served_after_the_next_looks_and_the_parent_can_be_the_default_again(publisher: Publisher) -> None:
    app = StoreApp(publisher.store)
    follower = StoreFollower(app.fleet, app.store, "all")
    follow(app, follower)
    assert ask(app) == 1.0
    publisher.publish()
    publisher.publish()
    follow(app, follower)
    assert (app.models.default("clicks"), ask(app)) == ("3", 3.0)
    app.fleet.set_default("clicks", "2")
    follow(app, follower)
    assert ask(app) == 2.0
    app.close()


def test_wrong_golden_examples_leave_the_parent_serving(publisher: Publisher) -> None:
    app = StoreApp(publisher.store)
    follower = StoreFollower(app.fleet, app.store, "all")
    follow(app, follower)
    publisher.publish(wrong=True)
    follow(app, follower)
    assert (app.models.find("clicks", "2").state, ask(app)) == ("failed", 1.0)
    app.close()


def test_a_delta_without_its_parent_waits_for_it(publisher: Publisher, tmp_path: Path, told) -> None:
    before, last = publisher.publish(to=tmp_path), publisher.publish()
    applier = DeltaApplier(publisher.store)
    for _ in range(2):
        applier.apply_due()
    refused = [fields["why"] for name, fields in told if name == "delta.refused"]
    assert len(refused) == 1
    assert "no version in" in refused[0]
    before.rename(last.with_name(before.name))
    applier.apply_due()
    assert [fields["version"] for name, fields in told if name == "delta.applied"] == ["2", "3"]


def test_a_torn_delta_is_refused_once_and_applied_when_it_is_whole(publisher: Publisher, tmp_path: Path, told) -> None:
    found = publisher.publish()
    whole = (found / CHANGES).read_bytes()
    (found / CHANGES).write_bytes(whole[:-1])
    applier = DeltaApplier(publisher.store)
    for _ in range(3):
        applier.apply_due()
    assert [name for name, _ in told] == ["delta.refused"]
    (found / CHANGES).write_bytes(whole)
    applier.apply_due()
    assert told[-1][0] == "delta.applied"


def test_processes_that_share_a_store_agree_on_one_bundle(publisher: Publisher, told) -> None:
    publisher.publish()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: DeltaApplier(publisher.store).apply_due(), range(4)))
    assert [name for name, _ in told] == ["delta.applied"]
    assert open_bundle(publisher.store / "clicks" / "2.bundle").digest == publisher._bundle.digest


def test_old_versions_go_except_the_first_and_those_in_use(publisher: Publisher) -> None:
    applier = DeltaApplier(publisher.store)
    for _ in range(6):
        publisher.publish()
        applier.apply_due([("clicks", "2")])
    kept = sorted(one.stem for one in (publisher.store / "clicks").glob("*.bundle"))
    assert kept == ["1", "2", *map(str, range(8 - KEPT, 8))]


def test_links_and_unfinished_folders_are_no_deltas(publisher: Publisher, tmp_path: Path) -> None:
    elsewhere = publisher.publish(to=tmp_path)
    (publisher.store / "clicks" / "2.delta").symlink_to(elsewhere)
    shutil.copytree(elsewhere, publisher.store / "clicks" / ".2.delta")
    DeltaApplier(publisher.store).apply_due()
    assert not (publisher.store / "clicks" / "2.bundle").exists()
