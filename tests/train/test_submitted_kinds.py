"""Scripts with a loop of their own and jobs with parameter servers, submitted to real engines."""

import re
import shutil
import time

import pytest
import torch

from trueline.checkpoint import checkpoint
from worlds import TESTS
from worlds.engine_clients import *  # noqa: F403 - the fixture `engine` and what it needs
from worlds.jobs import TINY
from worlds.waiting import until

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(900)]  # a real cluster takes its time to start
COUNTING = TESTS / "ps" / "recipes" / "counting.py"
RECORDS, BATCH = 640, 16
LOOP = """
import sys
import tiny, torch, trueline

torch.manual_seed(0)
model = tiny.model()
job = trueline.Elastic(
    model, tiny.optimizer(model.parameters()), tiny.dataset("training"), global_batch=30, epochs=int(sys.argv[1])
)
for batch in job:
    job.step(tiny.loss(model(*batch.inputs), batch.labels))
"""


def submit(client, path, *options: str, on: str) -> str:
    text = client.run("submit", str(path), "--on", on, "--store", str(client.store), *options)
    client.job = re.match(r"(\S+) is submitted", text)[1]
    return client.job


def count_rows(client) -> tuple[int, int, int]:
    """Steps of the newest checkpoint of `COUNTING`, records that are missing in it, and records that are too many."""
    newest = checkpoint.latest(client.where.checkpoints)
    state, seen = newest.state["model"], torch.zeros(RECORDS)
    seen[state["seen.ids"]] = state["seen.rows"][:, 0]
    whole = newest.step * BATCH // RECORDS
    return newest.step, int((whole - seen).clamp(min=0).sum()), int((seen - whole - 1).clamp(min=0).sum())


@on_each_engine("local")  # noqa: F405
def test_a_script_with_a_loop_of_its_own_is_sent_to_hosts_and_lives_on_when_its_head_dies(engine, client):
    folder = client.folder / "loop"
    folder.mkdir()
    (folder / "own_loop.py").write_text(LOOP)
    shutil.copy(TINY, folder / "tiny.py")
    more = ("--workers", "1:2", "--checkpoint-every", "1000")
    job = submit(client, folder / "own_loop.py", *more, "--", "1000000", on=engine)
    assert job == "own_loop-1"
    client.wait_workers(2)
    at = time.time()
    client.kill("head")
    client.wait_workers(1, after=at)
    client.wait_workers(2, after=client.wait("host.joined", after=at, host="host-2"))
    client.run("halt", job)
    steps, *wrong = client.count()
    assert wrong == [0, 0]
    at = time.time()
    client.run("resume", job, "--workers", "1")
    client.wait("step.applied", after=at, step=steps + 1)
    client.run("halt", job)
    assert client.count()[1:] == (0, 0)
    until(lambda: not client.processes(), "the end of all processes")


@on_each_engine("local")  # noqa: F405
def test_parameter_servers_run_beside_their_head_and_continue_from_their_parts_of_the_checkpoint(engine, client):
    each = "2" if engine in ("local", "podman") else "1"  # nodes of the others have two cores
    more = ("--checkpoint-every", "20", "--epochs", "1000000")
    job = submit(client, COUNTING, "--strategy", "ps", "--servers", each, "--workers", each, *more, on=engine)
    client.wait("checkpoint.saved")
    assert "its slots are those of its submission" in client.run("scale", job, "1", code=2)
    client.kill("head")
    until(lambda: client.read()["state"] == "dead", client.read)
    at = time.time()
    client.run("resume", job)
    restored = client.wait("job.restored", after=at)
    client.wait("checkpoint.saved", after=restored)
    assert "stopped (trueline halt) after step" in client.run("halt", job)
    steps, *wrong = count_rows(client)
    assert wrong == [0, 0]
    assert client.read()["step"] == steps >= 20
    until(lambda: not client.processes(), "the end of all processes")
