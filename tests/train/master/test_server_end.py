"""Promises of how the master ends a job: finished only with a proof, failed for everybody, nothing in between."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from trueline import files
from trueline.engine.contract import Kind, Seen
from trueline.errors import StorageError
from trueline.train.master.journal import Journal
from trueline.train.membership import events as h
from trueline.train.step import ledger
from trueline.wire import train_pb2 as pb
from worlds.masters import JOB, RECORDS, STEPS, A, B, at_work, finish, master_of, other_digest, rows, said
from worlds.waiting import until_async


def ended(tmp_path, *, job=JOB, journal=Journal, **how):
    """A master whose job was brought to its end, and what its workers were answered."""

    async def scenario():
        master = master_of(tmp_path, job, journal=journal)
        futures = finish(master, **how)
        await asyncio.gather(*master._tasks)
        return master, [future.result() if future.done() else None for future in futures.values()]

    return asyncio.run(scenario())


def test_a_job_with_a_proof_of_each_epoch_and_a_checkpoint_of_its_last_step_is_finished(tmp_path):
    master, answers = ended(tmp_path)
    assert master.state.phase == "finished"
    assert answers == [pb.Plan(finished=True)] * 2
    name, fields = said(master)[-1]
    assert (name, fields["steps"]) == ("job.finished", STEPS)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == json.loads(fields["summary"])
    assert (rows(master)[-1], summary["certificates"][0]["records"]) == (("END", {"summary": summary}), RECORDS)
    assert master.engine.killed == []


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"checkpoint_step": 1}, "the last checkpoint is of step 1, not 2"),
        ({"checkpoint_step": 3}, "the last checkpoint is of step 3, not 2"),
        ({"checkpoint_step": None}, "the last checkpoint is of step -1, not 2"),
        ({"certificate": None}, "epoch 0 has no certificate"),
        ({"certificate": other_digest()}, "epoch 0: the digest of the applied records is"),
        ({"certificate": pb.Certificate(epoch=0, steps=1, records=4, tally_min=0, tally_max=1)}, "4 records were"),
    ],
    ids=["an older checkpoint", "a later checkpoint", "no checkpoint", "no certificate", "other records", "fewer"],
)
def test_a_job_without_its_proof_or_its_last_checkpoint_has_failed_and_is_nowhere_called_finished(tmp_path, how, why):
    master, answers = ended(tmp_path, **how)
    assert (master.state.phase, answers) == ("failed", [None, None])
    name, fields = said(master)[-1]
    assert (name, fields["code"]) == ("job.failed", "records_miscounted")
    assert why in fields["why"]
    assert not (tmp_path / "summary.json").exists()
    kinds = [kind for kind, _ in rows(master)]
    assert (kinds.count("END"), kinds[-1]) == (0, "FAIL")
    assert {name for name, _ in said(master)}.isdisjoint({"job.finished"})
    assert master.engine.killed == [A, B]


def test_what_a_certificate_leaves_out_ends_the_job_well_only_when_it_was_set_aside_for_good(tmp_path):
    kept = ledger.digest(np.setdiff1d(np.arange(RECORDS), [3]))
    out = pb.Certificate(epoch=0, steps=STEPS, records=RECORDS - 1, digest=kept, tally_min=1, tally_max=1,
                         set_aside=[3])  # fmt: skip

    async def scenario(aside):
        folder = tmp_path / str(aside)
        folder.mkdir()
        master = master_of(folder)
        if aside:
            master.state.set_aside[3] = "odd"
        else:
            master.state.suspects[3] = {A: "odd"}  # one vote is not enough
        finish(master, certificate=out)
        await asyncio.gather(*master._tasks)
        return master.state.phase

    assert [asyncio.run(scenario(aside)) for aside in (True, False)] == ["finished", "failed"]


class Witness(Journal):
    """Keeps what its master has shown to others by the time that a row is written."""

    master = None

    def append(self, *rows):
        for kind, _ in rows:
            self.seen.append((kind, self.shown()))
        super().append(*rows)

    def shown(self):
        answered = any(future.done() for future in (*self.master.entries.values(), *self.master.finishing.values()))
        return self.master.view.generation, answered


def witnessed(tmp_path):
    master = master_of(tmp_path, journal=Witness)
    master.journal.master, master.journal.seen = master, []
    return master


def test_all_rows_of_a_decision_are_written_before_anything_of_it_is_shown(tmp_path):
    async def scenario():
        master = witnessed(tmp_path)
        at_work(master, steps=1)
        await asyncio.gather(*master._tasks)
        entering, finishing = (asyncio.get_running_loop().create_future() for _ in range(2))
        master.entries[A], master.finishing[B] = entering, finishing
        master.handle(h.GroupBroken(A, 1, "reset by peer"))
        assert (master.entries, master.finishing) == ({}, {})
        return master, [entering.result(), finishing.result()]

    master, answers = asyncio.run(scenario())
    assert master.view.generation == 2
    assert answers == [pb.Plan(superseded=True)] * 2
    assert [shown for kind, shown in master.journal.seen if kind == "VIEW"] == [(0, False), (1, False)]


def test_the_end_is_in_the_log_and_in_the_summary_before_a_worker_is_let_go(tmp_path, monkeypatch):
    written, write = [], files.write_atomic

    async def scenario():
        master = witnessed(tmp_path)

        def noting(path, data, **how):
            written.append((path.name, any(future.done() for future in master.finishing.values())))
            return write(path, data, **how)

        monkeypatch.setattr(files, "write_atomic", noting)
        finish(master)
        return [shown[1] for kind, shown in master.journal.seen if kind == "END"]

    assert (asyncio.run(scenario()), written) == ([False], [("summary.json", False)])


class Full(Journal):
    """Takes no row of one kind: the disk is full."""

    kind = ""

    def append(self, *rows):
        if any(kind == self.kind for kind, _ in rows):
            raise StorageError("the journal cannot be written: database or disk is full")
        super().append(*rows)


@pytest.mark.parametrize("kind", ["START", "VIEW"])
def test_what_the_journal_could_not_take_does_not_happen(tmp_path, kind):
    async def scenario():
        master = master_of(tmp_path, journal=Full)
        master.journal.kind = kind
        at_work(master)
        await asyncio.gather(*master._tasks)
        return master

    master = asyncio.run(scenario())
    assert (master.view.generation, master.state.phase, master.engine.started) == (0, "failed", [])
    told = [name for name, _ in said(master)]
    assert (told[-1], "view.published" in told) == ("job.failed", False)
    assert master.engine.killed == [A, B]


def test_a_summary_that_cannot_be_written_ends_the_job_unfinished(tmp_path, monkeypatch):
    def full(path, data, **_):
        raise StorageError(f"no room left to write {path}")

    monkeypatch.setattr(files, "write_atomic", full)
    master, answers = ended(tmp_path)
    assert (master.state.phase, answers) == ("failed", [None, None])
    assert said(master)[-1][0] == "job.failed"
    assert not [name for name, _ in said(master) if name == "job.finished"]


def test_a_failure_ends_the_job_for_workers_at_work_and_on_their_way_and_the_first_reason_stays(tmp_path):
    async def scenario():
        master = master_of(tmp_path)
        master.handle(h.Begin())
        master.handle(h.Ready(A, "a:1"))
        master.fail("data", "no such file", "look")
        master.fail("train", "killed by SIGKILL", "look")
        await asyncio.gather(*master._tasks)
        return master

    master = asyncio.run(scenario())
    assert (master.state.phase, sorted(master.engine.killed)) == ("failed", [A, B])
    assert [fields for name, fields in said(master) if name == "job.failed"] == [
        {"code": "data", "why": "no such file", "hint": "look"}
    ]
    assert rows(master)[-1] == ("FAIL", {"code": "data", "why": "no such file"})
    assert [kind for kind, _ in rows(master)].count("FAIL") == 1


def test_a_job_of_which_two_workers_report_different_records_has_failed(tmp_path):
    async def scenario():
        master = master_of(tmp_path)
        at_work(master, steps=2)
        late = pb.Applied(step=0, generation=1, records=4, digest=99)
        master.record_progress(pb.Progress(ref=B, applied=[late]))
        await asyncio.gather(*master._tasks)
        return master

    master = asyncio.run(scenario())
    assert (master.state.phase, said(master)[-1][1]["code"]) == ("failed", "records_miscounted")
    assert master.engine.killed == [A, B]


class Running:
    """An engine in which the workers run; `tells` is what it has seen."""

    def __init__(self, *tells):
        self.tells, self.killed, self.started = list(tells), [], []

    async def list(self):
        return self.tells

    async def watch(self):
        for seen in self.tells:
            yield seen

    async def kill(self, ref, *, grace_s=0.0):
        self.killed.append((ref, grace_s))

    async def add(self, specs):
        self.started += [spec.ref for spec in specs]


def seen(ref, **how):
    return Seen(ref=ref, kind=Kind.EXITED if how else Kind.STARTED, **how)


@pytest.mark.parametrize(("done", "phase"), [(True, "finished"), (False, "failed")])
def test_a_job_that_is_asked_to_end_has_failed_unless_it_was_finished_and_its_workers_get_their_grace(
    tmp_path, done, phase
):
    async def scenario():
        master = master_of(tmp_path)
        if done:
            finish(master)
        else:
            at_work(master)
        await asyncio.gather(*master._tasks)
        master.engine = Running(seen(A), seen(B, code=0))
        await master.stop("asked for", 5.0)
        return master

    master = asyncio.run(scenario())
    assert (master.state.phase, master.stopped.is_set()) == (phase, True)
    assert master.engine.killed == [(A, 5.0)]
    assert said(master)[-1] == ("job.stopping", {"why": "asked for"})


def test_what_the_engine_says_of_an_end_reaches_the_decision_and_what_it_says_of_strangers_does_not(tmp_path):
    async def scenario():
        master = master_of(tmp_path)
        at_work(master)
        await asyncio.gather(*master._tasks)
        master.handle(h.Scale(3, "asked for"))
        heard = []
        master.handle = lambda event: (heard.append(event), master.stopped.set())
        master.engine = Running(
            seen(A, code=0, reason="exit code 0"), seen(B, signal=11, reason="killed by SIGSEGV"),
            seen("worker-2.0", code=3, reason="exit code 3"), seen("worker-9.0", code=1),
        )  # fmt: skip
        engine = asyncio.ensure_future(master.run_engine())
        await until_async(lambda: heard, "the event is published")
        engine.cancel()
        return heard

    assert asyncio.run(scenario()) == [
        h.Deaths((
            h.Death(A, "exit code 0", clean=True),
            h.Death(B, "killed by SIGSEGV", failed=True),
            h.Death("worker-2.0", "exit code 3", failed=True),
        ))
    ]  # fmt: skip


def test_a_master_that_comes_back_adopts_who_runs_and_takes_no_dead_process_for_a_worker(tmp_path):
    async def scenario():
        before = master_of(tmp_path)
        at_work(before, steps=1)
        before.journal.close()
        await asyncio.gather(*before._tasks)
        after = master_of(tmp_path, engine=Running(seen(A), seen(B, code=1, reason="exit code 1")))
        view = after.view
        await after.adopt(launch=False)
        await asyncio.gather(*after._tasks)
        return view, after

    view, after = asyncio.run(scenario())
    assert (view.generation, list(view.members), view.cut_below) == (1, [A, B], 1), "it is in force at once"
    assert (after.view.generation, list(after.view.members), after.view.cut_below) == (2, [A], 2)
    assert after.state.committed == 1
    assert ("worker.lost", {"worker": B, "why": "died while the master was away"}) in said(after)


def test_a_job_that_is_launched_again_tells_its_new_number_of_workers_before_the_engine_answers(tmp_path):
    """Hosts are submitted for that number: one too many would start and import beside the job."""

    async def scenario():
        before = master_of(tmp_path)
        at_work(before, steps=1)
        before.journal.append(("SCALE", {"workers": 2, "again": False}))
        before.journal.close()
        await asyncio.gather(*before._tasks)
        told = []

        class Asked(Running):
            async def list(self):
                told.append(master.progress.describe(master.job, master.state, now=0.0, uptime_s=0.0)["workers"])
                return await super().list()

        for launch in (False, True):
            one = dataclasses.replace(JOB, workers=1, min_workers=1)
            master = master_of(tmp_path, one, engine=Asked())
            await master.adopt(launch=launch)
            master.journal.close()
            await asyncio.gather(*master._tasks)
        return told

    assert asyncio.run(scenario()) == [2, 1]


def test_a_view_tells_its_members_all_that_they_have_to_agree_on(tmp_path):
    async def scenario():
        master = master_of(tmp_path)
        at_work(master, steps=1)
        changed = master.view_changed
        master.state.set_aside, master.state.careful, master.state.died_at = {9: "odd", 4: "odd"}, True, 5
        master.handle(h.Suspect(A, (7,), "odd"))
        await asyncio.gather(*master._tasks)
        return master, changed

    master, changed = asyncio.run(scenario())
    told = {"generation": 2, "members": [A, B], "cut_below": 2, "set_aside": [4, 9], "rotation": 1, "careful": True}
    reason = f"record 7 failed at {A}"
    assert master.view == pb.View(**told, reason=reason)
    assert changed.is_set()
    assert not master.view_changed.is_set()
    assert master.progress.regroups[2]["reason"] == reason


def test_a_group_is_let_go_with_the_state_that_counts_and_the_log_follows_it(tmp_path):
    async def scenario():
        master = master_of(tmp_path)
        at_work(master, steps=2)
        master.state.members[B].state = "b:2"
        master.handle(h.GroupBroken(A, 1, "reset by peer"))
        futures = {ref: asyncio.get_running_loop().create_future() for ref in (A, B)}
        master.entries.update(futures)
        master.handle(h.Entered(A, 2, 3, 10.0))
        master.handle(h.Entered(B, 2, 4, 20.0))
        return master, [future.result() for future in futures.values()]

    master, answers = asyncio.run(scenario())
    plan = pb.Plan(source=1, steps=[3, 4], store=f"{A}:1", states=["", "b:2"], rates=[10.0, 20.0])
    assert answers == [plan, plan]
    assert master.progress.logged == 4, "its last steps are nobody's to report"


def restored(tmp_path, checkpoint):
    """A master whose group has applied two steps and died, and the plan of the next group, which begins with the
    checkpoint of this step."""

    async def scenario():
        master = master_of(tmp_path)
        at_work(master, steps=2)
        master.handle(h.Saved(A, checkpoint, f"/job/step-{checkpoint}"))
        again = ("worker-0.1", "worker-1.1")
        master.handle(h.Deaths((h.Death(A, "killed"), h.Death(B, "killed"))))
        master.handle(h.Tick())
        for ref in again:
            master.handle(h.Ready(ref, f"{ref}:1"))
        futures = {ref: asyncio.get_running_loop().create_future() for ref in again}
        master.entries.update(futures)
        for ref in again:
            master.handle(h.Entered(ref, master.state.generation, -1))
        await asyncio.gather(*master._tasks)
        return master, futures[again[1]].result()

    return asyncio.run(scenario())


def test_a_job_whose_state_died_goes_back_to_its_checkpoint_and_so_does_its_log(tmp_path):
    master, plan = restored(tmp_path, 1)
    assert (plan.checkpoint, list(plan.steps), plan.source) == ("/job/step-1", [-1, -1], 0)
    assert master.progress.logged == 1
    assert [body for kind, body in rows(master) if kind == "TRUNCATE"] == [{"steps": 1}]
    assert [name for name, _ in said(master)][-3:] == ["log.truncated", "job.restored", "group.released"]


def test_a_job_that_begins_with_a_checkpoint_beyond_the_last_report_is_heard_again(tmp_path):
    master, plan = restored(tmp_path, 4)
    assert plan.checkpoint == "/job/step-4"
    applied = [pb.Applied(step=4, generation=2, records=4, digest=4, workers=2)]
    master.record_progress(pb.Progress(ref="worker-0.1", generation=2, step=5, applied=applied))
    assert master.progress.logged == 5
    assert [body["step"] for kind, body in rows(master) if kind == "COMMIT"] == [0, 1, 4]


def test_the_rules_of_membership_are_those_of_the_settings(tmp_path):
    job = dataclasses.replace(JOB, workers=7, min_workers=3, lease_s=8.0, max_failures=5, set_aside=2)
    policy = master_of(tmp_path, job).policy
    found = (policy.workers, policy.min_workers, policy.lease_s, policy.max_failures, policy.set_aside)
    assert found == (7, 3, 8.0, 5, 2)
    assert master_of(tmp_path, dataclasses.replace(job, autoscale=True)).policy.workers == 3


def test_a_start_that_was_taken_back_before_the_engine_heard_it_is_not_ordered(tmp_path):
    async def scenario():
        master = master_of(tmp_path)
        master.handle(h.Begin())
        del master.state.pending[B]
        await asyncio.gather(*master._tasks)
        return master.engine.started

    assert asyncio.run(scenario()) == [A]


def test_who_is_given_up_is_killed(tmp_path):
    async def scenario():
        master = master_of(tmp_path)
        at_work(master)
        master.state.ticked_at, now = 1000.0, 1000.25
        master.now = lambda: now
        master.handle(h.Heartbeat(A, 0))
        master.state.silence_s = 0.0
        master.handle(h.Tick())
        await asyncio.gather(*master._tasks)
        return master

    master = asyncio.run(scenario())
    assert master.engine.killed == [B]
    assert ("worker.killed", {"worker": B, "why": "silent for 1000.2 s"}) in said(master)
