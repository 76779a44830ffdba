"""What every Scheduler promises of clients that come and go, and of room; `scheduler.py` has the fixtures."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from conformance.scheduler import ENDED, POLITE, QUEUED, RUNNING, Scheduled
from trueline.engine.cluster.contract import make_name
from worlds.waiting import until


@pytest.fixture
def slots(scheduled) -> int:
    """Slots that fill the scheduler: nothing else has room beside them."""
    if not scheduled.waits_for:
        pytest.skip("this engine takes any number of slots")
    return int(scheduled.waits_for)


def test_two_clients_that_submit_the_same_at_once_start_one_process(scheduled, other_client):
    submission = scheduled.make("head", POLITE)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(one.submit, submission) for one in (scheduled.scheduler, other_client) * 2]:
            done.result()
    scheduled.wait_ready(submission.name)
    assert len(scheduled.scheduler.list(f"{scheduled.job}.1")) == 1
    scheduled.scheduler.cancel(submission.name, grace=False)
    scheduled.wait(submission.name, ENDED)
    assert scheduled.scheduler.read_log(submission.name).count(b"ready") == 1


def test_a_client_that_is_killed_after_it_has_submitted_takes_nothing_along(scheduled, other_client):
    pid = os.fork()
    if not pid:
        try:
            scheduled.submit("head", POLITE)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    name = make_name(scheduled.job, scheduled.launch, "head")
    until(lambda: b"ready" in other_client.read_log(name), "its output")
    scheduled.wait_ready(name)
    other_client.cancel(name, grace=False)
    scheduled.wait(name, ENDED)


def test_a_new_leader_that_submits_again_what_runs_or_has_ended_starts_nothing(scheduled, other_client):
    running, ended = scheduled.make("head", POLITE), scheduled.make("host-1", "echo ready")
    for one in (running, ended):
        scheduled.scheduler.submit(one)
    scheduled.wait_ready(running.name)
    scheduled.wait(ended.name, ENDED)
    for one in (running, ended):
        other_client.submit(one)
    found = {one.name: one.state for one in other_client.list(f"{scheduled.job}.1")}
    assert found == {running.name: RUNNING, ended.name: ENDED}
    for name in found:
        assert scheduled.scheduler.read_log(name).count(b"ready") == 1


def test_a_new_leader_lists_all_processes_of_its_launch_with_their_states(scheduled, other_client):
    names = {role: scheduled.submit(role, "true" if role == "host-2" else POLITE)
             for role in ("head", "host-1", "host-2")}  # fmt: skip
    scheduled.wait_ready(names["head"])
    until(lambda: scheduled.find(names["host-1"]).state is not ENDED, "host-1 is there")
    listed = {one.name: one for one in other_client.list(f"{scheduled.job}.1")}
    assert {*listed} == {*names.values()}
    assert listed[names["head"]].state is RUNNING
    for name in names.values():
        scheduled.scheduler.cancel(name, grace=False)
    for name in names.values():
        scheduled.wait(name, ENDED)


def test_two_processes_run_side_by_side_where_there_is_room_for_both(scheduled):
    names = [scheduled.submit(role, POLITE) for role in ("head", "host-1")]
    for name in names:
        scheduled.wait_ready(name)
    assert [scheduled.find(name).state for name in names] == [RUNNING, RUNNING]


def test_more_processes_than_there_is_room_for_all_get_their_turn(scheduled):
    names = [scheduled.submit("head" if not number else f"host-{number}", f"echo {number}") for number in range(6)]
    for number, name in enumerate(names):
        scheduled.wait(name, ENDED)
        assert scheduled.scheduler.read_log(name) == b"%d\n" % number


def test_another_client_finds_what_waits_and_withdraws_it(scheduled, other_client, slots):
    first = scheduled.submit("head", POLITE, slots=slots)
    scheduled.wait_ready(first)
    second = scheduled.submit("host-1", "echo began", slots=slots)

    def find():
        found = {one.name: one for one in other_client.list(f"{scheduled.job}.1")}.get(second)
        return found if found is not None and found.reason else None

    assert until(find, "a reason").state is QUEUED
    assert other_client.read_log(second) == b""
    other_client.cancel(second)
    until(lambda: (one := scheduled.find(second)) is None or one.state is ENDED, "the end of what waited")


def test_what_was_withdrawn_never_starts(scheduled, slots):
    first = scheduled.submit("head", POLITE, slots=slots)
    scheduled.wait_ready(first)
    second = scheduled.submit("host-1", "echo began", slots=slots)
    scheduled.scheduler.cancel(second, grace=False)
    scheduled.scheduler.cancel(first, grace=False)
    scheduled.wait(first, ENDED)
    third = scheduled.submit("host-2", "echo began", slots=slots)
    scheduled.wait(third, ENDED)
    assert scheduled.scheduler.read_log(second) == b""
    assert (one := scheduled.find(second)) is None or one.state is ENDED


@pytest.mark.parametrize("how", ["it is killed", "it fails"])
def test_room_is_free_again_however_a_process_ended(how, scheduled, slots):
    mark = f"{scheduled.folder}/first"
    first = scheduled.submit("head", f": {mark}; echo ready; until test -e {mark}; do sleep 0.05; done; exit 7",
                             slots=slots)  # fmt: skip
    scheduled.wait_ready(first)
    second = scheduled.submit("host-1", "echo began", slots=slots)
    assert scheduled.find(second).state is QUEUED
    if how == "it is killed":
        scheduled.kill(mark)
    else:
        (scheduled.folder / "first").touch()
    scheduled.wait(second, ENDED)
    assert scheduled.scheduler.read_log(second) == b"began\n"


def test_of_two_jobs_that_each_need_all_slots_one_has_them_all_and_then_the_other(scheduled, slots):
    if not scheduled.gangs:
        pytest.skip(
            "the engine's own queue starts a job's processes one by one: a launch that cannot begin queues again"
        )
    other = Scheduled(scheduled.scheduler, scheduled.folder, f"{scheduled.job}-other")
    first = scheduled.submit("head", POLITE, gang=slots)
    scheduled.wait_ready(first)
    second = other.submit("head", "echo began", gang=slots)
    assert until(lambda: (one := other.find(second)).reason and one, "a reason").state is QUEUED
    host = scheduled.submit("host-1", POLITE)
    scheduled.wait_ready(host)  # its job has it reserved
    assert other.find(second).state is QUEUED
    for name in (first, host):
        scheduled.scheduler.cancel(name)
    other.wait(second, ENDED)
    assert other.scheduler.read_log(second) == b"began\n"
