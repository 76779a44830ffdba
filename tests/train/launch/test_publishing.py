"""The process beside a launcher that publishes versions: its events arrive, and it ends after a last version."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from trueline.train.job_dir import JobDir
from trueline.train.launch import publishing
from trueline.train.launch.publishing import PublisherProcess
from trueline.train.settings import JobSettings
from worlds.waiting import until

SCRIPT = """
import json, os, sys
def tell(**fields):
    sys.stdout.write(json.dumps(["model.published", fields]) + "\\n")
    sys.stdout.flush()
tell(pid=os.getpid(), given=sys.argv[-3:])
sys.stdin.read()
tell(last=True)
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    program = tmp_path / "publisher"
    program.write_text(f"#!{sys.executable}\n{SCRIPT}")
    program.chmod(0o700)
    monkeypatch.setattr(publishing.sys, "executable", str(program))
    return []


def start(tmp_path: Path, told: list[tuple[str, dict[str, Any]]]) -> PublisherProcess:
    job = JobSettings(name="job", recipe="r.py", recipe_digest="", workers=1, publish_every=10.0, publish_to="/models")
    return PublisherProcess(job, JobDir(tmp_path), lambda name, **fields: told.append((name, fields)))


def test_the_end_of_a_job_waits_for_a_last_version(tmp_path: Path, told: list[tuple[str, dict[str, Any]]]) -> None:
    process = start(tmp_path, told)
    process.finish()
    process.end()
    assert [name for name, _ in told] == ["model.published"] * 2
    assert told[0][1]["given"] == [str(tmp_path), "/models", "10.0"]
    assert told[1][1] == {"last": True}


def test_a_publisher_that_is_killed_is_started_again_and_one_that_is_ended_is_not(
    tmp_path: Path, told: list[tuple[str, dict[str, Any]]]
) -> None:
    process = start(tmp_path, told)
    until(lambda: len(told) == 1, "the first one runs")
    os.kill(told[0][1]["pid"], signal.SIGKILL)
    until(lambda: len(told) == 3, "the second one runs")
    process.end()
    assert [name for name, _ in told] == ["model.published", "publisher.lost", "model.published"]
    assert told[1][1]["code"] == -signal.SIGKILL
