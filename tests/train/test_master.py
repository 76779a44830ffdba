"""Promises of the master's shell that need no worker."""

import asyncio
import json

import pytest

from trueline.errors import StorageError
from trueline.train.journal import Journal
from trueline.train.master import Master
from trueline.train.settings import JobSettings


class NoEngine:
    """Starts nothing and remembers what it was asked for."""

    def __init__(self) -> None:
        self.started, self.killed = [], []

    async def add(self, specs):
        self.started += [spec.ref for spec in specs]

    async def kill(self, ref, *, grace_s=0.0):
        self.killed.append(ref)

    async def list(self):
        return []


class FullDisk(Journal):
    def append(self, *rows):
        if any(kind == "COMMIT" for kind, _ in rows):
            raise StorageError("the journal cannot be written: database or disk is full")
        super().append(*rows)


@pytest.fixture
def job():
    return JobSettings(
        name="x", recipe="x.py", recipe_digest="", workers=2, epochs=1, global_batch=4, seed=0, min_workers=1
    )


def said(master):
    return [(event.name, json.loads(event.fields)) for event in master._said]


def test_a_journal_that_cannot_be_written_ends_the_job_with_its_reason(job, tmp_path):
    async def scenario():
        master = Master(job, tmp_path, FullDisk(tmp_path / "log"), NoEngine(), "secret", lambda: 0.0)
        await master.adopt()
        master.log(("COMMIT", {"step": 0}))
        await asyncio.gather(*master._tasks)
        return master

    master = asyncio.run(scenario())
    name, fields = said(master)[-1]
    assert (name, fields["code"]) == ("job.failed", "storage")
    assert "disk is full" in fields["why"]
    assert master.state.phase == "failed"
    assert master.engine.killed == ["worker-0.0", "worker-1.0"]


def test_a_master_that_finds_no_worker_alive_starts_new_incarnations(job, tmp_path):
    async def scenario(expected):
        master = Master(job, tmp_path, Journal(tmp_path / "log"), NoEngine(), "secret", lambda: 0.0)
        await master.adopt()
        await asyncio.gather(*master._tasks)
        assert master.engine.started == expected
        master.journal.close()

    asyncio.run(scenario(["worker-0.0", "worker-1.0"]))
    asyncio.run(scenario(["worker-0.1", "worker-1.1"]))
