"""Promises of membership in whole jobs: real processes, real kills."""

import json
import os
import signal
from pathlib import Path

import grpc
import psutil
import pytest

from trueline import events
from trueline.train.api import train
from trueline.wire import train_pb2 as pb
from trueline.wire import train_pb2_grpc as pb_grpc
from worlds.jobs import TINY, seen_counts

pytestmark = pytest.mark.jobs


def ask(job_dir: Path, method: str, request):
    address = json.loads((job_dir / "master.json").read_text())["address"]
    metadata = (("authorization", f"Bearer {(job_dir / 'secret').read_text()}"),)
    with grpc.insecure_channel(address) as channel:
        return getattr(pb_grpc.MasterStub(channel), method)(request, metadata=metadata)


def test_a_job_is_scaled_up_and_down_without_a_failed_step(tmp_path):
    job, reasons, status, ended = tmp_path / "job", [], [], {}

    def listen(name, fields):
        if name == "step.applied" and fields["step"] == 10:
            ask(job, "Scale", pb.ScaleRequest(workers=3, why="more"))
        if name == "step.applied" and fields["workers"] == 3 and not status:
            status.append(json.loads(ask(job, "Status", pb.Cursor()).json))
            ask(job, "Scale", pb.ScaleRequest(workers=1, why="less"))
        if name == "view.published":
            reasons.append(fields["why"])

    with events.listening(listen):
        result = train(TINY, job_dir=job, workers=2, epochs=400)
    assert seen_counts(result.checkpoint) == [400.0]
    assert reasons == ["all are ready", "worker-2.0 joins", "worker-1.0 and worker-2.0 leave"]
    assert [member["rank"] for member in status[0]["members"]] == [0, 1, 2]
    lines = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
    assert [line["fields"]["workers"] for line in lines if line["name"] == "job.scaled"] == [3, 1]
    assert ended == {}


def test_a_worker_that_dies_after_its_agent_was_restarted_is_noticed_at_once(tmp_path):
    job, pids, gaps, agents = tmp_path / "job", {}, [], []

    def listen(name, fields):
        if name == "worker.running":
            if fields["worker"] in pids and "worker-1.0" in pids and agents:
                os.kill(pids.pop("worker-1.0"), signal.SIGKILL)  # the next agent has told of those it adopted
            elif not agents:
                pids[fields["worker"]] = fields["pid"]
        if name == "step.applied" and fields["step"] == 10 and not agents:
            (agent,) = [
                process for process in psutil.Process().children() if "trueline.engine.local.agent" in process.cmdline()
            ]  # fmt: skip
            agents.append(agent.pid)
            agent.kill()
        if name == "step.applied" and fields["gap_ms"] and "worker-1.0" not in pids:
            gaps.append(fields["gap_ms"])

    with events.listening(listen):
        result = train(TINY, job_dir=job, workers="1:2", epochs=300, lease_s=60.0)
    assert seen_counts(result.checkpoint) == [300.0]
    assert gaps
    assert max(gaps) < 20_000  # and not the lease
