"""The master emits an event for the page when a host comes, goes or is away, and settles what scripts decide."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from trueline.engine.hosts.messages import ScriptValues
from trueline.train import settings
from trueline.train.job_dir import JobDir
from trueline.train.master import hosts
from trueline.train.settings import JobSettings
from worlds.waiting import until_async


def test_a_host_that_comes_or_is_away_is_told_at_once_and_a_machine_alone_is_not(monkeypatch: Any) -> None:
    monkeypatch.setattr(hosts, "TICK_S", 0.001)
    rows: list[dict[str, Any]] = [{"host": "a", "state": "here", "load": 0.1, "silent_s": 0.0}]
    told: list[list[str]] = []
    looked = 0

    def describe() -> list[dict[str, Any]]:
        nonlocal looked
        looked += 1
        return [dict(row) for row in rows]

    mine = object.__new__(hosts.JobHosts)
    mine.fleet = SimpleNamespace(describe=describe)  # type: ignore[assignment]
    mine._master = SimpleNamespace(now=lambda: 100.0)  # type: ignore[assignment]
    mine.emit = lambda name, hosts: told.append([row["state"] for row in json.loads(hosts)])  # type: ignore[assignment]

    async def run() -> None:
        telling = asyncio.create_task(mine.run_telling())

        async def look_again() -> None:
            seen = looked
            await until_async(lambda: looked > seen + 2, "the hosts are looked at again")

        await look_again()
        rows.append({"host": "b", "state": "here", "load": 0.5, "silent_s": 0.1})
        await look_again()
        rows[1] |= {"load": 0.9, "silent_s": 1.0}  # no news within TELL_S
        await look_again()
        rows[1]["state"] = "away"
        await look_again()
        rows.pop()
        await look_again()
        telling.cancel()

    asyncio.run(run())
    assert told == [["here", "here"], ["here", "away"], ["here"]]


def test_the_first_script_decides_and_another_one_or_a_stranger_hears_why_not(tmp_path: Path) -> None:
    job = JobSettings(
        name="job", recipe="", recipe_digest="", script=("loop.py",), workers=1, epochs=0, global_batch=0, seed=0
    )
    settings.save(job, tmp_path)
    mine = object.__new__(hosts.JobHosts)
    mine._folder = JobDir(tmp_path)
    first = ScriptValues(epochs=3, global_batch=8, seed=1)
    assert [mine._agree(msgspec.json.encode(first)) for _ in range(2)] == [b"", b""]
    assert settings.load(tmp_path).epochs == 3
    why, hint = msgspec.json.decode(mine._agree(msgspec.json.encode(ScriptValues(epochs=4, global_batch=8, seed=1))))
    assert why == "the script made an Elastic with epochs=4, and the job began with 3"
    assert "the same in every worker" in hint
    for garbage in (b"", b"[1]", b'{"epochs": "x"}'):
        assert "names no values of a script" in msgspec.json.decode(mine._agree(garbage))[0]


def test_a_second_launch_with_the_same_store_ends_the_first_one_which_names_it(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(hosts, "STORE_S", 0.001)
    ours = hosts.mark_store(tmp_path, "/jobs/one on host-a")
    assert hosts.find_other_launch(tmp_path, ours) == ""
    assert hosts.find_other_launch(tmp_path / "away", ours) == ""
    failed: list[tuple[str, str]] = []
    mine = object.__new__(hosts.JobHosts)
    mine.launch = SimpleNamespace(probe=ours, store=str(tmp_path))  # type: ignore[assignment]
    mine._master = SimpleNamespace(fail=lambda code, why, hint: failed.append((code, why)))  # type: ignore[assignment]
    theirs = hosts.mark_store(tmp_path, "/jobs/copy on host-c")
    asyncio.run(asyncio.wait_for(mine.run_watching_store(), 100))
    where = f"another launch has the checkpoints of this job in {tmp_path}: /jobs/copy on host-c"
    assert failed == [("train", where)]
    assert hosts.find_other_launch(tmp_path, theirs) == ""
