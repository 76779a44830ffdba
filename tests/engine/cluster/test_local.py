"""The scheduler of one machine, and its queue."""

import os
import signal

import pytest

from conformance.scheduler import *  # noqa: F403 - the shared suite
from conformance.scheduler import ENDED, POLITE, QUEUED, RUNNING, Scheduled
from conformance.scheduler_logs import *  # noqa: F403
from conformance.scheduler_queue import *  # noqa: F403
from trueline.engine.cluster.contract import make_name
from trueline.engine.cluster.local import KeptProcess, LocalScheduler, SubmissionFolder
from trueline.engine.cluster.settings import LocalSettings
from trueline.errors import UsageError
from worlds.waiting import until

pytestmark = pytest.mark.slow
CAPACITY = 2


@pytest.fixture
def other_client(tmp_path):
    return LocalScheduler(LocalSettings(capacity=CAPACITY), tmp_path / "engine")


@pytest.fixture
def scheduled(tmp_path, other_client):
    world = Scheduled(
        LocalScheduler(LocalSettings(capacity=CAPACITY), tmp_path / "engine"), tmp_path, waits_for="2", gangs=True
    )
    yield world
    folder = SubmissionFolder(tmp_path / "engine")
    for name in folder.names():
        world.scheduler.cancel(name, grace=False)
        world.wait(name, ENDED)


def test_what_needs_more_slots_than_the_machine_has_is_refused(scheduled):
    with pytest.raises(UsageError, match=r"suite-1\.1 needs 3 slots to begin, and this machine has 2"):
        scheduled.submit("head", "true", gang=3)
    assert scheduled.scheduler.list("suite-1.1") == []


def test_heads_start_by_priority_and_each_with_room_for_its_whole_job(scheduled):
    first = scheduled.submit("head", POLITE, gang=2)
    scheduled.wait_ready(first)
    worlds = {priority: Scheduled(scheduled.scheduler, scheduled.folder, f"job-{priority}") for priority in (1, 5)}
    order = scheduled.folder / "order"
    names = [
        world.submit("head", f"echo {priority} >> {order}", gang=2, priority=priority)
        for priority, world in worlds.items()
    ]
    reason = until(lambda: "waits" in (why := scheduled.find(names[0]).reason) and why, "a reason")
    assert reason == "waits behind job-5.1 (priority 5)"
    host = scheduled.submit("host-1", POLITE)
    scheduled.wait_ready(host)  # its job has it reserved
    assert [scheduled.find(name).state for name in names] == [QUEUED, QUEUED]
    for name in (first, host):
        scheduled.scheduler.cancel(name)
    for name in names:
        scheduled.wait(name, ENDED)
    assert order.read_text().split() == ["5", "1"]


def test_a_keeper_that_is_killed_leaves_its_process_running_and_listed(scheduled):
    name = scheduled.submit("head", POLITE)
    scheduled.wait_ready(name)
    folder = SubmissionFolder(scheduled.folder / "engine")
    keeper = folder.read(name, "pid", KeptProcess)
    os.kill(keeper.pid, signal.SIGKILL)
    until(lambda: not keeper.alive, "the keeper's end")
    assert scheduled.find(name).state is RUNNING
    scheduled.scheduler.cancel(name)
    scheduled.wait_log(name, b"left")
    scheduled.wait(name, ENDED)


def test_a_submission_whose_client_died_before_it_started_is_given_up(scheduled, tmp_path):
    from trueline.engine.cluster.local import START_S, QueuedSubmission

    folder = SubmissionFolder(tmp_path / "engine")
    submission = scheduled.make("head", "true")
    folder.add(QueuedSubmission(submission=submission, submitted_at=100.0, capacity=2))
    name = make_name("suite-1", 1, "head")
    assert folder.report(name, 100.0 + START_S / 2).state is QUEUED
    assert folder.report(name, 100.0 + 2 * START_S).state is ENDED
