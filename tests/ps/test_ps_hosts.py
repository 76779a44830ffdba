"""Jobs whose workers are on other hosts than the servers: each record counts once, whatever dies."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from trueline.checkpoint import checkpoint
from worlds.counted import ENDLESS, count_uneven
from worlds.joined_hosts import Machines
from worlds.networks import find_lack, open_machines

pytestmark = pytest.mark.jobs
RECIPES = Path(__file__).parent / "recipes"


@pytest.fixture
def world(tmp_path):
    """Machine A with the job, its servers and the recipe, and machines B and C, which see only the store."""
    if lack := find_lack():
        pytest.skip(f"two machines need network namespaces: {lack}")
    (tmp_path / "a").mkdir()
    with open_machines(3, hidden_from_others=(tmp_path / "a",)) as machines:
        made = Machines(tmp_path, machines)
        for recipe in ("counting.py", "hybrid.py", "gate.py"):
            shutil.copy(RECIPES / recipe, tmp_path / "a" / "project")
        yield made
        made.close()


def kill(world, worker):
    """Kills a process; returns when."""
    (event, _), at = world.wait("worker.running", worker=worker), time.time()
    os.kill(event["pid"], signal.SIGKILL)
    world.wait("worker.lost", after=at, worker=worker)
    return at


@pytest.mark.parametrize("strategy", ["ps", "hybrid"])
def test_workers_of_other_hosts_servers_and_hosts_die_and_each_record_counts_once(world, strategy):
    recipe = world.path / "a" / "project" / ("counting.py" if strategy == "ps" else "hybrid.py")
    workers = ("--workers", "2") if strategy == "ps" else ("--workers", "1:2")
    options = ("--servers", "2", "--cores", "0", "--epochs", str(ENDLESS))
    world.launch("train", str(recipe), "--strategy", strategy, *workers, *options)
    world.wait("job.waiting")
    world.join()
    world.wait_workers(1)
    other = world.join(name="c")
    at = world.wait_workers(2)
    hosts = {event["worker"]: event.get("host") for name, event, _ in world.events() if name == "worker.running"}
    assert {host for ref, host in hosts.items() if ref.startswith("worker")} == {"b", "c"}
    assert hosts.get("server-0.0") is None
    at = world.wait_workers(2, after=kill(world, "worker-0.0"))
    at = world.wait_workers(2, after=kill(world, "server-1.0"))
    world.kill(other)
    world.wait("host.lost", after=at, host="c")
    at = world.wait_workers(1, after=at)
    world.wait("step.applied", after=at)
    world.halt()
    assert count_uneven(checkpoint.latest(world.store)) == 0
