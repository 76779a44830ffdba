"""The fleet places processes where there is room, and tells what became of those of a host that is gone."""

import asyncio
import json
import os

import pytest

from trueline.engine.contract import Kind, ProcessSpec, Seen
from trueline.engine.hosts.fleet import AVOID_S, AWAY_S, KEEPERS, TICK_S, FleetEngine
from trueline.engine.hosts.messages import AddOrder, CoresOffer, Dismissal, EventLines, Greeting, KillOrder
from worlds.hosts import NoLocalEngine


class RecordingLocal(NoLocalEngine):
    def __init__(self):
        self.started = []

    async def add(self, specs):
        self.started += [spec.ref for spec in specs]


class FleetWorld:
    """A fleet whose clock moves by hand."""

    def __init__(self, tmp_path, *, cores=1):
        self.now, self.events, self.rooms, self.left = 100.0, [], [], []
        self.local, self.file, self.cores = RecordingLocal(), tmp_path / "hosts.json", cores
        self.fleet = self.make()

    def make(self):
        fleet = FleetEngine(
            self.local, cores=self.cores, file=self.file, lease_s=3.0, now=lambda: self.now,
            emit=lambda name, **fields: self.events.append((name, fields)),
        )  # fmt: skip
        fleet.on_room, fleet.on_leave = self.rooms.append, self.left.extend
        return fleet

    def join(self, id="b", *, cores=2, name="host-b", running=(), memory=0):
        host = self.fleet.connect(Greeting(id=id, name=name, address="10.0.0.2", versions={}))
        self.fleet.accept_offer(host, CoresOffer(cores=cores, running=tuple(running), memory=memory))
        return host

    def pass_time(self, seconds):
        """In ticks: a longer one would mean that this process was stopped."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.fleet.give_up_silent()


@pytest.fixture
def world(tmp_path):
    return FleetWorld(tmp_path)


def specs(*slots):
    return [ProcessSpec(role="worker", slot=slot, incarnation=0, entry="a:b", log="x") for slot in slots]


def orders_of(host):
    return [host.orders.get_nowait() for _ in range(host.orders.qsize())]


def run(work):
    return asyncio.run(work)


def states(fleet):
    return {seen.ref: (seen.kind, seen.host) for seen in run(fleet.list())}


def test_processes_go_where_there_is_most_room_and_wait_where_there_is_none(world):
    host = world.join()
    run(world.fleet.add(specs(0, 1, 2, 3)))
    assert world.local.started == ["worker-1.0"]
    assert [order.spec.ref for order in orders_of(host)] == ["worker-0.0", "worker-2.0"]
    assert "worker-3.0" not in states(world.fleet)
    other = world.join("c", name="host-c")
    run(world.fleet.add([]))
    assert [order.spec.ref for order in orders_of(other)] == ["worker-3.0"]


def test_which_host_has_what_is_known_to_the_next_master_and_no_disk_is_waited_for(world, monkeypatch):
    def refuse(_):
        raise AssertionError("a worker's death is told once the file is written")

    monkeypatch.setattr(os, "fsync", refuse)
    host = world.join()
    run(world.fleet.add(specs(0, 1, 2)))
    world.fleet.report(host, Seen(ref="worker-0.0", kind=Kind.EXITED, pid=7))
    assert world.make().hosts["b"].alive == ["worker-2.0"]


def test_each_change_of_the_hosts_changes_the_capacity(world):
    host = world.join(cores=4)
    assert run(world.fleet.capacity()) == 5
    world.fleet.withdraw(host)
    assert world.rooms == [5, 1]


def test_a_host_that_is_silent_for_longer_than_the_lease_is_given_up_with_its_processes(world):
    world.join()
    run(world.fleet.add(specs(0, 1)))
    world.pass_time(2.75)
    assert "host.lost" not in dict(world.events)
    world.pass_time(0.75)
    assert dict(world.events)["host.lost"]["workers"] == 1
    assert states(world.fleet)["worker-0.0"] == (Kind.LOST, "host-b")
    assert world.rooms[-1] == 1


def test_a_host_whose_connection_ended_is_given_up_sooner_and_one_that_comes_back_in_time_is_not(world):
    host = world.join()
    run(world.fleet.add(specs(0)))
    world.fleet.disconnect(host, host.orders)
    world.pass_time(AWAY_S - TICK_S)
    again = world.join(running=[Seen(ref="worker-0.0", kind=Kind.STARTED, pid=7)])
    assert again is host
    world.pass_time(AWAY_S)
    assert states(world.fleet)["worker-0.0"][0] is Kind.STARTED
    world.fleet.disconnect(host, host.orders)
    world.pass_time(AWAY_S + TICK_S)
    assert states(world.fleet)["worker-0.0"][0] is Kind.LOST


def test_a_host_that_still_prepares_is_not_given_up(world):
    host = world.fleet.connect(Greeting(id="b", name="host-b", address="10.0.0.2", versions={}))
    world.pass_time(60.0)
    assert world.fleet.hosts["b"] is host
    world.fleet.disconnect(host, host.orders)
    assert not world.fleet.hosts
    assert not world.events


def test_a_master_that_was_stopped_itself_gives_up_no_host(world):
    world.join()
    run(world.fleet.add(specs(0)))
    world.now += 60.0
    world.fleet.give_up_silent()
    assert states(world.fleet)["worker-0.0"][0] is Kind.STARTED


def test_what_was_given_up_is_killed_when_its_host_comes_back(world):
    host = world.join()
    run(world.fleet.add(specs(0)))
    world.fleet.lose(host, "a test")
    again = world.join(running=[Seen(ref="worker-0.0", kind=Kind.STARTED, pid=7)])
    assert [order for order in orders_of(again) if isinstance(order, KillOrder)] == [KillOrder("worker-0.0")]
    assert states(world.fleet)["worker-0.0"] == (Kind.LOST, "host-b")


def test_an_order_that_was_lost_with_the_connection_is_repeated(world):
    host = world.join()
    run(world.fleet.add(specs(0)))
    world.fleet.disconnect(host, host.orders)
    again = world.join()
    assert [order.spec.ref for order in orders_of(again) if isinstance(order, AddOrder)] == ["worker-0.0"]


def test_a_kill_that_was_ordered_while_the_host_was_away_is_carried_out_when_it_returns(world):
    host = world.join()
    run(world.fleet.add(specs(0)))
    world.fleet.disconnect(host, host.orders)
    run(world.fleet.kill("worker-0.0", grace_s=1.0))
    again = world.join(running=[Seen(ref="worker-0.0", kind=Kind.STARTED, pid=7)])
    assert KillOrder("worker-0.0", 1.0) in orders_of(again)


def test_the_next_master_waits_for_the_hosts_of_the_one_before(world):
    world.join()
    run(world.fleet.add(specs(0)))
    world.fleet = world.make()
    assert run(world.fleet.capacity()) == 3
    assert states(world.fleet)["worker-0.0"] == (Kind.STARTED, "host-b")
    world.join(running=[Seen(ref="worker-0.0", kind=Kind.STARTED, pid=7)])
    world.pass_time(1.0)
    assert states(world.fleet)["worker-0.0"][0] is Kind.STARTED


def test_a_process_that_the_returning_host_does_not_know_is_lost(world):
    world.join()
    run(world.fleet.add(specs(0)))
    world.fleet = world.make()
    world.join()
    assert states(world.fleet)["worker-0.0"][0] is Kind.LOST


def test_a_host_that_takes_its_cores_back_is_sent_away_after_its_last_process(world):
    host = world.join()
    run(world.fleet.add(specs(0)))
    world.fleet.withdraw(host)
    assert world.left == ["worker-0.0"]
    assert not [order for order in orders_of(host) if isinstance(order, Dismissal)]
    run(world.fleet.add(specs(1, 2)))
    assert world.local.started == ["worker-1.0"]
    world.fleet.report(host, Seen(ref="worker-0.0", kind=Kind.EXITED, code=0))
    assert [type(order) for order in orders_of(host)] == [Dismissal]


def test_hosts_of_one_name_are_told_apart(world):
    assert [world.join(id).name for id in ("b", "c", "d")] == ["host-b", "host-b-2", "host-b-3"]
    assert [known["name"] for known in json.loads(world.file.read_text())] == ["host-b", "host-b-2", "host-b-3"]


def test_only_the_newest_connection_of_a_host_counts(world):
    host = world.join()
    half_open = host.orders
    world.join()
    assert orders_of(type("Old", (), {"orders": half_open}))[-1] is None
    world.fleet.disconnect(host, half_open)
    assert host.orders is not None


def test_a_host_with_too_little_memory_gets_as_many_processes_as_fit_and_is_named(world):
    host = world.join(cores=4, memory=5_000_000_000)
    run(world.fleet.add(specs(0, 1, 2, 3)))
    assert len(host.alive) == 3
    world.fleet.process_bytes = lambda: 2_000_000_000
    world.fleet.measure()
    short = dict(world.events)["host.short"]
    assert short == {"host": "host-b", "has": "5.0 GB", "takes": "2.0 GB", "places": 2, "cores": 4}
    assert world.rooms[-1] == 3, "what runs goes on, and nothing new starts there"
    late = world.join("c", name="host-c", cores=4, memory=1_000_000_000)
    run(world.fleet.add(specs(4, 5)))
    assert not orders_of(late)
    assert [fields["host"] for name, fields in world.events if name == "host.short"] == ["host-b", "host-c"]


def test_the_next_master_knows_the_memory_of_the_hosts(world):
    world.join(cores=4, memory=5_000_000_000)
    later = world.make()
    later.process_bytes = lambda: 2_000_000_000
    later.measure()
    assert run(later.capacity()) == 3


def test_a_host_that_others_cannot_reach_gets_nothing_for_a_while_and_for_longer_the_next_time(world):
    host = world.join(cores=3)
    run(world.fleet.add(specs(0, 1, 2)))  # one here, two there
    there = host.alive
    for pause_s in (AVOID_S, 2 * AVOID_S):
        world.fleet.avoid(there[0], "no group forms with it")
        assert world.events[-1] == (
            "host.avoided", {"host": "host-b", "retry_s": pause_s, "why": f"{there[0]}: no group forms with it"},
        )  # fmt: skip
        assert world.rooms[-1] == 2, "what else runs there may go on"
        assert (world.fleet.describe()[1]["state"], host.room) == ("avoided", 0)
        world.now += pause_s - TICK_S
        world.fleet.retry_avoided()
        assert host.avoided
        world.now += TICK_S
        world.fleet.retry_avoided()
        assert (world.rooms[-1], host.room, host.avoided) == (4, 1, False)


def test_this_machine_may_be_avoided_and_for_a_process_that_is_gone_the_room_stays(world):
    run(world.fleet.add(specs(0)))
    world.fleet.avoid("worker-7.7", "x")
    assert (world.events, world.rooms) == ([], [1])
    world.fleet.avoid("worker-0.0", "x")
    assert (world.fleet.describe()[0]["state"], world.rooms[-1]) == ("avoided", 0)
    world.now += AVOID_S
    world.fleet.retry_avoided()
    assert world.rooms[-1] == 1


def test_the_first_hosts_in_line_get_the_history_once_and_then_each_event_and_again_after_a_reconnection(world):
    world.fleet.history = lambda: iter([EventLines(b"old\n", begins=True)])
    hosts = [world.join(id=str(n), name=f"host-{n}") for n in range(KEEPERS + 1)]
    for host in hosts:
        host.standby = "10.0.0.2:7700"
        orders_of(host)
    for _ in range(2):
        world.fleet.share_history()
    world.fleet.copy_events(EventLines(b"new\n"))
    expected = [EventLines(b"old\n", begins=True), EventLines(b"new\n")]
    assert [orders_of(host) for host in hosts] == [expected] * KEEPERS + [[]]
    again = world.join(id="0", name="host-0")
    again.standby = "10.0.0.2:7700"
    orders_of(again)
    world.fleet.share_history()
    assert orders_of(again) == expected[:1]
