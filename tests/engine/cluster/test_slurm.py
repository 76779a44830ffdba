"""Slurm: what its commands print, and the shared suite on a real one with two nodes."""

import os
import signal

import pytest

from conformance.scheduler import *  # noqa: F403 - the shared suite
from conformance.scheduler import ENDED, POLITE, QUEUED, RUNNING, Scheduled
from conformance.scheduler_logs import *  # noqa: F403
from conformance.scheduler_queue import *  # noqa: F403
from trueline.engine.cluster.contract import Submission
from trueline.engine.cluster.settings import SlurmSettings
from trueline.engine.cluster.slurm import SlurmScheduler, make_options, make_script, parse_queue
from trueline.errors import EngineAway, UsageError
from worlds.slurm import CPUS, Slurm, find_lack
from worlds.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if lack := find_lack():
        pytest.skip(f"no Slurm here: {lack}")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def settings(slurm, monkeypatch):
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    return SlurmSettings(partition="one")


@pytest.fixture
def other_client(settings):
    return SlurmScheduler(settings)


_number = 0


@pytest.fixture
def scheduled(settings, tmp_path, slurm):
    global _number  # Slurm remembers names for five minutes
    _number += 1
    world = Scheduled(SlurmScheduler(settings), tmp_path, job=f"suite{_number}-1", waits_for=str(CPUS))
    yield world
    for name in slurm.call("squeue", "--noheader", "--format=%j").split():
        world.scheduler.cancel(name, grace=False)
    until(lambda: slurm.count_idle() == 2, lambda: slurm.call("squeue"))


def test_an_unknown_partition_is_refused_in_words(slurm, settings, tmp_path):
    scheduler = SlurmScheduler(SlurmSettings(partition="gpu"))
    with pytest.raises(UsageError, match=r"Slurm refuses it: .*[Ii]nvalid partition"):
        scheduler.submit(Submission(name="a-1.1.head", command=("true",), log=str(tmp_path / "log")))


def test_a_node_that_is_too_small_is_named(slurm, settings, tmp_path):
    world = Scheduled(SlurmScheduler(settings), tmp_path, job="large-1")
    name = world.submit("head", "true", slots=64)
    found = until(lambda: (one := world.find(name)) and "never" in one.reason and one, lambda: world.find(name))
    assert found.reason == (
        "it asks for more than a node of its partition has, so that it never starts (PartitionConfig)"
    )
    world.scheduler.cancel(name)


def test_a_queue_that_never_schedules_is_named(slurm, settings, tmp_path):
    world = Scheduled(SlurmScheduler(SlurmSettings(partition="down")), tmp_path, job="never-1")
    name = world.submit("head", "true")
    found = until(lambda: (one := world.find(name)) and "partition" in one.reason and one, "a reason")
    assert (found.state, found.reason) == (QUEUED, "its partition is down (PartitionDown)")
    world.scheduler.cancel(name)
    until(lambda: (one := world.find(name)) is None or one.state is ENDED, "its end")


def test_a_cancel_behind_our_back_is_listed(scheduled, slurm):
    name = scheduled.submit("head", POLITE)
    scheduled.wait_ready(name)
    slurm.call("scancel", f"--name={name}")
    assert scheduled.wait(name, ENDED).reason
    assert b"left" in scheduled.scheduler.read_log(name)


@pytest.mark.long
def test_a_controller_that_is_away_is_no_refusal_and_what_runs_continues(scheduled, slurm):
    name = scheduled.submit("head", POLITE)
    scheduled.wait_ready(name)
    slurm.stop_controller()
    with pytest.raises(EngineAway, match="Slurm's controller does not answer"):
        scheduled.scheduler.list(f"{scheduled.job}.1")
    with pytest.raises(EngineAway):
        scheduled.submit("host-1", "true")
    slurm.start_controller()

    def answers() -> bool:
        try:
            return scheduled.find(name).state is RUNNING
        except EngineAway:
            return False

    until(answers, slurm.logs)


def test_no_option_lets_slurm_start_a_process_again():
    submission = Submission(name="a-1.2.host-3", command=("x",), log="/l", slots=4, memory_mb=100)
    settings = SlurmSettings(partition="p", account="a", qos="q", time="1:00", options=("--gres=gpu:1",))
    options = make_options(submission, settings)
    assert {"--no-requeue", "--ntasks=1", "--cpus-per-task=4", "--mem=100M", "--job-name=a-1.2.host-3"} <= {*options}
    assert options[-5:] == ["--account=a", "--qos=q", "--time=1:00", "--mem=100M", "--gres=gpu:1"]


def test_the_script_becomes_the_command_so_that_this_gets_the_signals():
    submission = Submission(name="a-1.1.head", command=("p", "a b", "$x"), env={"A": "it's"}, log="/l")
    assert make_script(submission).splitlines()[1:] == [
        "unset TRUELINE_LIFELINE", "export A='it'\"'\"'s'", "exec p 'a b' '$x'",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "state", "reason"),
    [
        ("PENDING|Priority|", QUEUED, "it waits behind jobs of a higher priority (Priority)"),
        ("PENDING|None|", QUEUED, "Slurm has not looked at it yet"),
        ("PENDING|QOSMaxCpuPerUserLimit|", QUEUED, "it waits (QOSMaxCpuPerUserLimit)"),
        ("PENDING|ReqNodeNotAvail, UnavailableNodes:n[1-2]|", QUEUED,
         "the nodes that it could have are down or reserved (ReqNodeNotAvail, UnavailableNodes:n[1-2])"),
        ("RUNNING|None|n1", RUNNING, ""),
        ("COMPLETING|None|n1", RUNNING, ""),
        ("COMPLETED|None|n1", ENDED, "exit code 0"),
        ("NODE_FAIL|NodeDown|n1", ENDED, "its node failed: NodeDown"),
        ("FAILED|NonZeroExitCode|n1", ENDED, "it failed: NonZeroExitCode"),
        ("OUT_OF_MEMORY|OutOfMemory|n1", ENDED, "it took more memory than it asked for: OutOfMemory"),
    ],
)  # fmt: skip
def test_states_and_reasons_of_slurm_become_words(line, state, reason):
    (found,) = parse_queue(f"7|a-1.1.head|{line}\n8|b-1.1.head|PENDING|None|\n", "a-1.1")
    assert (found.state, found.reason) == (state, reason)


def test_without_slurm_the_lack_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineAway, match="there is no squeue in PATH"):
        SlurmScheduler(SlurmSettings()).list("a-1.1")


def test_a_node_that_dies_leaves_a_process_that_no_one_restarts(scheduled, slurm):
    name = scheduled.submit("head", f"echo $$ > {scheduled.folder}/pid; {POLITE}")
    scheduled.wait_ready(name)
    slurm.kill_daemon("n1")
    os.kill(int((scheduled.folder / "pid").read_text()), signal.SIGKILL)
    slurm.start_node("n1")
    scheduled.wait(name, ENDED)
    assert scheduled.scheduler.read_log(name).count(b"ready") == 1
