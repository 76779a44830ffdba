"""Promises of a job while another process of the machine attacks every port of its workers."""

import json
import os
import signal

import pytest

from trueline import events
from trueline.train.api import train
from trueline.train.settings import Fault
from worlds import TESTS
from worlds.jobs import TINY, seen_counts
from worlds.strangers import PortThief, Strangers

pytestmark = pytest.mark.jobs
LARGE = TESTS / "train" / "recipes" / "large.py"


def test_strangers_at_every_port_cost_no_worker_and_no_record(tmp_path):
    """Two workers die, and get their state back over a connection of its own, under attack from the first moment on."""
    pids, lost, failed, strangers = {}, [], [], Strangers(tmp_path)

    def listen(name, fields):
        if name == "worker.running":
            pids[fields["worker"]] = fields["pid"]
            strangers.aim(pids.values())
        if name == "worker.lost":
            lost.append((fields["worker"], fields["why"]))
        if name == "job.failed":
            failed.append(fields)

    faults = [Fault(step=9, slot=1, phase="backward"), Fault(step=25, slot=0, phase="allreduced")]
    with events.listening(listen):
        result = train(LARGE, job_dir=tmp_path / "job", workers=3, faults=faults)
    counts = strangers.stop()
    assert seen_counts(result.checkpoint) == [6.0]
    assert sorted(lost) == [("worker-0.0", "killed by SIGKILL"), ("worker-1.0", "killed by SIGKILL")]
    assert failed == []
    assert counts["made"] > 100
    logs = "".join(path.read_text() for path in (tmp_path / "job" / "logs").glob("worker-*.log"))
    assert "worker.caught_up" in logs
    assert "terminate" not in logs


def test_no_other_user_listens_on_the_masters_port_while_there_is_no_master(tmp_path):
    """Workers look for the next master there, and would send it the secret."""
    job, thief, killed, counts = tmp_path / "job", PortThief(), [], {}

    def listen(name, fields):
        if name == "step.applied" and fields["step"] in (5, 20) and fields["step"] not in killed:
            master = json.loads((job / "master.json").read_text())
            if not killed:
                thief.aim(int(master["address"].rpartition(":")[2]))
            killed.append(fields["step"])
            os.kill(master["pid"], signal.SIGKILL)

        if name == "step.applied" and fields["step"] >= 200 and not counts:
            counts.update(thief.stop())  # before the job ends, and gives its port up

    with events.listening(listen):
        result = train(TINY, job_dir=job, workers=2, epochs=40)
    assert seen_counts(result.checkpoint) == [40.0]
    assert killed == [5, 20]
    assert counts["tried"] > 100
    assert counts["listened"] == 0
