"""Promises of the master's shell that need no worker."""

import asyncio
import contextlib
import dataclasses
import errno
import json
import os

import grpc
import pytest

from trueline.errors import DiskFull, StorageError
from trueline.train.master.journal import Journal
from trueline.train.master.master import Master
from trueline.train.master.scaling import run_scaling
from trueline.train.membership import events as h
from trueline.train.membership.state import Member
from trueline.train.settings import Fault
from trueline.wire import train_pb2 as pb
from worlds.masters import JOB, SECRET, NoEngine, at_work, master_of, rows, said, serving
from worlds.waiting import until_async


@pytest.fixture
def job():
    return JOB


class BrokenDisk(Journal):
    def append(self, *rows):
        if any(kind == "COMMIT" for kind, _ in rows):
            raise StorageError("the journal cannot be written: disk I/O error")
        super().append(*rows)


class FullDisk(Journal):
    full = False

    def append(self, *rows):
        if self.full and rows:
            raise DiskFull("the journal cannot be written: database or disk is full")
        super().append(*rows)


def test_a_full_disk_delays_what_the_journal_has_to_hold_and_loses_nothing_of_it(job, tmp_path):
    async def scenario():
        journal = FullDisk(tmp_path / "log")
        master = Master(job, tmp_path, journal, NoEngine(), "secret", lambda: 0.0)
        await master.adopt()
        journal.full = True
        master.log(("COMMIT", commit_of(0)))
        master.handle(h.Scale(3, "more"))
        await asyncio.gather(*master._tasks)
        assert master.engine.started == ["worker-0.0", "worker-1.0"], "what is not in the journal does not happen yet"
        full = [fields for name, fields in said(master) if name == "disk.full"]
        assert [(one["what"], one["path"]) for one in full] == [("journal", str(tmp_path / "log"))]
        assert list(master.room.waiting) == ["journal"]
        journal.full = False
        ticking = asyncio.ensure_future(master.run_clock())
        while master.room.waiting:
            await asyncio.sleep(0)
        ticking.cancel()
        await asyncio.gather(*master._tasks)
        return master

    master = asyncio.run(scenario())
    assert master.engine.started[2:] == ["worker-2.0"]
    assert [kind for kind, _ in master.journal.rows()][-3:] == ["COMMIT", "SCALE", "START"]
    assert [name for name, _ in said(master) if name.startswith("disk")] == ["disk.full", "disk.has_room"]
    assert not master.failed


def test_the_end_of_a_job_waits_for_room_for_its_summary(job, tmp_path, monkeypatch):
    async def scenario():
        master = Master(job, tmp_path, Journal(tmp_path / "log"), NoEngine(), "secret", lambda: 0.0)
        monkeypatch.setattr(os, "replace", full_disk)
        assert not master._end({"steps": 3})
        assert list(master.room.waiting) == ["summary"]
        monkeypatch.undo()
        assert master._end({"steps": 3})
        return master

    master = asyncio.run(scenario())
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 3}
    assert said(master)[-1][0] == "job.finished"


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def commit_of(step):
    return {"step": step, "generation": 1, "records": 2, "digest": 5, "loss": 0.5, "workers": 2, "gap_ms": 0.0}


async def halting(master, stub, *, logged=7):
    """The master of a job of one worker, asked to halt after `logged` steps."""
    master.state.phase, master.progress.logged = "running", logged
    master.state.members["worker-0.0"] = Member(ref="worker-0.0", slot=0, store="", seen_at=0.0)
    return await stub.Stop(pb.StopRequest(why="enough", save=True), metadata=SECRET)


async def save(stub, step, *, last=False, full=""):
    saved = pb.Checkpoint(ref="worker-0.0", step=step, path=f"/step-{step}", full=full, last=last)
    await stub.RecordCheckpoint(saved, metadata=SECRET)


def test_a_job_is_halted_by_the_checkpoint_of_its_last_step_and_at_once_without_a_group(job, tmp_path):
    async def scenario():
        async with serving(job, tmp_path) as (master, stub):
            assert not master.halt("too early")
            ack = await halting(master, stub)
            assert (ack.halting, ack.save_from, master.stopped.is_set()) == (True, 7, False)
            assert ("job.halting", {"why": "enough"}) in said(master)
            await save(stub, 6, full="no room")
            assert list(master.room.waiting) == ["checkpoint"]
            await save(stub, 6)
            await save(stub, 8)
            ack = await stub.Report(pb.Progress(ref="worker-0.0", step=9), metadata=SECRET)
            assert (ack.halting, ack.save_from, master.stopped.is_set()) == (True, 7, False), "regular checkpoints"
            await save(stub, 8, last=True)
            assert not master.stopped.is_set(), "of a worker that the others have gone on without: step 9 is applied"
            await save(stub, 9, last=True)
            await asyncio.wait_for(master.stopped.wait(), 60)
            assert not master.room.waiting

    asyncio.run(scenario())


