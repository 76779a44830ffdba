"""The master emits an event for the page when a host comes, goes or is away."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from trueline.train.master import hosts
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
