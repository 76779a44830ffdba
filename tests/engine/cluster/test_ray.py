"""Ray: the shared suite on a real one with two nodes, what it reports in words, and what it does without us."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from conformance.scheduler import *  # noqa: F403 - the shared suite
from conformance.scheduler import ENDED, POLITE, QUEUED, RUNNING, STUBBORN, Scheduled
from conformance.scheduler_logs import *  # noqa: F403
from conformance.scheduler_queue import *  # noqa: F403
from trueline.engine.cluster.contract import Submission
from trueline.engine.cluster.ray import RayScheduler
from trueline.engine.cluster.settings import RaySettings
from trueline.errors import EngineAway
from worlds.ray import CPUS, RayCluster, add_packages, find_lack
from worlds.waiting import until

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def ray():
    if lack := find_lack():
        pytest.skip(f"no Ray here: {lack}")
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    cluster = RayCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def settings(ray, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", add_packages(os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(ray.folder / "cache"))
    return RaySettings(address=ray.address, resources=("n1=1",))


@pytest.fixture
def other_client(settings):
    return RayScheduler(settings)


_number = 0


@pytest.fixture
def scheduled(settings, tmp_path):
    global _number  # Ray's controller remembers names
    _number += 1
    world = Scheduled(RayScheduler(settings), tmp_path, job=f"suite{_number}-1", waits_for=str(CPUS), gangs=True)
    yield world
    for launch in (1, 2):
        for one in world.scheduler.list(f"{world.job}.{launch}"):
            world.scheduler.cancel(one.name, grace=False)
            world.wait(one.name, ENDED)


def python_of(ray, script: str) -> str:
    """Runs a script of another user of the cluster."""
    begin = f"import ray; ray.init('{ray.address}', namespace='trueline', logging_level='error'); "
    done = subprocess.run([sys.executable, "-c", begin + script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_pid(folder) -> int:
    return int((folder / "pid").read_text())


def test_an_actor_that_is_killed_behind_our_back_takes_its_process_along_and_is_listed(scheduled, ray):
    name = scheduled.submit("head", f"echo $$ > {scheduled.folder}/pid; {STUBBORN}")
    scheduled.wait_ready(name)
    process = psutil.Process(read_pid(scheduled.folder))
    python_of(ray, f"ray.kill(ray.get_actor('{name}'))")
    assert scheduled.wait(name, ENDED).reason == "it was killed by ray.kill"
    until(lambda: not process.is_running(), "the end of its process")
    scheduled.submit("head", STUBBORN)
    assert scheduled.find(name).state is ENDED


def test_an_actor_whose_process_dies_is_not_started_again(scheduled):
    name = scheduled.submit("head", f"echo $$ > {scheduled.folder}/pid; {POLITE}")
    scheduled.wait_ready(name)
    process = psutil.Process(read_pid(scheduled.folder))
    process.parent().kill()
    assert scheduled.wait(name, ENDED).reason.startswith("the process of its actor died")
    until(lambda: not process.is_running(), "the end of its process")
    assert scheduled.scheduler.read_log(name).count(b"ready") == 1


def test_what_a_process_has_left_behind_ends_with_it(scheduled):
    name = scheduled.submit("head", f"sleep 1000 & echo $! > {scheduled.folder}/pid; exit 3")
    assert scheduled.wait(name, ENDED).reason == "exit code 3"
    until(lambda: not psutil.pid_exists(read_pid(scheduled.folder)), "the end of its child")


def test_a_command_that_is_not_there_is_named(scheduled):
    submission = scheduled.make("head", "")
    scheduled.scheduler.submit(Submission(name=submission.name, command=("/no/python",), log=submission.log))
    scheduled.wait(submission.name, ENDED)
    assert scheduled.scheduler.read_log(submission.name) == b"cannot start /no/python: No such file or directory\n"


def test_a_log_on_a_node_that_clients_do_not_see_is_readable_while_it_runs_and_afterwards(scheduled):
    gate = scheduled.folder / "gate"
    name = scheduled.submit("head", f"echo one; until test -e {gate}; do sleep 0.05; done; echo two")
    scheduled.wait_log(name, b"one")
    log = Path(scheduled.make("head", "").log)
    elsewhere = log.rename(log.with_suffix(".elsewhere"))
    log.symlink_to("elsewhere")  # this client finds no file there
    log.unlink()
    assert scheduled.scheduler.read_log(name) == b""
    elsewhere.rename(log)
    gate.touch()
    scheduled.wait(name, ENDED)
    log.unlink()
    assert scheduled.scheduler.read_log(name) == b"one\ntwo\n"


def test_a_node_that_is_too_small_is_named(scheduled):
    name = scheduled.submit("head", "true", slots=64, memory_mb=100)
    found = until(lambda: (one := scheduled.find(name)).reason != "it is being submitted" and one, "a reason")
    assert (found.state, found.reason) == (
        QUEUED,
        "no node of the Ray cluster has 64 CPUs (the largest: 2 CPUs), so that it never starts unless one joins",
    )
    scheduled.scheduler.cancel(name)
    assert scheduled.find(name).reason == "cancelled while it waited"


def test_two_jobs_that_each_need_both_slots_of_a_node_never_each_hold_one(scheduled):
    other = Scheduled(scheduled.scheduler, scheduled.folder, f"{scheduled.job}-other")
    first = scheduled.submit("head", POLITE, gang=2)
    scheduled.wait_ready(first)
    second = other.submit("head", "echo began", gang=2)
    reason = until(lambda: "it waits" in (why := other.find(second).reason) and why, lambda: other.find(second))
    assert re.fullmatch(r"it waits for 2 times 1 CPU and 1 n1: \d of the Ray cluster's 4 CPUs are free", reason)
    host = scheduled.submit("host-1", POLITE)
    scheduled.wait_ready(host)  # its job has it reserved
    assert other.find(second).state is QUEUED
    for name in (first, host):
        scheduled.scheduler.cancel(name)
    other.wait(second, ENDED)
    assert other.scheduler.read_log(second) == b"began\n"


def test_a_reservation_ends_with_the_launch_also_if_all_its_actors_were_killed(scheduled, ray):
    name = scheduled.submit("head", POLITE, gang=2)
    own = f"one['name'] == '{scheduled.job}.1' and one['state'] != 'REMOVED'"
    count = f"print(sum({own} for one in ray.util.placement_group_table().values()))"
    scheduled.wait_ready(name)
    assert python_of(ray, count) == "1\n"
    python_of(ray, f"ray.kill(ray.get_actor('{name}'))")
    scheduled.wait(name, ENDED)
    assert python_of(ray, count) == "0\n"


def test_a_job_that_needs_more_than_the_cluster_has_is_told_so(scheduled):
    name = scheduled.submit("head", "true", gang=3)
    reason = until(lambda: "needs" in (why := scheduled.find(name).reason) and why, "a reason")
    assert reason == (
        "its job needs 3 times 1 CPU and 1 n1 to begin, and the Ray cluster has 2 of these, so that it never starts"
        " unless nodes join"
    )


def test_a_controller_that_stands_still_is_no_refusal_and_what_runs_continues(scheduled, ray, monkeypatch):
    name = scheduled.submit("head", POLITE)
    scheduled.wait_ready(name)
    ray.pause_controller()
    try:
        with monkeypatch.context() as patch:
            patch.setattr("trueline.engine.cluster.ray.CALL_S", 1.0)
            with pytest.raises(EngineAway, match="Ray did not answer within 1 s"):
                scheduled.scheduler.list(f"{scheduled.job}.1")
    finally:
        ray.resume_controller()
    assert scheduled.find(name).state is RUNNING


def test_a_node_that_did_not_answer_gets_the_next_submission_where_no_other_can_have_it(scheduled, ray):
    name = scheduled.submit("host-1", f"echo $$ > {scheduled.folder}/pid; {POLITE}")
    scheduled.wait_ready(name)
    keeper = psutil.Process(read_pid(scheduled.folder)).parent()
    keeper.suspend()
    scheduled.scheduler.cancel(name, grace=False)
    keeper.resume()
    assert scheduled.wait(name, ENDED).reason == "given up: its node did not answer"
    scheduled.wait_ready(scheduled.submit("host-2", POLITE))
    until(lambda: not keeper.is_running(), "the end of the actor that was given up")


def test_a_client_outside_of_the_cluster_submits_lists_reads_and_cancels_by_rays_client_port(ray, scheduled):
    outside = RayScheduler(RaySettings(address=ray.client_address, resources=("n1=1",)))
    world = Scheduled(outside, scheduled.folder, f"{scheduled.job}-outside")
    name = world.submit("head", POLITE)
    world.wait_ready(name)
    assert scheduled.scheduler.list(f"{world.job}.1")[0].state is RUNNING
    outside.cancel(name)
    assert world.wait(name, ENDED).reason == "exit code 3"
    assert b"left" in outside.read_log(name)


def test_a_submission_avoids_the_node_that_has_died(ray, settings, tmp_path):
    """The last test: it takes a node from the cluster."""
    world = Scheduled(RayScheduler(RaySettings(address=ray.address)), tmp_path, job="power-1")
    fill = Scheduled(RayScheduler(settings), tmp_path, job="fill-1")
    kept = fill.submit("head", POLITE, slots=CPUS)
    fill.wait_ready(kept)
    lost = world.submit("host-1", POLITE)
    world.wait_ready(lost)
    fill.scheduler.cancel(kept, grace=False)
    fill.wait(kept, ENDED)
    ray.kill_node("n2")
    world.scheduler.cancel(lost, grace=False)  # as the head does once its lease has ended
    world.wait_ready(world.submit("host-2", POLITE))
    assert world.wait(lost, ENDED).reason == "given up: its node did not answer"
    world.scheduler.cancel("power-1.1.host-2", grace=False)
    world.wait("power-1.1.host-2", ENDED)
