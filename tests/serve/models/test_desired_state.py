"""The file of the wanted state: whole or as it was, one writer at a time, and what others wrote stays."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from trueline.errors import StorageError, UsageError
from trueline.serve.models import desired_state
from trueline.serve.models.desired_state import DesiredModel, DesiredState, DesiredVersion, DesiredWorkflow, Keeper


def model(*versions: str, workers: int = 1) -> DesiredModel:
    """A model of `versions`, the first of which is the default."""
    made = {version: DesiredVersion(source=f"{version}.bundle", digest="ab", workers=workers) for version in versions}
    return DesiredModel(versions=made, default=versions[0])


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    state = DesiredState(models={"a": model("1", "2")}, workflows={"w": DesiredWorkflow(source="w.war", digest="cd")})
    desired_state.write(tmp_path / "served.json", state)
    assert desired_state.read(tmp_path / "served.json") == state


def test_a_state_that_cannot_be_written_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "served.json"
    desired_state.write(path, DesiredState(models={"a": model("1")}))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="no room left"):
        desired_state.write(path, DesiredState(models={"a": model("2")}))
    assert desired_state.read(path).models["a"].default == "1"
    assert [one.name for one in tmp_path.iterdir()] == ["served.json"]


def test_a_keeper_writes_its_own_changes_and_what_others_wrote_stays(tmp_path: Path) -> None:
    path = tmp_path / "served.json"
    one, other = Keeper(path, "models"), Keeper(path, "models")
    one.keep({"a": model("1")})
    other.keep({"b": model("1")})
    assert set(desired_state.read(path).models) == {"a", "b"}
    one.keep({"a": model("2")})
    assert {name: found.default for name, found in desired_state.read(path).models.items()} == {"a": "2", "b": "1"}
    one.keep({})
    assert set(desired_state.read(path).models) == {"b"}
    Keeper(path, "workflows").keep({"w": DesiredWorkflow(source="w.war", digest="cd")})
    found = desired_state.read(path)
    assert (set(found.models), set(found.workflows)) == ({"b"}, {"w"})


def test_what_has_not_changed_is_not_written_again_over_what_another_made_of_it(tmp_path: Path) -> None:
    path = tmp_path / "served.json"
    one = Keeper(path, "models")
    one.keep({"a": model("1"), "b": model("1")})
    desired_state.write(path, DesiredState(models={"a": model("9"), "b": model("1")}))
    one.keep({"a": model("1"), "b": model("2")})
    assert {name: found.default for name, found in desired_state.read(path).models.items()} == {"a": "9", "b": "2"}


def test_what_could_not_be_written_is_written_with_the_next_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "served.json"
    keeper = Keeper(path, "models")
    with monkeypatch.context() as patched:

        def full(*_: Any) -> None:
            raise StorageError("no space left on the device")

        patched.setattr(desired_state, "write", full)
        with pytest.raises(StorageError):
            keeper.keep({"a": model("1")})
    keeper.keep({"a": model("1")})
    assert set(desired_state.read(path).models) == {"a"}


def test_a_model_that_follows_the_file_is_not_written_to_it_and_afterwards_again(tmp_path: Path) -> None:
    path = tmp_path / "served.json"
    keeper = Keeper(path, "models")
    mine = {"a": model("1"), "b": model("1")}
    with keeper.following("a", lambda: mine):
        keeper.keep(mine)
        assert set(desired_state.read(path).models) == {"b"}
    keeper.keep(mine)
    assert set(desired_state.read(path).models) == {"b"}, "it is as the file said when it was brought there"
    mine["a"] = model("2")
    keeper.keep(mine)
    assert desired_state.read(path).models["a"].default == "2"


def test_one_writes_while_all_others_wait(tmp_path: Path) -> None:
    path = tmp_path / "served.json"

    def free() -> bool:
        with (tmp_path / "served.json.lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    with desired_state.lock_file(path):
        assert not free()
    assert free()


def test_a_keeper_reads_and_writes_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("read", "write"):
        real = getattr(desired_state, name)
        monkeypatch.setattr(
            desired_state, name, lambda *args, name=name, real=real: (order.append(name), real(*args))[1]
        )
    real_flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda *args: (order.append("lock"), real_flock(*args))[1])
    Keeper(tmp_path / "served.json", "models").keep({"a": model("1")})
    assert order == ["lock", "read", "write"]


@pytest.mark.parametrize("schema", [0, 2])
def test_a_state_of_another_schema_is_refused(tmp_path: Path, schema: int) -> None:
    (tmp_path / "s.json").write_text(json.dumps({"schema": schema, "models": {}}))
    with pytest.raises(UsageError, match=f"has schema {schema}"):
        desired_state.read(tmp_path / "s.json")


@pytest.mark.parametrize("change", [{"default": "9"}, {"split": {"9": 1.0}}, {"split": {"1": 1.0, "9": 0.0}}])
def test_a_state_that_names_a_version_it_does_not_list_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    told = {"versions": {"1": {"source": "1.bundle", "digest": "ab"}}, "default": "1"} | change
    (tmp_path / "s.json").write_text(json.dumps({"schema": 1, "models": {"a": told}}))
    with pytest.raises(UsageError, match="names version '9' of 'a', which it does not list"):
        desired_state.read(tmp_path / "s.json")