def test_a_halt_is_known_to_the_master_after_this_one_and_to_no_later_launch(job, tmp_path):
    async def scenario():
        async with serving(job, tmp_path) as (master, stub):
            await halting(master, stub)
        after = Master(job, tmp_path, Journal(tmp_path / "log"), NoEngine(), "secret", lambda: 0.0)
        found = after.saving.halting
        await after.adopt(launch=True)
        later = Master(job, tmp_path, Journal(tmp_path / "log"), NoEngine(), "secret", lambda: 0.0)
        return found, after.saving.halting, later.saving.halting

    assert asyncio.run(scenario()) == ("enough", "", "")


@pytest.mark.parametrize(("checkpoint", "steps"), [("/step-4", [4]), ("", [])])
def test_a_job_that_halts_and_has_lost_every_process_says_the_step_of_the_checkpoint_that_is_left(
    job, tmp_path, checkpoint, steps
):
    async def scenario():
        async with serving(job, tmp_path) as (master, stub):
            await halting(master, stub)
            master.state.checkpoint, master.state.checkpoint_step = checkpoint, 4 if checkpoint else -1
            master.state.phase, master.state.members, master.state.pending = "gathering", {}, {}
            master.end_halt()
            await asyncio.wait_for(master.stopped.wait(), 60)
            return [body["steps"] for kind, body in rows(master) if kind == "TRUNCATE"], said(master)[-1]

    assert asyncio.run(scenario()) == (steps, ("job.stopping", {"why": "enough"}))


def test_a_journal_that_cannot_be_written_ends_the_job_with_its_reason(job, tmp_path):
    async def scenario():
        master = Master(job, tmp_path, BrokenDisk(tmp_path / "log"), NoEngine(), "secret", lambda: 0.0)
        await master.adopt()
        master.log(("COMMIT", {"step": 0}))
        await asyncio.gather(*master._tasks)
        return master

    master = asyncio.run(scenario())
    name, fields = said(master)[-1]
    assert (name, fields["code"]) == ("job.failed", "storage")
    assert "disk I/O error" in fields["why"]
    assert master.state.phase == "failed"
    assert master.engine.killed == ["worker-0.0", "worker-1.0"]


def test_a_master_that_finds_no_worker_alive_starts_new_incarnations(job, tmp_path):
    async def scenario(expected):
        master = Master(job, tmp_path, Journal(tmp_path / "log"), NoEngine(), "secret", lambda: 0.0)
        await master.adopt(launch=False)
        await asyncio.gather(*master._tasks)
        assert master.engine.started == expected
        master.journal.close()

    asyncio.run(scenario(["worker-0.0", "worker-1.0"]))
    asyncio.run(scenario(["worker-0.1", "worker-1.1"]))


def test_another_number_of_workers_outlives_the_master_and_ends_with_the_launch(job, tmp_path):
    async def scenario():
        async with serving(job, tmp_path) as (master, stub):
            await stub.Scale(pb.ScaleRequest(workers=4, why="more is better"), metadata=SECRET)
            await asyncio.gather(*master._tasks)
            assert master.engine.started[2:] == ["worker-2.0", "worker-3.0"]
            row = {"workers": 4, "before": 2, "again": True, "why": "more is better"}
            assert said(master)[-3] == ("job.scaled", row)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Scale(pb.ScaleRequest(workers=0), metadata=SECRET)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "fewer than the job's minimum of 1" in refused.value.details()
        again = Master(job, tmp_path, Journal(tmp_path / "log"), NoEngine(), "secret", lambda: 0.0)
        await again.adopt(launch=False)
        assert again.state.workers == 4
        await again.adopt(launch=True)
        assert again.state.workers == 2
        await asyncio.gather(*again._tasks)
        again.journal.close()

    asyncio.run(scenario())


