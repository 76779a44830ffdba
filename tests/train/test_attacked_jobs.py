"""Promises of a job while another process of the machine attacks every port of its workers."""

import json
import os
import signal

import pytest

from trueline import events
from trueline.train.api import train
from trueline.train.settings import Fault
from worlds import TESTS
from worlds.jobs import TINY, JobGate, seen_counts
from worlds.strangers import PortThief, Strangers

pytestmark = pytest.mark.jobs
LARGE = TESTS / "train" / "recipes" / "large.py"


def test_strangers_at_every_port_cost_no_worker_and_no_record(tmp_path, monkeypatch):
    """Two workers die, and get their state back over a connection of its own, under attack from the first moment on."""
    gate = JobGate(tmp_path, monkeypatch)
    pids, lost, failed, back, strangers = {}, [], [], set(), Strangers(tmp_path)

    def listen(name, fields):
        if name == "worker.running":
            pids[fields["worker"]] = fields["pid"]
            strangers.aim(pids.values())
        if name == "worker.lost":
            lost.append((fields["worker"], fields["why"]))
        if name == "worker.joined":
            back.add(fields["worker"])
        if name == "job.failed":
            failed.append(fields)
        if {"worker-0.1", "worker-1.1"} <= back and strangers.tried() > 400:
            gate.open()

    faults = [Fault(step=9, slot=1, phase="backward"), Fault(step=25, slot=0, phase="allreduced")]
    with events.listening(listen):
        result = train(LARGE, job_dir=tmp_path / "job", workers=3, faults=faults, epochs=20)
    counts = strangers.stop()
    assert seen_counts(result.checkpoint) == [20.0]
    assert sorted(lost) == [("worker-0.0", "killed by SIGKILL"), ("worker-1.0", "killed by SIGKILL")]
    assert failed == []
    assert counts["made"] > 100
    logs = "".join(path.read_text() for path in (tmp_path / "job" / "logs").glob("worker-*.log"))
    assert "worker.caught_up" in logs
    assert "terminate" not in logs


def test_no_other_user_listens_on_the_masters_port_while_there_is_no_master(tmp_path, monkeypatch):
    """Workers look for the next master there, and would send it the secret."""
    job, gate = tmp_path / "job", JobGate(tmp_path, monkeypatch, first=3)
    thief, killed, counts = PortThief(tmp_path), [], {}

    def listen(name, fields):
        if name != "step.applied":
            return
        master = json.loads((job / "master.json").read_text())
        if not killed:
            thief.aim(int(master["address"].rpartition(":")[2]))
        if len(killed) < 2 and master["pid"] not in killed:
            killed.append(master["pid"])
            os.kill(master["pid"], signal.SIGKILL)
        elif len(killed) == 2 and master["pid"] not in killed and thief.tried() > 100 and not counts:
            counts.update(thief.stop())  # before the job ends, and gives its port up
            gate.open()

    with events.listening(listen):
        result = train(TINY, job_dir=job, workers=2, epochs=40)
    assert seen_counts(result.checkpoint) == [40.0]
    assert len(killed) == 2
    assert counts["tried"] > 100
    assert counts["listened"] == 0
