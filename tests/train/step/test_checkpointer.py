"""Promises of who writes checkpoints: which are written, which are skipped, what training waits for."""

import os
import threading
from types import SimpleNamespace

import fsspec
import pytest
import torch

from trueline import events
from trueline.checkpoint import checkpoint
from trueline.checkpoint.snapshot import Snapshot
from trueline.errors import DiskFull, StorageError
from trueline.train.step import checkpointer
from trueline.train.step import checkpointer as checkpointing
from trueline.train.step.checkpointer import Checkpointer, choose_shelf_bytes
from worlds.waiting import until


class Job:
    """A replica and a link, as far as a checkpointer knows them."""

    def __init__(self, checkpointer):
        self.checkpointer, self.weights, self.evaluations, self.told = checkpointer, torch.zeros(4), [], []
        self.ledger = SimpleNamespace(steps=0, as_tree=self.as_tree)
        self.save_from, self.halting, self.full, self.taken = 0, False, [], []
        self.model = torch.nn.ParameterDict({"w": torch.zeros(4)})

    def as_tree(self):
        return {"steps": self.ledger.steps, "certificates": [], "evaluations": [dict(one) for one in self.evaluations]}

    def state(self):
        return {"model": {"w": self.weights}, "ledger": self.as_tree()}

    def snapshot(self, *, spill):
        self.taken.append(Snapshot(self.state(), live=lambda _: True))
        return self.taken[-1]

    def report_checkpoint(self, step, path, digest, *, full="", last=False):
        if full:
            self.full.append((step, full))
            return
        self.last = step if last else 0
        self.told.append((step, path, digest))

    def step(self, *, best=False, due=False, ends_epoch=False):
        self.ledger.steps += 1
        for taken in self.taken:
            taken.settle()
        self.weights += 1
        if best:
            self.evaluations.append({"step": self.ledger.steps, "loss": 0.0, "metrics": {}, "best": True})
        self.checkpointer.after_step(self, self, ends_epoch=ends_epoch, best=best, due=due)

    def complete(self):
        self.checkpointer.complete(self, self)


class Slow:
    """checkpoint.write behind a gate, and the order of what went through it."""

    def __init__(self, monkeypatch):
        self.gate, self.began, self.written = threading.Event(), threading.Event(), []
        self._write = checkpoint.write
        monkeypatch.setattr(checkpoint, "write", self.write)

    def write(self, folder, *, step, state, facts, sealing):
        self.began.set()
        assert self.gate.wait(100)
        self.written.append((step, state._tensors[0][0].item()))
        return self._write(folder, step=step, state=state, facts=facts, sealing=sealing)


@pytest.fixture
def said():
    heard = []
    with events.listening(lambda name, fields: heard.append((name, fields.get("step")))):
        yield heard


def test_checkpoints_come_every_so_many_steps_and_at_the_end(tmp_path):
    job = Job(Checkpointer(tmp_path, {}, every=2))
    for _ in range(5):
        job.step()
        job.checkpointer._join()
    job.complete()
    assert [step for step, _, _ in job.told] == [2, 4, 5]
    assert checkpoint.latest(tmp_path).state["model"]["w"].tolist() == [5.0] * 4


def test_without_a_number_of_steps_they_come_at_the_ends_of_epochs(tmp_path):
    job = Job(Checkpointer(tmp_path, {}))
    for ends in (False, True, False):
        job.step(ends_epoch=ends)
        job.checkpointer._join()
    assert checkpoint.steps(tmp_path) == [2]


def test_one_that_is_due_while_the_last_is_written_is_skipped_and_said_so(tmp_path, monkeypatch, said):
    slow = Slow(monkeypatch)
    job = Job(Checkpointer(tmp_path, {}, every=1))
    for _ in range(3):
        job.step()
    slow.gate.set()
    job.checkpointer._join()
    assert slow.written == [(1, 1.0)]
    assert [one for one in said if one[0] == "checkpoint.skipped"] == [
        ("checkpoint.skipped", 2),
        ("checkpoint.skipped", 3),
    ]


def test_the_best_and_those_asked_for_are_never_skipped_and_hold_the_state_of_their_step(tmp_path, monkeypatch):
    slow = Slow(monkeypatch)
    job = Job(Checkpointer(tmp_path, {}, every=1))
    job.step()
    assert slow.began.wait(100)
    job.step(best=True)
    join = job.checkpointer._join
    monkeypatch.setattr(job.checkpointer, "_join", lambda: slow.gate.set() or join())  # opened by who waits
    job.step(due=True)
    assert slow.gate.is_set()
    job.complete()
    assert slow.written == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    slow = Slow(monkeypatch)
    job = Job(Checkpointer(tmp_path, {}, every=1))
    job.step()
    assert slow.began.wait(100)
    for _ in range(50):
        job.step()
    assert (job.ledger.steps, slow.written) == (51, [])
    slow.gate.set()
    job.complete()
    assert slow.written == [(1, 1.0), (51, 51.0)]