def test_the_status_tells_of_the_whole_job(job, tmp_path):
    async def scenario():
        async with serving(job, tmp_path) as (master, stub):
            master.handle(h.Ready("worker-0.0", "a:1"))
            master.progress.accept_facts(8, 2, 0)
            report = pb.Progress(ref="worker-0.0", step=-1, phase="regrouping", phase_s=1.5)
            await stub.Report(report, metadata=SECRET)
            found = await stub.Status(pb.Cursor(), metadata=SECRET)
            return json.loads(found.json)

    found = asyncio.run(scenario())
    (member,) = found["members"]
    assert (member["ref"], member["phase"], member["steps"]) == ("worker-0.0", "regrouping", -1)
    assert member["since"] >= 1.5
    assert (found["phase"], found["pending"], found["workers"]) == ("gathering", ["worker-1.0"], 2)
    assert (found["total_steps"], found["epoch"], found["evaluations"]["best"]) == (2, 0, None)


def test_an_exception_that_nobody_expected_ends_the_job_with_its_traceback_in_the_log(job, tmp_path, caplog):
    async def scenario(break_it):
        folder = tmp_path / break_it.__name__
        folder.mkdir()
        async with serving(job, folder) as (master, stub):
            break_it(master)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.Report(pb.Progress(ref="worker-0.0"), metadata=SECRET)
            await asyncio.gather(*master._tasks)
            return said(master)[-1], master.engine.killed

    def in_the_core(master):
        master.state.members["worker-0.0"] = h.Death("worker-0.0", "no member at all")

    def in_the_handler(master):
        master.handle(h.Ready("worker-0.0", "a:1"))
        master.progress.enter_report = lambda *_: {}["nothing"]

    for break_it, what in ((in_the_core, "AttributeError"), (in_the_handler, "KeyError: 'nothing'")):
        (name, fields), killed = asyncio.run(scenario(break_it))
        assert (name, fields["code"]) == ("job.failed", "internal")
        assert f"unexpected {what}" in fields["why"]
        assert "Traceback" in caplog.text
        assert "worker-1.0" in killed
        caplog.clear()


def test_events_are_appended_to_a_file_and_a_full_disk_only_delays_them(job, tmp_path):
    async def scenario():
        heard = []
        async with serving(job, tmp_path) as (master, _):
            master.publisher.hook = lambda *event: heard.append(event)
            file = tmp_path / "events.jsonl"
            master.publisher.flush()
            file.unlink(missing_ok=True)
            file.symlink_to("/dev/full")
            master.emit("step.applied", step=1, loss=0.5)
            file.unlink()
            file.write_text('{"torn": ')  # by a master that was killed within a line
            master.emit("step.applied", step=2)
            master.emit("step.applied", step=3)
            master.publisher.hook = lambda *_: 1 / 0
            master.emit("step.applied", step=4)
            return heard, [json.loads(line) for line in file.read_text().splitlines()[1:]], said(master)

    heard, lines, told = asyncio.run(scenario())
    steps = [line["fields"]["step"] for line in lines if line["name"] == "step.applied"]
    assert steps == [1, 2, 3, 4]
    assert [fields["step"] for name, fields in told if name == "step.applied"] == [1, 2, 3, 4]
    assert [(name, fields["step"]) for name, fields, _ in heard] == [("step.applied", step) for step in (1, 2, 3)]
    assert {"at", "seq", "name", "fields"} == set(lines[0])
    assert abs(heard[1][2] - lines[0]["at"]) < 1.0


def test_whoever_follows_late_gets_the_newest_events_in_order(job, tmp_path, monkeypatch):
    monkeypatch.setattr("trueline.train.master.publisher.KEPT", 5)

    async def scenario():
        async with serving(job, tmp_path) as (master, stub):
            for step in range(20):
                master.emit("step.applied", step=step)
            follow = stub.Follow(pb.Cursor(after=0), metadata=SECRET)
            found = [event.seq for event in (await follow.read()).events]
            master.emit("step.applied", step=20)
            found += [event.seq for event in (await follow.read()).events]
            follow.cancel()
            return found, master.publisher.seq

    found, newest = asyncio.run(scenario())
    assert found == list(range(newest - 5, newest + 1))


def test_deaths_that_the_engine_tells_of_in_one_go_cost_one_view(job, tmp_path):
    async def scenario():
        async with serving(job, tmp_path) as (master, _):
            for slot in range(2):
                master.handle(h.Ready(f"worker-{slot}.0", "x:1"))
            before = master.state.generation
            for slot in range(2):
                master.note_death(h.Death(f"worker-{slot}.0", "killed by SIGKILL"))
            await asyncio.sleep(0)
            return before, master.state.generation

    before, after = asyncio.run(scenario())
    assert after == before + 1


