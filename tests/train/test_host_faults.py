"""What can be wrong between hosts is told in words, by name, and costs the running job nothing."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from trueline.engine.hosts.token import DAYS, TokenFile, issue_token, read_token, write_token
from worlds.joined_hosts import TRUELINE, Machines, children
from worlds.networks import find_lack, open_machines
from worlds.waiting import until

pytestmark = pytest.mark.jobs
PATIENT = ("--cores", "1", "--lease", "60")
"""On a busy machine nobody is given up who lives."""


@pytest.fixture
def world(tmp_path):
    if lack := find_lack():
        pytest.skip(f"three machines need network namespaces: {lack}")
    (tmp_path / "a").mkdir()
    with open_machines(3, hidden_from_others=(tmp_path / "a",)) as opened:
        made = Machines(tmp_path, opened)
        yield made
        made.close()


def refused(world: Machines, **given) -> str:
    """The error of a host that may not join."""
    log = world.path / f"join-{given.get('name', 'b')}.log"
    log.unlink(missing_ok=True)
    process = world.join(**given)
    assert process.wait(100) != 0, world.logs()
    (said,) = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    return said


def fill(disk: Path) -> Path:
    """A file that takes what is left of a file system."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


def test_hosts_that_may_not_join_are_told_why_and_the_job_goes_on(world):
    world.train("--workers", "1:3", *PATIENT)
    world.wait_workers(1)
    right = read_token(world.job.hosts / "token")
    secret, mine = world.job.read_secret(), world.path / "token-mine"

    write_token(mine, TokenFile(job="job", token=issue_token("another", now=time.time()), ca=right.ca))
    assert "the token is wrong: it is of another job, or of an earlier start" in refused(world, token=mine)
    expired = issue_token(secret, now=time.time() - DAYS * 86400 - 60)
    write_token(mine, TokenFile(job="job", token=expired, ca=right.ca))
    assert "the token expired " in refused(world, token=mine)
    mine.write_text("{}")
    assert "token-mine is no token file" in refused(world, token=mine)

    other = world.path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import trueline.version\ntrueline.version.__version__ = '0.0.1'\n")
    paths = os.pathsep.join(filter(None, [str(other), os.environ.get("PYTHONPATH")]))
    assert "the host has trueline 0.0.1, and the job runs on trueline " in refused(world, PYTHONPATH=paths)
    assert "host.refused" in [name for name, _, _ in world.events()]

    world.machines["c"].hidden += (world.store,)
    assert f"this host does not see the folder of the job's checkpoints, {world.store}" in refused(world, name="c")

    taken = subprocess.run(
        ["ip", "netns", "exec", world.leader.name, TRUELINE, "resume", str(world.job.path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert taken.returncode != 0
    assert f"the job in {world.job.path} is running" in taken.stderr

    world.join()  # as it should
    world.wait_workers(2)
    assert [name for name, _, _ in world.events() if name in ("worker.lost", "host.lost", "step.failed")] == []
    world.halt()
    assert world.count()[1:] == (0, 0)


def test_a_firewall_between_two_workers_is_named_with_host_and_port_and_the_others_train_on(world):
    """Until the host is tried again."""
    world.train("--workers", "1:3", *PATIENT)
    world.wait_workers(1)
    world.join(name="b")
    before = world.wait_workers(2)
    world.machines["b"].refuse_from(world.machines["c"].address, "1024:65535")
    at = time.time()
    world.join(name="c")
    avoided, when = world.wait("host.avoided", after=before, host="c")
    port = r"10\.77\.0\.2:\d+"  # as one or the other end tells
    assert re.search(rf"10\.77\.0\.3 cannot reach {port}|worker-2\.\d+ did not connect to {port}", avoided["why"])
    assert "c gets no workers for 30 s: worker-2.0: no group forms with it" in (world.path / "train.log").read_text()
    world.wait_workers(2, after=when)
    world.machines["b"].heal()
    world.wait_workers(3, after=when)  # it is tried again
    print(json.dumps({"told_s": when - at, "why": avoided["why"]}))
    world.halt()
    assert world.count()[1:] == (0, 0)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this kernel has no IPv6")
def test_hosts_meet_by_name_over_ipv6_through_a_firewall_that_takes_only_the_given_ports(world):
    names = world.path / "names"
    names.write_text("127.0.0.1 localhost\n" + "".join(
        f"{world.machines[name].address6} host-{name}\n" for name in "abc"
    ))  # fmt: skip
    for machine in world.machines.values():
        machine.replaced["/etc/hosts"] = names
        machine.take_only(range(7700, 7701), range(7800, 7824))
    world.address = "host-a"
    world.train("--workers", "1:3", "--ports", "7800-7823", "--cores", "1", "--lease", "10")
    world.wait_workers(1)
    joined = world.join("--ports", "7800-7823", cores=1, name="b")
    world.wait_workers(2)
    world.join("--ports", "7800-7823", cores=1, name="c")
    full = world.wait_workers(3)
    assert {event["address"] for name, event, _ in world.events() if name == "host.joined"} == {"fd77::2", "fd77::3"}
    world.kill(world.launcher)
    world.move_to("b", joined)
    world.wait_workers(2, after=full)  # C has found the master on B, through the firewall
    os.kill(joined.pid, signal.SIGINT)
    assert joined.wait(100) == 0, world.logs()
    assert world.count()[1:] == (0, 0)


def test_a_host_with_memory_for_one_worker_gets_one_and_is_named(world):
    world.train("--workers", "1:4", *PATIENT)
    world.wait_workers(1)
    until(lambda: any(name == "workers.measured" for name, _, _ in world.events()), world.logs)
    takes = max(json.loads(world.wait("workers.measured")[0]["memory"]).values())
    small = world.path / "meminfo"
    small.write_text(f"MemTotal: {2 * takes // 1024} kB\nMemAvailable: {int(1.6 * takes) // 1024} kB\n")
    world.machines["b"].replaced["/proc/meminfo"] = small
    world.join(cores=3)
    short = world.wait("host.short", host="b")[0]
    assert (short["places"], short["cores"]) == (1, 3)
    world.wait_workers(2)
    assert "b gets 1 worker on its 3 cores: it has " in (world.path / "train.log").read_text()
    world.halt()
    assert world.count()[1:] == (0, 0)


def test_a_store_that_is_full_for_a_while_is_a_pause_for_checkpoints_and_groups_and_loses_nothing(world):
    world.store.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(world.store)], check=True)
    try:
        world.train("--workers", "1:2", *PATIENT, "--checkpoint-every", "50")
        world.wait_workers(1)
        world.join()
        world.wait_workers(2)
        world.wait("checkpoint.saved")
        at, filler = time.time(), fill(world.store)
        full = world.wait("disk.full", after=at)
        assert full[0]["what"] == "checkpoint"
        os.kill(world.wait("worker.running", host="b")[0]["pid"], signal.SIGKILL)
        away = world.wait("store.away", after=at)
        assert "no room left to write" in away[0]["why"]
        filler.unlink()
        world.wait("store.back", after=at)
        world.wait("disk.has_room", after=at)
        world.wait_workers(2, after=world.wait("step.applied", after=away[1])[1])
        world.halt()
        assert world.count()[1:] == (0, 0)
    finally:
        world.close()
        subprocess.run(["umount", "-l", str(world.store)], check=False)


def test_clocks_that_are_an_hour_off_and_jump_are_told_and_no_worker_is_lost_also_when_such_a_host_leads(world):
    clock = world.give_clock("b")
    clock.jump(3600)
    world.train("--workers", "1:3", "--cores", "1", "--lease", "10")
    world.wait_workers(1)
    joined = world.join()
    full = world.wait_workers(2)
    told, when = world.wait("host.clock", host="b")
    assert told["off"] == "1 h 0 min ahead"
    clock.jump(-3600)
    told, when = world.wait("host.clock", after=when, host="b")
    assert told["off"] == "1 h 0 min behind"
    world.wait("step.applied", after=when)
    assert "the clock of this host is 1 h 0 min behind" in (world.path / "join-b.log").read_text()
    assert "the clock of b is 1 h 0 min behind" in (world.path / "train.log").read_text()
    assert [name for name, _, at in world.events() if name in ("worker.lost", "host.lost") and at > full] == []

    world.kill(world.launcher)
    before = world.steps()
    world.move_to("b", joined)
    until(lambda: max(world.steps(), default=0) > before[-1], world.logs)
    world.join(name="c")  # with a token that B issues, by its own clock
    world.wait("host.joined", host="c")
    joins = next(number for number, (name, event, _) in enumerate(world.events()) if event.get("host") == "c")
    until(lambda: any(event.get("workers") == 2 for _, event, _ in world.events()[joins:]), world.logs)
    assert world.wait("host.clock", host="c")[0]["off"] == "1 h 0 min ahead"
    os.kill(joined.pid, signal.SIGINT)
    assert joined.wait(100) == 0, world.logs()
    applied, lost, repeated = world.count()
    assert applied > before[-1]
    assert (lost, repeated) == (0, 0)


def test_a_host_that_stands_still_is_given_up_and_lends_its_cores_again_once_it_goes_on(world):
    world.train("--workers", "1:2", "--cores", "1", "--lease", "10")
    world.wait_workers(1)
    joined = world.join()
    at = world.wait_workers(2)
    still = [joined, *children(joined.pid)]
    for process in still:
        os.kill(process.pid, signal.SIGSTOP)
    world.wait("host.lost", after=at, host="b")
    again = world.wait_workers(1, after=at)
    for process in still:
        os.kill(process.pid, signal.SIGCONT)
    world.wait("host.joined", after=again, host="b")
    world.wait_workers(2, after=again)
    world.halt()
    assert world.count()[1:] == (0, 0)