def test_steps_take_turns_with_the_thread_that_writes_so_it_has_the_priority_of_its_process(tmp_path, monkeypatch):
    write, nice = checkpoint.write, []

    def note(*given, **named):
        nice.append((os.getpriority(os.PRIO_PROCESS, 0), threading.current_thread().name))
        return write(*given, **named)

    monkeypatch.setattr(checkpoint, "write", note)
    job = Job(Checkpointer(tmp_path, {}, every=1))
    job.step()
    job.complete()
    assert nice == [(os.getpriority(os.PRIO_PROCESS, os.getpid()), "checkpoint")]


@pytest.mark.parametrize("where", ["disk", "memory://checkpointer"])
def test_the_newest_and_the_best_are_kept(tmp_path, where):
    folder = tmp_path if where == "disk" else where
    job = Job(Checkpointer(folder, {}, every=1, keep=2))
    for step in range(1, 7):
        job.step(best=step == 2)
        job.checkpointer._join()
    assert checkpoint.steps(folder) == [2, 5, 6]
    assert str(checkpoint.best(folder)).endswith("step-00000002")


def test_a_last_state_that_was_evaluated_after_it_was_written_is_written_again(tmp_path):
    job = Job(Checkpointer(tmp_path, {}, every=1))
    job.step()
    job.checkpointer._join()
    job.evaluations.append({"step": 1, "loss": 0.5, "metrics": {}, "best": True})
    job.complete()
    assert checkpoint.read_manifest(checkpoint.latest(tmp_path).path)["evaluations"][0]["loss"] == 0.5


class Throttled(Exception):
    """A store library's own error."""


def test_a_store_that_fails_costs_a_warning_and_the_next_checkpoint_tries_again(monkeypatch, said):
    job = Job(Checkpointer("memory://throttled", {}, every=1))
    with monkeypatch.context() as patched:
        patched.setattr(type(fsspec.filesystem("memory")), "open", lambda *_, **__: (_ for _ in ()).throw(Throttled()))
        job.step()
        job.checkpointer._join()
    assert said == [("checkpoint.failed", 1)]
    job.step()
    job.complete()
    assert checkpoint.steps("memory://throttled") == [2]


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(monkeypatch, said):
    monkeypatch.setattr(checkpointer, "LAST_S", 0.0)
    job = Job(Checkpointer("memory://closed", {}, every=0))
    job.step()
    monkeypatch.setattr(checkpoint, "write", lambda *_, **__: (_ for _ in ()).throw(Throttled("slow down")))
    with pytest.raises(StorageError, match="Throttled: slow down"):
        job.complete()
    assert said == [("checkpoint.failed", 1)] * 3


@pytest.mark.parametrize("failures", [1, 2])
def test_a_store_that_fails_for_a_moment_does_not_fail_the_last_checkpoint_of_a_job(failures, tmp_path, monkeypatch):
    """The training of weeks would end with an error, and its last steps would be taken again."""
    monkeypatch.setattr(checkpointer, "LAST_S", 0.0)
    job, write, left = Job(Checkpointer(tmp_path, {}, every=0)), checkpoint.write, [OSError(5, "failed")] * failures
    job.step()

    def fail_first(*given, **named):
        if left:
            raise left.pop()
        return write(*given, **named)

    monkeypatch.setattr(checkpoint, "write", fail_first)
    job.complete()
    assert checkpoint.steps(tmp_path) == [1]


def test_a_checkpoint_counts_even_when_older_ones_cannot_be_removed(tmp_path, monkeypatch, said):
    def fail(*_, **__):
        raise StorageError("removing failed")

    monkeypatch.setattr(checkpoint, "prune", fail)
    job = Job(Checkpointer(tmp_path, {}, every=1))
    job.step()
    job.complete()
    assert [step for step, _, _ in job.told] == [1]
    assert said == [("checkpoint.not_pruned", 1), ("model.written", None)]


def test_a_checkpoint_that_an_operator_asks_for_is_written_once_and_not_before_the_step_asked_for(tmp_path):
    job = Job(Checkpointer(tmp_path, {}, every=1000))
    job.save_from = 3
    for _ in range(5):
        job.step()
    job.complete()
    assert [step for step, _, _ in job.told] == [3, 5]  # the last one is the job's own


def test_two_states_are_kept_at_most_and_a_third_waits_for_the_first(tmp_path, monkeypatch):
    slow = Slow(monkeypatch)
    job = Job(Checkpointer(tmp_path, {}, every=1))
    take, join, busy, taken = job.snapshot, job.checkpointer._join, [], []

    def watched(**how):
        busy.append(sum(one._tensors[0] is not None for one in taken))
        taken.append(take(**how))
        return taken[-1]

    def joined():
        slow.gate.set()
        join()

    monkeypatch.setattr(job, "snapshot", watched)
    monkeypatch.setattr(job.checkpointer, "_join", joined)
    job.step()
    job.step(best=True)
    job.step(due=True)
    job.complete()
    assert busy == [0, 1, 0]