def test_status_needs_no_worker(job, tmp_path):
    master = Master(job, tmp_path, Journal(tmp_path / "log"), NoEngine(), "secret", lambda: 0.0)
    assert master.progress.describe(job, master.state, now=0.0, uptime_s=0.0)["members"] == []
    master.journal.close()


def test_autoscaling_begins_with_the_minimum_and_grows_into_the_room_that_the_engine_has(job, tmp_path, monkeypatch):
    monkeypatch.setattr("trueline.train.master.master.TICK_S", 0)
    monkeypatch.setattr("trueline.train.membership.autoscale.SETTLE_S", 0.01)

    async def scenario():
        async with serving(dataclasses.replace(job, workers=4, autoscale=True), tmp_path) as (master, _):
            assert master.state.workers == 1
            at = master.now()
            master.now = lambda: at

            async def train(records: int) -> None:  # in a millisecond by the master's clock
                nonlocal at
                at += 0.001
                master.progress.records_applied += records
                await asyncio.sleep(0)

            scaling = master.spawn(run_scaling(master))
            for slot in range(2):
                ref = f"worker-{slot}.0"
                while ref not in master.state.pending:  # until the scaling has asked for it
                    await train(100)
                master.handle(h.Ready(ref, "x:1"))
                for member in master.state.view:
                    master.handle(h.Entered(member, master.state.generation, 0))
            for _ in range(50):
                await train(1000)
            scaling.cancel()
            return master.state.workers, [fields for name, fields in said(master) if name == "job.scaled"]

    workers, (scaled, *rest) = asyncio.run(scenario())
    assert (workers, rest) == (2, [])
    assert "one more may pay" in scaled["why"]


def test_a_fault_at_a_step_that_the_job_does_not_have_is_told(job, tmp_path):
    faults = tuple(Fault(step=step, slot=1) for step in (1, 2, 7))

    async def scenario():
        async with serving(dataclasses.replace(job, faults=faults), tmp_path) as (master, stub):
            hello = pb.Hello(ref="worker-0.0", store="a:1", num_records=8, total_steps=2)
            watching = stub.Watch(hello, metadata=SECRET)
            await until_async(lambda: any(name == "worker.joined" for name, _ in said(master)), "the worker joins")
            watching.cancel()
            return [fields for name, fields in said(master) if name == "fault.unreachable"]

    told = asyncio.run(scenario())
    assert [(fields["step"], fields["why"]) for fields in told] == [
        (2, "the job has 2 steps"),
        (7, "the job has 2 steps"),
    ]


def asked_to_scale(monkeypatch, tmp_path, prepare, *, wants=3):
    """What autoscaling was asked in three looks at a job, and what it made of the answer."""
    asked, looks = [], []

    class Room(NoEngine):
        async def capacity(self):
            looks.append(None)
            return 5

    def decide(scaling, workers, records, now, bounds):
        asked.append((workers, records, bounds.low, bounds.high, bounds.capacity))
        return wants, "more pays"

    monkeypatch.setattr("trueline.train.master.scaling.TICK_S", 0.0)
    monkeypatch.setattr("trueline.train.master.scaling.CAPACITY_S", -1.0)
    monkeypatch.setattr("trueline.train.master.scaling.decide", decide)

    async def scenario():
        master = master_of(tmp_path, dataclasses.replace(JOB, min_workers=2), engine=Room())
        at_work(master, steps=1)
        master.job = dataclasses.replace(master.job, workers=6)
        prepare(master)
        scaling = master.spawn(run_scaling(master))
        await until_async(lambda: len(looks) >= 4, "four looks")
        scaling.cancel()
        return master

    master = asyncio.run(scenario())
    return asked, [body["workers"] for kind, body in rows(master) if kind == "SCALE"]


def test_autoscaling_looks_at_a_group_at_work_and_keeps_slots_in_quarantine_beside_it(monkeypatch, tmp_path):
    def shut(master):
        master.state.workers, master.state.quarantined = 3, {2: "died"}

    asked, scaled = asked_to_scale(monkeypatch, tmp_path, shut)
    assert asked[0] == (2, 4, 2, 6, 5)
    assert scaled[0] == 4


@pytest.mark.parametrize(
    "change", [{"released": False}, {"finishing": True}, {"phase": "gathering"}, {"workers": 4}], ids=str
)
def test_autoscaling_asks_nothing_of_a_job_that_is_not_at_work_with_all_that_it_wants(monkeypatch, tmp_path, change):
    def prepare(master):
        for name, value in change.items():
            setattr(master.state, name, value)

    assert asked_to_scale(monkeypatch, tmp_path, prepare) == ([], [])
