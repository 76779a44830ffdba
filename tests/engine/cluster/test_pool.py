"""The scheduler of hosts that lend their cores to the jobs of a store."""

import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from conformance.scheduler import *  # noqa: F403 - the shared suite
from conformance.scheduler import ENDED, POLITE, QUEUED, RUNNING, Scheduled
from conformance.scheduler_logs import *  # noqa: F403
from conformance.scheduler_queue import *  # noqa: F403
from trueline import events
from trueline.engine.cluster.contract import Submission
from trueline.engine.cluster.pool import PoolScheduler
from trueline.engine.cluster.pool_records import KEPT_S, LEASE_S, PoolTurn
from trueline.engine.cluster.settings import HostsSettings
from worlds.pools import Pool
from worlds.waiting import until

pytestmark = pytest.mark.slow
CORES = 2


def lend(store, *, name="a", cores=CORES):
    """A host, as `trueline join STORE` is one."""
    command = [sys.executable, "-m", "trueline", "join", str(store), "--cores", str(cores), "--name", name]
    with store.with_name(f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def other_client(store):
    return PoolScheduler(HostsSettings(pool=str(store)))


@pytest.fixture
def host(store):
    process = lend(store)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def scheduled(store, tmp_path, host):
    return Scheduled(PoolScheduler(HostsSettings(pool=str(store))), tmp_path, waits_for="2", gangs=True)


@pytest.fixture
def pool(store, tmp_path):
    made = Pool(store, tmp_path)
    yield made
    made.close()


def test_what_waits_for_hosts_says_how_to_lend_some(pool):
    name = pool.submit("a-1", "head", gang=3)
    assert pool.report(name).reason == f"no host lends its cores to {pool.store}: `trueline join {pool.store}` there"
    pool.lend("one", 2)
    assert pool.report(name).reason == (
        f"needs 3 slots to begin, and the hosts of {pool.store} have 2: `trueline join` on more"
    )
    pool.lend("two", 1)
    pool.step()
    assert pool.report(name).state is RUNNING


def test_a_job_begins_where_several_hosts_together_have_room_and_its_hosts_get_what_is_reserved(pool):
    pool.lend("one", 2)
    pool.lend("two", 2)
    first = pool.submit("a-1", "head", gang=3)
    pool.step()
    second = pool.submit("b-1", "head", gang=2)
    pool.step()
    assert (pool.report(first).state, pool.report(second).state) == (RUNNING, QUEUED)
    assert pool.report(second).reason == "waits for 2 free slots: 1 of 4 are free, a-1.1 has the others"
    hosts = [pool.submit("a-1", f"host-{number}") for number in (1, 2, 3)]
    pool.step()
    assert [pool.report(name).state for name in hosts] == [RUNNING, RUNNING, QUEUED], "what a head waits for stays free"
    assert pool.report(hosts[2]).reason == "waits behind b-1.1 (priority 0)"


def test_a_process_that_needs_more_cores_than_a_host_has_free_waits_for_one_that_has(pool):
    pool.lend("one", 2)
    pool.lend("two", 2)
    for job in ("a-1", "b-1"):
        pool.submit(job, "head")
    pool.step("one")
    wide = pool.submit("c-1", "head", slots=2)
    pool.step("one")
    assert pool.running("one") == ["a-1.1.head", "b-1.1.head"]
    assert pool.report(wide).state is QUEUED
    pool.step("two")
    assert pool.running("two") == [wide]


def test_a_host_takes_no_more_than_its_memory_holds(pool):
    pool.lend("one", 4, memory_mb=1000)
    first, second = (pool.submit(f"{job}-1", "head", memory_mb=600) for job in "ab")
    pool.step()
    assert (pool.report(first).state, pool.report(second).state) == (RUNNING, QUEUED)
    assert pool.report(second).reason == "waits for a host with 1 free slots and 600 MB"


def test_what_a_silent_host_runs_is_given_up_and_stays_so_when_the_host_comes_back(pool):
    pool.lend("one", 1)
    pool.lend("two", 1)
    name = pool.submit("a-1", "head")
    pool.step("one")
    assert pool.running("one") == [name]
    pool.pass_lease("two")
    found = pool.report(name)
    assert (found.state, found.reason) == (ENDED, "its host one has been silent for 5 s")
    process = pool.lenders["one"].running[name].process
    pool.step("one")
    assert process.wait(60) == -signal.SIGKILL, "another one may train in its place"
    pool.step("one")
    assert (pool.running("one"), pool.report(name)) == ([], found)


def test_a_client_alone_finds_out_that_all_hosts_are_dead(pool):
    pool.lend("one", 1)
    name = pool.submit("a-1", "head")
    pool.step()
    assert pool.report(name).state is RUNNING
    for _ in range(6):
        pool.clock.s += 1
        assert pool.report(name).state is RUNNING or pool.clock.s > 100 + LEASE_S
    assert pool.report(name).reason == "its host one has been silent for 5 s"


def test_a_host_that_was_stopped_itself_does_not_give_up_the_others_for_that(pool):
    pool.lend("one", 1)
    pool.lend("two", 1)
    name = pool.submit("a-1", "head")
    pool.step("one", "two")
    pool.clock.s += 10 * LEASE_S  # the machine slept, and the other one comes back a moment later
    pool.step("two")
    assert pool.report(name).state is RUNNING
    pool.step("one", "two")
    assert pool.report(name).state is RUNNING


def test_a_host_whose_clock_is_an_hour_off_is_watched_for_a_lease_before_it_is_given_up(pool, monkeypatch):
    pool.lend("one", 1)
    name = pool.submit("a-1", "head")
    pool.step()
    watched, living = [], ["one"]

    def pass_time(seconds):
        watched.append(seconds)
        pool.clock.s += 1.5
        pool.step(*living)

    hour = time.time() + 3600
    monkeypatch.setattr("trueline.engine.cluster.pool.time", SimpleNamespace(
        time=lambda: hour, monotonic=pool.clock, sleep=pass_time,
    ))  # fmt: skip
    for state in (RUNNING, ENDED):
        pool.client = PoolScheduler(HostsSettings(pool=str(pool.store)))
        pool.client._view._now = pool.clock
        assert pool.report(name).state is state
        living[:] = ["none"]
        pool.lenders["none"] = SimpleNamespace(step=lambda: None, running={})
    assert len(watched) < 8


def test_a_submission_is_withdrawn_or_started_whichever_is_first(pool):
    pool.lend("one", 1)
    name = pool.submit("a-1", "head")
    late = PoolScheduler(HostsSettings(pool=str(pool.store)))
    late._view.look()  # it does not see the start
    pool.step()
    assert not late._view.take_turn(PoolTurn(name=name)), "one turn has one maker"
    late.cancel(name, grace=False)
    pool.step()
    assert pool.lenders["one"].running[name].process.wait(60) == -signal.SIGKILL

    other = pool.submit("b-1", "head")
    late.cancel(other)
    pool.step()
    assert (pool.running("one"), pool.report(other).reason) == ([], "cancelled while it waited")


def test_a_store_that_is_away_stops_nothing_that_runs(pool):
    pool.lend("one", 1)
    name = pool.submit("a-1", "head")
    pool.step()
    hidden = pool.store.with_name("hidden")
    said = []
    with events.listening(lambda event, fields: said.append(event)):
        pool.store.rename(hidden)
        pool.store.write_bytes(b"")  # the folder is a file: nothing can be written below it
        pool.clock.s += 2
        for _ in range(3):
            pool.step()
        assert pool.lenders["one"].running[name].process.poll() is None
        pool.store.unlink()
        hidden.rename(pool.store)
        pool.step()
    assert said == ["lender.away", "lender.back"]
    assert pool.report(name).state is RUNNING


def test_variables_that_the_settings_name_travel_with_what_is_submitted(pool, monkeypatch):
    monkeypatch.setenv("GATE", "open")
    pool.client = PoolScheduler(HostsSettings(pool=str(pool.store), env=("GATE", "NOT_SET")))
    name = pool.submit("a-1", "head", "echo $GATE$NOT_SET.")
    monkeypatch.delenv("GATE")
    pool.lend("one", 1)
    pool.lenders["one"].running[name].process.wait()
    assert pool.client.read_log(name) == b"open.\n"


def test_a_command_that_does_not_exist_is_an_end_with_its_reason(pool):
    pool.lend("one", 1)
    submission = Submission(name="a-1.1.head", command=("no-such-program",), log=str(pool.folder / "log"))
    pool.client.submit(submission)
    pool.step()
    found = pool.report(submission.name)
    assert (found.state, found.code) == (ENDED, 127)
    assert "one cannot start it" in found.reason
    assert "no-such-program" in found.reason


def test_old_ends_and_dead_hosts_are_swept_and_turns_go_on_counting(pool):
    pool.lend("one", 1)
    pool.lend("dead", 1)
    for number in range(3):
        name = pool.submit(f"a-{number}", "head", "true")
        pool.step("one")
        pool.lenders["one"].running[name].process.wait()
        pool.step("one")
    view = pool.lenders["one"]._view
    pool.pass_lease("one")
    view.look()
    view.sweep(time.time() + 2 * KEPT_S)
    view.look()
    assert (view.submissions, view.ends, list(view.turns), len(view.hosts)) == ({}, {}, ["00000003"], 1)
    again = pool.submit("b-1", "head")
    pool.step("one")
    assert pool.running("one") == [again]
    assert max(view.turns) == "00000004"


def test_ctrl_c_lets_what_runs_end_and_a_host_that_leaves_takes_nothing_new(scheduled, host, store):
    name = scheduled.submit("head", POLITE)
    scheduled.wait_ready(name)
    host.send_signal(signal.SIGINT)
    assert scheduled.wait(name, ENDED).code == 3
    assert b"left" in scheduled.scheduler.read_log(name)
    assert host.wait() == 0
    assert b"its cores were taken back" in store.with_name("a.log").read_bytes()
    late = scheduled.submit("host-1", POLITE)
    assert "no host lends its cores" in scheduled.find(late).reason
    assert list((store / ".pool" / "hosts").iterdir()) == []


def test_what_a_killed_host_runs_dies_with_it_and_runs_on_another_one(scheduled, host, store):
    name = scheduled.submit("head", f": {store}; {POLITE}")
    scheduled.wait_ready(name)
    assert scheduled.find_shells(str(store))
    host.kill()
    host.wait()
    until(lambda: not scheduled.find_shells(str(store)), "the end of the process")
    second = lend(store, name="b")
    try:
        scheduled.wait(name, ENDED)
        assert scheduled.find(name).reason == "its host a has been silent for 5 s"
        again = scheduled.submit("host-1", "echo ready")
        scheduled.wait(again, ENDED)
        assert scheduled.find(again).node == "b"
    finally:
        second.kill()
        second.wait()
