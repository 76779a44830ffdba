"""A loop of one's own on several machines: its folder travels, and it is a job as a recipe's is."""

import os
import signal
import time
from pathlib import Path

import pytest

from worlds.joined_hosts import LOOP, Machines
from worlds.networks import find_lack, open_machines
from worlds.waiting import until

pytestmark = pytest.mark.jobs
EPOCHS = "100"
"""With the gate shut, minutes: what a test waits for comes before."""


@pytest.fixture
def world(tmp_path):
    if lack := find_lack():
        pytest.skip(f"two machines need network namespaces: {lack}")
    (tmp_path / "a").mkdir()
    (tmp_path / "tail").mkdir()
    with open_machines(3, hidden_from_others=(tmp_path / "a",)) as opened:
        made = Machines(tmp_path, opened)
        yield made
        made.close()


def script(world: Machines) -> Path:
    path = world.path / "a" / "project" / "loop.py"
    path.write_text(LOOP)
    return path


def test_a_script_trains_on_a_host_that_joins_and_is_waited_for_there_to_its_own_end(world, monkeypatch):
    gate, tail = world.path / "gate", world.path / "tail"
    monkeypatch.setenv("TINY_GATE", f"20:{gate}")
    world.run(script(world), "--workers", "1:3", "--cores", "1", "--", EPOCHS, str(tail))
    world.wait_workers(1)
    joined = world.join(cores=2)
    full = world.wait_workers(3)
    pid = world.wait("worker.running", host="b")[0]["pid"]
    os.kill(pid, signal.SIGKILL)
    world.wait("worker.lost", after=full)
    world.wait_workers(3, after=world.wait_workers(2, after=full))
    gate.touch()
    refs = {event["worker"] for name, event, _ in world.events() if name == "worker.running"}
    until(lambda: len(list(tail.iterdir())) == 3, world.logs)
    assert {one.name for one in tail.iterdir()} < refs
    assert {one.read_text() for one in tail.iterdir()} == {"800"}
    assert world.launcher.poll() is joined.poll() is None, "the scripts still run"
    (tail / "open").touch()
    assert world.launcher.wait(280) == 0, world.logs()
    assert joined.wait(280) == 0, world.logs()
    assert world.count() == (800, 0, 0)
    logs = "".join(path.read_text() for path in world.job.logs.glob("worker-*.log"))
    assert logs.count("is over") == 3


def test_the_masters_host_dies_and_a_joined_host_leads_the_script_on_to_its_end(world, monkeypatch):
    gate, tail = world.path / "gate", world.path / "tail"
    monkeypatch.setenv("TINY_GATE", f"20:{gate}")
    (tail / "open").touch()
    world.run(script(world), "--workers", "1:3", "--cores", "1", "--lease", "10", "--", EPOCHS, str(tail))
    world.wait_workers(1)
    joined = world.join(cores=1)
    world.wait_workers(2)
    at = time.time()
    world.kill(world.launcher)
    world.move_to("b", joined)
    world.wait_workers(1, after=at)
    gate.touch()
    assert joined.wait(280) == 0, world.logs()
    assert world.count() == (800, 0, 0)


def test_a_script_that_decides_something_else_on_another_host_is_refused_by_name(world, monkeypatch):
    monkeypatch.setenv("TINY_GATE", f"20:{world.path / 'gate'}")
    arguments = ("--", EPOCHS, str(world.path / "tail"), "differ")
    world.run(script(world), "--workers", "1:2", "--cores", "1", *arguments)
    world.wait_workers(1)
    world.join()
    assert world.launcher.wait(280) != 0
    said = (world.path / "train.log").read_text()
    assert "the script made an Elastic with epochs=100, and the job began with 101" in said
