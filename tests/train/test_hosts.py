"""A job on two machines: a worker, a host or a link that fails costs no record, and each change is an event."""

import json
import os
import signal
import subprocess
import time

import psutil
import pytest

from trueline.train.master.claims import Leader, ViewClaims
from worlds.joined_hosts import TRUELINE, Machines, children
from worlds.networks import find_lack, open_machines
from worlds.waiting import until

pytestmark = pytest.mark.jobs


@pytest.fixture
def machines(tmp_path):
    """Machine A with the job and the recipe, and machines B and C, which see neither: only the store is shared."""
    if lack := find_lack():
        pytest.skip(f"two machines need network namespaces: {lack}")
    (tmp_path / "a").mkdir()
    with open_machines(3, hidden_from_others=(tmp_path / "a",)) as opened:
        yield opened


@pytest.fixture
def world(tmp_path, machines):
    made = Machines(tmp_path, machines)
    yield made
    made.close()


def test_workers_hosts_and_links_die_and_each_record_counts_once(world):
    figures = {}
    world.train("--workers", "1:3", "--cores", "1", "--lease", "10")
    world.wait_workers(1)
    joined = world.join(cores=2)
    world.wait_workers(3)

    pid = world.wait("worker.running", host="b")[0]["pid"]  # pids of one machine: namespaces share them here
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    world.wait("worker.lost", after=at)
    back = world.wait_workers(3, after=world.wait_workers(2, after=at))
    figures["kill_ms"], figures["kill_full_s"] = world.gap_ms(at), back - at

    at = time.time()
    for child in (joined, *children(joined.pid)):
        os.kill(child.pid, signal.SIGKILL)
    lost, lost_at = world.wait("host.lost", after=at)
    assert (lost["host"], lost["workers"]) == ("b", 2)
    figures["host_kill_s"] = world.wait_workers(1, after=at) - at
    joined = world.join(cores=2)
    rejoined = world.wait("host.joined", after=lost_at)[1]
    figures["back_s"] = world.wait_workers(3, after=rejoined) - rejoined

    at = time.time()
    world.machines["b"].cut()
    world.wait("host.lost", after=at)
    figures["cut_s"] = world.wait_workers(1, after=at) - at
    assert "leads" not in (world.path / "join-b.log").read_text()  # the master's side trains, and no other
    healed = time.time()
    world.machines["b"].heal()
    assert world.wait("host.joined", after=healed)[0]["host"] == "b"
    figures["heal_s"] = world.wait_workers(3, after=healed) - healed

    at = time.time()
    world.leader.run(TRUELINE, "status", str(world.job.path))
    os.kill(joined.pid, signal.SIGINT)
    assert joined.wait(100) == 0, world.logs()
    drained = world.wait_workers(1, after=at)
    views = world.changes(at, drained)
    assert views
    assert all(why.endswith(("leaves", "leave")) for why in views)  # planned: no step failed
    world.halt()
    steps, lost, repeated = world.count()
    print(json.dumps({"steps": steps, "lost": lost, "repeated": repeated, **figures}))
    assert (lost, repeated) == (0, 0)


def test_a_host_trains_with_the_recipes_folder_that_travelled_and_its_output_comes_back(world):
    (world.path / "a" / "project" / "helper.py").write_text("FACTOR = 1.0\n")
    recipe = world.path / "a" / "project" / "recipe.py"
    recipe.write_text(f"import helper\n{recipe.read_text()}\nprint('helper is', helper.__file__)\n")
    world.train("--workers", "1", "--cores", "0")
    world.wait("job.waiting")
    world.join()
    world.wait_workers(1)
    log = world.job.log("worker-0.0")
    until(lambda: log.exists() and "helper is /tmp/" in log.read_text(), world.logs)  # it travels back a little later
    assert str(world.path / "a") not in log.read_text()
    world.halt()
    assert world.count()[1:] == (0, 0)


def test_the_masters_host_dies_and_a_joined_host_leads_the_job_on_without_a_lost_step(world):
    world.train("--workers", "1:4", "--cores", "1", "--lease", "20")
    world.wait_workers(1)
    joined = world.join(cores=2)
    world.wait_workers(3)
    world.join(name="c")
    world.wait_workers(4)
    pids = [event["pid"] for name, event, _ in world.events() if name == "worker.running" and "host" in event]
    at = time.time()
    world.kill(world.launcher)
    before = world.steps()
    world.move_to("b", joined)
    adopted = world.wait_workers(3, after=at)
    assert min(world.steps(after=at)) <= max(before) + 2  # the dead master may have failed to write the step under way
    told = [name for name, _, _ in world.events()]
    assert told[0] == "job.started"  # on host A: the history is whole
    assert told.index("host.joined") < told.index("job.started", 1)
    missing = set(range(max(world.steps()))) - set(world.steps())
    assert len(missing) <= 2, missing
    assert [psutil.pid_exists(pid) for pid in pids] == [True] * 3  # no worker was started again
    with pytest.raises(subprocess.CalledProcessError):
        world.machines["a"].run(TRUELINE, "resume", str(world.path / "a" / "job"))
    world.join(name="a")
    grown = world.wait_workers(4, after=adopted)
    os.kill(joined.pid, signal.SIGINT)
    assert joined.wait(100) == 0, world.logs()
    steps, lost, repeated = world.count()
    figures = {"adopt_s": adopted - at, "grown_s": grown - adopted, "steps": steps, "lost": lost, "repeated": repeated}
    print(json.dumps(figures))
    assert (lost, repeated) == (0, 0)


def test_a_master_that_was_away_for_long_gives_way_to_the_host_that_leads_now(world):
    world.train("--workers", "1:2", "--cores", "1", "--lease", "10")
    world.wait_workers(1)
    joined = world.join()
    world.wait_workers(2)
    processes, at = [*children(world.launcher.pid), world.launcher], time.time()
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    launcher = world.launcher
    world.move_to("b", joined)
    world.wait_workers(1, after=at)
    for process in processes:
        os.kill(process.pid, signal.SIGCONT)
    assert launcher.wait(100) != 0
    assert "b leads the job now" in (world.path / "train.log").read_text()
    with pytest.raises(subprocess.CalledProcessError) as refused:
        world.machines["a"].run(TRUELINE, "resume", str(world.path / "a" / "job"))
    assert "b has led this job since" in refused.value.stderr.decode()
    world.halt()
    assert world.count()[1:] == (0, 0)
    again = world.leader.start(TRUELINE, "resume", str(world.job.path), log=world.path / "resumed.log")
    world.processes.append(again)
    world.move_to("b", again)
    world.wait("step.applied", after=time.time())
    world.halt()
    assert world.count()[1:] == (0, 0)


def test_of_two_masters_one_publishes_a_view(tmp_path):
    one, two = (Leader(id=name, host=name, address="", token="") for name in ("one", "two"))
    ours, theirs = ViewClaims(tmp_path, "launch"), ViewClaims(tmp_path, "launch")
    assert ours.newest() is None
    assert ours.claim({"generation": 1, "members": ["worker-0.0"]}, one) == one
    assert theirs.claim({"generation": 1, "members": ["worker-1.0"]}, two) == one
    assert theirs.claim({"generation": 2, "members": ["worker-1.0"]}, two) == two
    assert ours.claim({"generation": 2, "members": ["worker-0.0"]}, one) == two
    newest = ours.newest()
    assert newest.leader == two
    assert newest.view["members"] == ["worker-1.0"]
    assert ViewClaims(tmp_path, "another launch").newest() is None
