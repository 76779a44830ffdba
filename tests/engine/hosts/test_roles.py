"""Processes of one role go wherever a host has room; all others stay with the master, and take no room."""

import asyncio

from trueline.engine.contract import Kind, ProcessSpec
from trueline.engine.hosts.fleet import FleetEngine
from trueline.engine.hosts.messages import AddOrder, CoresOffer, Greeting
from trueline.engine.hosts.roles import PinnedEngine, RoleEngine
from worlds.local_engines import ListingEngine


def specs(*refs):
    return [ProcessSpec(role=role, slot=slot, incarnation=0, entry="a:b", log="x") for role, slot in refs]


def make(tmp_path, *, cores):
    local = ListingEngine()
    fleet = FleetEngine(
        RoleEngine(local, lambda role: role == "worker"), cores=cores, file=tmp_path / "hosts.json", lease_s=3.0,
        now=lambda: 100.0, emit=lambda name, **fields: None,
    )  # fmt: skip
    return local, fleet, PinnedEngine(fleet, local, "worker")


def test_servers_start_here_whatever_room_there_is_and_workers_wait_for_a_host(tmp_path):
    local, fleet, engine = make(tmp_path, cores=0)
    host = fleet.connect(Greeting(id="b", name="host-b", address="10.0.0.2", versions={}))

    async def run():
        await engine.add(specs(("server", 0), ("worker", 0)))
        assert [one.ref for one in await engine.list()] == ["server-0.0"]
        fleet.accept_offer(host, CoresOffer(cores=1))
        await engine.add([])
        await fleet.add([])
        return [seen.ref for seen in await engine.list()]

    assert asyncio.run(run()) == ["server-0.0", "worker-0.0"]
    assert local.started == ["server-0.0"]
    orders = [host.orders.get_nowait() for _ in range(host.orders.qsize())]
    assert [one.spec.ref for one in orders if isinstance(one, AddOrder)] == ["worker-0.0"]


def test_a_server_here_leaves_the_place_of_a_worker_free(tmp_path):
    local, fleet, engine = make(tmp_path, cores=1)

    async def run():
        await engine.add(specs(("server", 0), ("server", 1)))
        await fleet.list()
        await engine.add(specs(("worker", 0)))

    asyncio.run(run())
    assert local.started == ["server-0.0", "server-1.0", "worker-0.0"]


def test_a_worker_that_is_no_longer_wanted_while_it_waits_for_room_is_told_as_lost(tmp_path):
    _, _, engine = make(tmp_path, cores=0)

    async def run():
        told = engine.watch()
        first = asyncio.ensure_future(anext(told))
        await engine.add(specs(("worker", 0)))
        await asyncio.sleep(0)
        await engine.kill("worker-0.0")
        seen = await first
        await told.aclose()
        return seen

    seen = asyncio.run(run())
    assert (seen.ref, seen.kind) == ("worker-0.0", Kind.LOST)


def test_both_parts_are_watched(tmp_path):
    _, _, engine = make(tmp_path, cores=1)

    async def run():
        await engine.add(specs(("server", 0), ("worker", 0)))
        changes = engine.watch()
        found = [(await anext(changes)).ref for _ in range(2)]
        await changes.aclose()
        return sorted(found)

    assert asyncio.run(run()) == ["server-0.0", "worker-0.0"]