def test_one_state_is_written_after_the_other(tmp_path, monkeypatch):
    slow = Slow(monkeypatch)
    job = Job(Checkpointer(tmp_path, {}, every=1))
    job.step()
    (first,) = job.checkpointer._writers
    waits, join = threading.Event(), first.join
    monkeypatch.setattr(first, "join", lambda: (waits.set(), join()))
    job.step(best=True)
    assert waits.wait(60), "the second waits for the first"
    slow.gate.set()
    job.complete()
    assert slow.written == [(1, 1.0), (2, 2.0)]


def test_a_full_disk_is_waited_for_and_told_once_while_training_continues(tmp_path, monkeypatch):
    write, left = checkpoint.write, [3]

    def full(folder, **rest):
        if left[0]:
            left[0] -= 1
            raise DiskFull("no room left to write it")
        return write(folder, **rest)

    monkeypatch.setattr(checkpoint, "write", full)
    monkeypatch.setattr(checkpointing, "ROOM_S", 0.0)
    job = Job(Checkpointer(tmp_path, {}, every=1))
    job.step()
    job.step()
    job.complete()
    assert job.full == [(1, "no room left to write it")]
    assert checkpoint.latest(tmp_path).step == 2
    assert left == [0]


def test_a_job_whose_disk_is_full_at_its_end_waits_for_its_model_too(tmp_path, monkeypatch):
    faults = [DiskFull("no room left"), DiskFull("no room left"), None]
    monkeypatch.setattr(Checkpointer, "_write_model", lambda *_: faults.pop(0))
    monkeypatch.setattr(checkpointing, "ROOM_S", 0.0)
    job = Job(Checkpointer(tmp_path, {}, every=1))
    job.step()
    job.complete()
    assert faults == []


def test_a_job_that_halts_applies_no_step_after_that_of_its_checkpoint(tmp_path):
    job = Job(Checkpointer(tmp_path, {}, every=1))
    job.save_from, job.halting = 2, True
    job.step()
    until(lambda: job.told, "a regular checkpoint is reported")
    assert (job.told[0][0], job.last) == (1, 0)
    stepping = threading.Thread(target=job.step)
    stepping.start()
    until(lambda: len(job.told) == 2, "the checkpoint is reported")
    assert (job.told[1][0], job.last, stepping.is_alive()) == (2, 2, True), "the next step waits for the end"
    job.halting = False  # a new master does not know of it
    stepping.join(60)
    assert not stepping.is_alive()
    job.step()
    until(lambda: len(job.told) == 3, "a regular checkpoint is reported")
    assert (job.told[2][0], job.last) == (3, 0)


def test_memory_for_later_states_is_touched_when_the_first_one_is_written_and_not_at_the_end_of_a_job(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("trueline.checkpoint.snapshot.LEAST_LIVE", 8)
    slow, job = Slow(monkeypatch), Job(Checkpointer(tmp_path, {}, every=1))
    job.step()
    assert slow.began.wait(60)
    assert len(job.checkpointer._shelf) == 0, "what the next step changes is read first"
    slow.gate.set()
    job.checkpointer._join()
    assert len(job.checkpointer._shelf) == 16
    ended = Job(Checkpointer(tmp_path / "ended", {}, every=9))
    ended.step()
    ended.complete()
    assert len(ended.checkpointer._shelf) == 0


@pytest.mark.parametrize(("live_mb", "shelf_mb"), [(0, 0), (20, 20), (96, 96), (128, 128), (400, 196), (4000, 1096)])
def test_a_worker_keeps_a_quarter_of_its_state_and_a_hundred_megabytes_for_snapshots(live_mb, shelf_mb):
    assert choose_shelf_bytes(live_mb << 20) == shelf_mb << 20


def test_the_first_writer_touches_memory_for_later_states_which_no_two_of_them_share(tmp_path, monkeypatch):
    monkeypatch.setattr("trueline.checkpoint.snapshot.LEAST_LIVE", 8)
    slow, job = Slow(monkeypatch), Job(Checkpointer(tmp_path, {}, every=1))
    slow.gate.set()
    job.step()
    job.checkpointer._join()
    assert len(job.taken[-1].shelf) == 0, "none was there at the first one"
    slow.gate.clear()
    job.step()
    second = job.taken[-1]
    assert second.shelf.nbytes == second.live_bytes == 16
    job.step(due=True)
    assert len(job.taken[-1].shelf) == 0, "the second one is still being written"
    slow.gate.set()
    job.checkpointer._join()
    assert [checkpoint.read(path).state["model"]["w"].tolist() for _, path, _ in job.told] == [
        [float(step)] * 4 for step in (1, 2, 3)
    ]
