"""A loop logs for its job once, by the worker that leads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trueline import events
from trueline.train.loop_view import LoopView
from worlds.waiting import until


def view(rank: int) -> LoopView:
    one: Any = LoopView()
    one._group = SimpleNamespace(rank=rank)
    one._replica = SimpleNamespace(ledger=SimpleNamespace(steps=4), model=None)
    return one


def test_only_the_worker_that_leads_writes_numbers_of_the_last_applied_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUELINE_JOB", str(tmp_path))
    for rank in (0, 1):
        assert view(rank).leads == (rank == 0)
        view(rank).log(accuracy=0.5)
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert (event["name"], event["fields"]) == ("loop.logged", {"step": 3, "accuracy": 0.5})


def test_numbers_that_a_full_disk_does_not_take_are_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUELINE_JOB", str(tmp_path))
    file = tmp_path / "events.jsonl"
    file.symlink_to("/dev/full")
    view(0).log(accuracy=0.5)
    view(0).log(accuracy=0.75)
    file.unlink()
    until(lambda: file.exists() and file.read_text().count("\n") == 2, "both lines are written")
    assert [json.loads(line)["fields"]["accuracy"] for line in file.read_text().splitlines()] == [0.5, 0.75]


def test_alone_the_numbers_are_an_event_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRUELINE_JOB", raising=False)
    heard: list[tuple[str, dict[str, Any]]] = []
    with events.listening(lambda name, fields: heard.append((name, fields))):
        view(0).log(loss=1)
    assert heard == [("loop.logged", {"step": 3, "loss": 1.0})]
