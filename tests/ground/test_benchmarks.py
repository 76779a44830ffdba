"""What benchmarks print can be repeated and compared: the commit, marked misses, and joins that are joins."""

from __future__ import annotations

import doctest
import json
from typing import Any

import pytest
from bench import _table


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend("bench")
    return pytest.importorskip("_jobs")


def test_every_table_says_which_commit_was_measured_and_when(capsys: pytest.CaptureFixture[str]) -> None:
    _table.report(["figure", "value"], [["step", 1.0]], {"step": 1.0})
    first, *_, last = capsys.readouterr().out.splitlines()
    run = json.loads(last)["run"]
    assert run["commit"]
    assert run["date"]
    assert f"commit {run['commit']}" in first


def test_a_row_that_misses_its_goal_is_marked() -> None:
    rows = [("step", "61 ms", "<= 60 ms", ""), ("lost", "0 / 0", "0 / 0", ""), ("join", "never", "<= 3", "")]
    assert [row[3] for row in _table.mark(rows)] == ["MISSED", "", "MISSED"]
    assert doctest.testmod(_table).failed == 0


def applied(step: int, at_ms: int, generation: int, rates: str, shares: str = "") -> dict[str, Any]:
    fields = {"step": step, "total": 1000, "at_ns": at_ms * 1_000_000, "generation": generation, "rates": rates}
    fields |= {"data_ms": 5.0, "compute_ms": 50.0, "wait_ms": 4.0, "commit_ms": 1.0}
    return {**fields, "workers": rates.count(",") + 1, **({"shares": shares} if shares else {})}


def test_a_replacement_without_records_has_not_joined_and_the_longest_step_counts_until_it_has(jobs: Any) -> None:
    killer = jobs.SizedKiller(full=2, settle=1, reserve=0, move_bytes=0)
    killer.applied(applied(0, 1000, 1, "[5.0, 5.0]", "[1, 1]"))
    killer.killed_ns, killer.killed_generation, killer.kills, killer.longest_ms = 1_050_000_000, 1, 1, [0.0]
    killer.applied(applied(1, 1060, 1, "[5.0, 5.0]"))  # it was on its way
    killer.applied(applied(2, 1250, 2, "[5.0]", "[2]"))
    killer.applied(applied(3, 1700, 3, "[5.0, 0.0]", "[2, 0]"))  # takes part, without a state
    killer.applied(applied(4, 1800, 3, "[5.0, 5.0]", "[1, 1]"))  # has the state; its first records come next
    assert killer.joined_ms == []
    killer.applied(applied(5, 1900, 3, "[5.0, 5.0]"))
    assert killer.resumed_ms == [200.0]
    assert (killer.joined_ms, killer.given_ms) == ([850.0], [790.0])
    assert killer.longest_ms == [450.0]
