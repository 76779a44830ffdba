"""Promises of membership in whole jobs: real processes, real kills."""

import json
import os
import signal
from pathlib import Path

import grpc
import pytest

from trueline import events
from trueline.train.api import train
from trueline.wire import train_pb2 as pb
from trueline.wire import train_pb2_grpc as pb_grpc
from worlds.jobs import TINY, JobGate, find_agent, seen_counts

pytestmark = pytest.mark.jobs


def ask(job_dir: Path, method: str, request):
    address = json.loads((job_dir / "master.json").read_text())["address"]
    metadata = (("authorization", f"Bearer {(job_dir / 'secret').read_text()}"),)
    with grpc.insecure_channel(address) as channel:
        return getattr(pb_grpc.MasterStub(channel), method)(request, metadata=metadata)


def test_a_job_is_scaled_up_and_down_without_a_failed_step(tmp_path, monkeypatch):
    job, reasons, status = tmp_path / "job", [], []
    gate = JobGate(tmp_path, monkeypatch)

    def listen(name, fields):
        if name == "step.applied" and fields["step"] == 10:
            ask(job, "Scale", pb.ScaleRequest(workers=3, why="more"))
        if name == "step.applied" and fields["workers"] == 3 and not status:
            status.append(json.loads(ask(job, "Status", pb.Cursor()).json))
            ask(job, "Scale", pb.ScaleRequest(workers=1, why="less"))
        if name == "view.published":
            reasons.append(fields["why"])
        if len(reasons) == 3:
            gate.open()

    with events.listening(listen):
        result = train(TINY, job_dir=job, workers=2, epochs=400)
    assert seen_counts(result.checkpoint) == [400.0]
    assert reasons == ["all are ready", "worker-2.0 joins", "worker-1.0 and worker-2.0 leave"]
    assert [member["rank"] for member in status[0]["members"]] == [0, 1, 2]
    lines = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
    assert [line["fields"]["workers"] for line in lines if line["name"] == "job.scaled"] == [3, 1]


def test_a_worker_that_dies_after_its_agent_was_restarted_is_noticed_at_once(tmp_path, monkeypatch):
    """Its lease is longer than the test may take."""
    gate, pids, left, given_up, lost = JobGate(tmp_path, monkeypatch), {}, ["agent", "worker"], [], []

    def listen(name, fields):
        if name == "worker.running":
            pids[fields["worker"]] = fields["pid"]
            if left == ["worker"] and fields["worker"] == "worker-1.0":  # the next agent tells of those it adopted
                left.remove("worker")
                os.kill(pids["worker-1.0"], signal.SIGKILL)
        if name == "step.applied" and fields["workers"] == 2 and "agent" in left and len(pids) == 2:
            left.remove("agent")
            find_agent(os.getpid()).kill()
        if name == "worker.killed":
            given_up.append(fields["worker"])
        if name == "worker.lost":
            lost.append((fields["worker"], fields["why"]))
            gate.open()

    with events.listening(listen):
        result = train(TINY, job_dir=tmp_path / "job", workers="1:2", epochs=100, lease_s=600.0)
    assert seen_counts(result.checkpoint) == [100.0]
    assert lost == [("worker-1.0", "ended after its agent had died, so that its exit code is unknown")]
    assert given_up == left == []
