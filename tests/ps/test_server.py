"""A server process: exactly once, whatever dies, and one clear error for each bad input."""

from __future__ import annotations

import asyncio
import dataclasses
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from trueline.errors import StorageError, TrainError, TruelineError
from trueline.ps import dial
from trueline.ps.gradients import Gradients
from trueline.ps.link import ServerLink
from trueline.ps.messages import BUCKETS
from trueline.ps.partition import make_routing
from trueline.ps.server import snapshot
from trueline.ps.wire import HEAD, FrameError
from worlds.parameter_servers import IDS, SECRET, SPEC, TABLE, World, gradients, values, world
from worlds.waiting import until_told

pytestmark = pytest.mark.slow


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        yield made


def test_a_push_is_applied_by_all_servers_and_then_acknowledged(servers: World) -> None:
    client = servers.client(servers.begin(2))
    for minibatch in range(5):
        client.push(gradients(minibatch))
    client.drain(30)
    assert sorted(client.take_acknowledged()) == [(0, minibatch) for minibatch in range(5)]
    assert values(client) == {-5.0}
    assert all(servers.stats(ref).applied == {0: ((0, 5),)} for ref in client.routing.servers)
    client.close()


def test_a_push_that_is_repeated_is_applied_once(servers: World) -> None:
    routing = servers.begin(2)
    for _ in range(3):  # by three workers
        client = servers.client(routing)
        client.push(gradients(7, epoch=1))
        client.drain(30)
        assert client.take_acknowledged() == [(1, 7)]
        assert values(client) == {-1.0}
        client.close()
    assert servers.stats("server-0").duplicates == 2


def test_a_killed_server_has_all_that_it_acknowledged(servers: World) -> None:
    routing = servers.begin(2)
    client = servers.client(routing)
    for minibatch in range(4):
        client.push(gradients(minibatch))
        client.drain(30)
        servers.kill("server-1")
        servers.start("server-1")
    assert values(client) == {-4.0}
    assert servers.stats("server-1").applied == {0: ((0, 4),)}
    client.close()


def test_a_server_that_is_back_gets_what_was_not_acknowledged(servers: World) -> None:
    client = servers.client(servers.begin(2), outstanding=4)
    servers.kill("server-0")
    for minibatch in range(3):
        client.push(gradients(minibatch))
    pull = client.start_pull({TABLE: IDS})
    assert client.take_acknowledged() == []
    servers.start("server-0")
    client.drain(30)
    assert sorted(client.take_acknowledged()) == [(0, 0), (0, 1), (0, 2)]
    assert pull.result(30).rows[TABLE].shape == (len(IDS), 4)
    assert values(client) == {-3.0}
    client.close()


@pytest.mark.jobs
def test_kills_at_any_instant_lose_nothing_and_repeat_nothing(servers: World) -> None:
    client = servers.client(servers.begin(2), outstanding=8)
    done: list[tuple[int, int]] = []
    for minibatch in range(120):
        client.push(gradients(minibatch))
        if minibatch % 20 == 19:  # up to eight pushes are under way
            ref = f"server-{minibatch // 20 % 2}"
            servers.kill(ref)
            servers.start(ref)
        done += client.take_acknowledged()
    client.drain(60)
    done += client.take_acknowledged()
    assert sorted(done) == [(0, minibatch) for minibatch in range(120)]
    assert values(client) == {-120.0}
    client.close()


def test_a_full_disk_holds_pushes_back_and_loses_nothing(servers: World) -> None:
    client = servers.client(servers.begin(1), outstanding=4)
    client.push(gradients(0))
    client.drain(30)
    pid = servers.processes["server-0"].pid
    room = (servers.folder("server-0") / "log-0").stat().st_size + 60
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, most))
    client.push(gradients(1))
    client.push(gradients(2))
    while servers.stats("server-0").queued < 2:
        continue
    assert "log-0" in servers.stats("server-0").lacking
    assert values(client) == {-1.0}
    servers.kill("server-0")  # what it held back was not acknowledged
    servers.start("server-0")
    client.drain(30)
    assert values(client) == {-3.0}
    pid = servers.processes["server-0"].pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, most))
    client.push(gradients(3))
    while not servers.stats("server-0").queued:
        continue
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
    client.drain(30)
    assert servers.stats("server-0").lacking == ""
    assert values(client) == {-4.0}
    client.close()


def test_a_server_without_memory_holds_new_rows_back_and_hands_them_over_in_a_cut(
    servers: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUELINE_PS_MEMORY", "1")
    client = servers.client(servers.begin(1), outstanding=4)
    client.push(gradients(0))
    while not servers.stats("server-0").queued:
        continue
    assert "no memory for new rows" in servers.stats("server-0").lacking
    assert values(client) == {0.0}

    async def cut(link: ServerLink) -> None:
        await link.begin_cut(1, {0: ((0, 1),)})
        await link.end_cut(1)

    servers.ask("server-0", cut)  # what is under way has to be applied, or no row could leave
    assert values(client) == {-1.0}
    client.push(gradients(1))
    client.drain(30)
    assert values(client) == {-2.0}
    new = gradients(2)
    client.push(dataclasses.replace(new, tables={TABLE: (IDS + 1000, new.tables[TABLE][1])}))
    while not servers.stats("server-0").queued:
        continue
    monkeypatch.delenv("TRUELINE_PS_MEMORY")
    servers.kill("server-0")
    servers.start("server-0")
    client.drain(30)
    assert servers.stats("server-0").tables[0].rows == 2 * len(IDS)
    client.close()


def test_a_log_that_is_torn_in_its_middle_ends_the_server_with_its_name(servers: World) -> None:
    client = servers.client(servers.begin(1))
    client.push(gradients(0))
    client.drain(30)
    client.close()
    servers.kill("server-0")
    path = servers.folder("server-0") / "log-0"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    assert servers.start("server-0").wait(30) == 1
    assert "log-0 is torn at byte 0" in servers.log("server-0")


def test_a_client_waits_for_a_server_that_is_away_and_names_it(servers: World) -> None:
    client = servers.client(servers.begin(2))
    servers.kill("server-1")
    with pytest.raises(TimeoutError, match="server-1"):
        client.pull({TABLE: IDS}, timeout_s=0.3)
    client.close()


async def count_queued(link: ServerLink) -> int:
    return (await link.stats()).queued


def test_a_cut_queues_other_pushes_and_answers_pulls(servers: World) -> None:
    routing = servers.begin(2)
    client = servers.client(routing, outstanding=4)

    async def cut() -> None:
        links = [ServerLink(servers.addresses, ref, SECRET) for ref in routing.servers]
        begun = [asyncio.create_task(link.begin_cut(1, {0: ((0, 2),)})) for link in links]
        await asyncio.gather(*(link.stats() for link in links))  # the cuts have begun
        client.push(gradients(0))
        client.push(gradients(5))
        for link in links:
            await until_told(partial(count_queued, link), "a queued push")
        assert not any(task.done() for task in begun)
        assert values(client) == {-1.0}
        client.push(gradients(1))
        await asyncio.gather(*begun)
        assert [(await link.stats()).applied for link in links] == [{0: ((0, 2),)}] * 2
        for link in links:
            await link.save(str(servers.job / link.ref))
            await link.end_cut(1)
        for link in links:
            await link.wait_saved(str(servers.job / link.ref))
            await link.close()

    asyncio.run(cut())
    client.drain(30)
    assert values(client) == {-3.0}
    for ref in routing.servers:
        header, _ = snapshot.read(servers.job / ref)
        assert header["applied"] == [[0, [[0, 2]]]]
    client.close()


def test_a_cut_ends_with_the_connection_of_its_master(servers: World) -> None:
    client = servers.client(servers.begin(1))

    async def cut() -> None:
        link = ServerLink(servers.addresses, "server-0", SECRET)
        await link.begin_cut(1, {})
        client.push(gradients(0))
        await until_told(partial(count_queued, link), "a queued push")
        await link.close()

    asyncio.run(cut())
    client.drain(30)
    assert values(client) == {-1.0}
    client.close()


def test_a_wrong_secret_is_refused_by_both_sides(servers: World) -> None:
    servers.begin(1)
    address = servers.addresses("server-0")
    assert address is not None
    for where in (address.unix, address.tcp):
        with pytest.raises(FrameError, match="secret"):
            dial.dial(where, b"another", 5)
        dial.dial(where, SECRET, 5)[0].close()


def test_a_caller_that_lies_about_its_proof_is_refused(servers: World) -> None:
    servers.begin(1)
    address = servers.addresses("server-0")
    assert address is not None
    with socket.create_connection(("127.0.0.1", int(address.tcp.rpartition(":")[2])), 10) as stranger:
        stranger.sendall(dial.make_greeting())
        assert len(stranger.recv(64)) == 64
        stranger.sendall(bytes(32))
        assert stranger.recv(1) == b""


def test_what_is_no_frame_closes_its_connection_and_no_other(servers: World) -> None:
    routing = servers.begin(1)
    client = servers.client(routing)
    address = servers.addresses("server-0")
    assert address is not None
    with dial.dial(address.preferred, SECRET, 10)[0] as connection:
        connection.settimeout(10)
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x"[: HEAD.size].ljust(HEAD.size))
        assert connection.recv(1) == b""
    client.push(gradients(0))
    client.drain(30)
    client.close()


def test_a_gradient_with_nan_is_refused_by_name_and_not_applied(servers: World) -> None:
    client = servers.client(servers.begin(1))
    rows = np.zeros((2, 4), np.float32)
    rows[1, 2] = np.nan
    bias = np.zeros(3, np.float32)
    client.push(Gradients(0, 0, 1.0, (1.0,), {TABLE: (np.array([3, 99]), rows)}, {"bias": bias}))
    with pytest.raises(TruelineError, match=rf"{TABLE}.*99"):
        client.drain(30)
    client.push(gradients(1))
    client.drain(30)
    assert client.take_acknowledged() == [(0, 1)]
    assert servers.stats("server-0").applied == {0: ((1, 2),)}
    client.close()


def test_a_push_with_an_old_routing_is_refused_in_full_and_sent_anew(servers: World) -> None:
    old = servers.begin(2)
    new = msgspec.structs.replace(old, version=old.version + 1)
    without = servers.client(old)
    asked = []

    def tell() -> object:
        asked.append(1)
        return new

    client = servers.client(old, on_routing=tell)
    servers.ask("server-1", lambda link: link.route(new))
    servers.ask("server-0", lambda link: link.route(new))
    without.push(gradients(0))
    with pytest.raises(TrainError, match="routing"):
        without.drain(30)
    assert all(servers.stats(ref).applied == {} for ref in old.servers)
    client.push(gradients(0))
    client.drain(30)
    assert asked
    assert values(client) == {-1.0}
    client.close()
    without.close()


@pytest.mark.jobs
def test_the_files_of_a_cut_give_any_number_of_servers_the_same_state(servers: World) -> None:
    old = servers.begin(2)
    client = servers.client(old)
    for minibatch in range(3):
        client.push(gradients(minibatch))
    client.drain(30)
    paths = tuple(str(servers.job / "checkpoint" / ref) for ref in old.servers)
    for ref, path in zip(old.servers, paths, strict=True):
        servers.ask(ref, lambda link, path=path: save(link, path))
    new = msgspec.structs.replace(make_routing(["server-2", "server-3", "server-4"], SPEC.dense), version=2)
    for ref in new.servers:
        servers.start(ref)
        servers.ask(ref, lambda link: link.configure(SPEC, new, paths))
    for ref in old.servers:
        servers.ask(ref, lambda link: link.route(new))
        servers.kill(ref)  # it has to know without being told again
        servers.start(ref)
    for ref in new.servers:
        assert servers.stats(ref).applied == {0: ((0, 3),)}
        servers.kill(ref)
        servers.start(ref)
    moved = servers.client(old, on_routing=lambda: new)
    for minibatch in range(2, 5):  # of which the new servers have the first
        moved.push(gradients(minibatch))
    moved.drain(30)
    assert values(moved) == {-5.0}
    assert len({ref for ref in new.servers if servers.stats(ref).tables[0].rows}) > 1
    client.close()
    moved.close()


async def hand_over(world: World, buckets: range) -> None:
    """Copies rows of server-0 to server-1 in a cut, whose master then dies."""
    links = [ServerLink(world.addresses, ref, SECRET) for ref in ("server-0", "server-1")]
    for link in links:
        await link.begin_cut(1, {})
    await links[1].take(*await links[0].export(buckets))
    for link in links:
        await link.close()


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_server_that_took_rows_applies_nothing_until_it_has_a_routing(servers: World, goes_on: bool) -> None:
    old = servers.begin(2)
    client = servers.client(old, outstanding=4, on_routing=lambda: after)
    client.push(gradients(0))
    client.drain(30)
    after = old
    if goes_on:  # all buckets are server-1's
        after = msgspec.structs.replace(old, version=2, owners=np.ones(BUCKETS, "<u2").tobytes())
    asyncio.run(hand_over(servers, range(BUCKETS)))
    client.push(gradients(1))
    servers.kill("server-1")
    servers.start("server-1")
    while not servers.stats("server-1").queued:
        continue
    assert servers.stats("server-1").applied == {0: ((0, 1),)}
    for ref in ("server-1", "server-0", "server-1"):
        servers.ask(ref, lambda link: link.route(after))
    client.drain(30)
    assert values(client) == {-2.0}
    client.close()


async def save(link: ServerLink, path: str) -> None:
    await link.save(path)
    await link.wait_saved(path)


def test_a_checkpoint_that_finds_no_room_fails_and_the_server_goes_on(servers: World) -> None:
    client = servers.client(servers.begin(1))
    pid = servers.processes["server-0"].pid
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, most))
    with pytest.raises(StorageError, match="checkpoint"):
        servers.ask("server-0", lambda link: save(link, str(servers.job / "checkpoint")))
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
    servers.ask("server-0", lambda link: save(link, str(servers.job / "checkpoint")))
    client.push(gradients(0))
    client.drain(30)
    client.close()


def test_a_torn_file_of_a_checkpoint_is_named_and_leaves_the_server_unconfigured(servers: World) -> None:
    routing = make_routing(["server-0"], SPEC.dense)
    servers.start("server-0")
    path = servers.job / "part"
    snapshot.write(path, {}, [np.arange(100)])
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(StorageError, match="part is torn"):
        servers.ask("server-0", lambda link: link.configure(SPEC, routing, (str(path),)))
    assert servers.stats("server-0").routing == -1


def test_a_missing_file_of_a_checkpoint_is_named_by_its_server_and_nothing_is_taken(servers: World) -> None:
    routing = servers.begin(2)
    paths = []
    for ref in routing.servers:
        paths.append(str(servers.job / f"{ref}.part"))
        servers.ask(ref, lambda link: link.save(paths[-1]))
        servers.ask(ref, lambda link: link.wait_saved(paths[-1]))
    servers.start("server-7")
    alone = make_routing(["server-7"], SPEC.dense)
    with pytest.raises(StorageError, match="has no part of server-1: it is of 2 servers"):
        servers.ask("server-7", lambda link: link.configure(SPEC, alone, tuple(paths[:1])))
    assert servers.stats("server-7").routing == -1
    servers.ask("server-7", lambda link: link.configure(SPEC, alone, tuple(paths)))
    assert servers.stats("server-7").routing >= 0


def test_a_server_ends_with_its_launcher(servers: World) -> None:
    servers.begin(1)
    servers.end_launcher()
    assert servers.processes["server-0"].wait(30) == 75


def test_a_server_needs_no_torch() -> None:
    code = "import sys, trueline.ps.server.process, trueline.ps.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.jobs
def test_a_long_log_becomes_a_snapshot(servers: World) -> None:
    """Twelve pushes of 24 MB."""
    client = servers.client(servers.begin(1))
    ids = np.arange(1_000_000)
    for minibatch in range(12):
        rows = np.full((len(ids), 4), 1, np.float32)
        client.push(Gradients(0, minibatch, 1.0, (1.0,), {TABLE: (ids, rows)}, {"bias": np.zeros(3, np.float32)}))
        client.drain(120)
    folder = servers.folder("server-0")
    while not (folder / "snapshot-1").exists() or (folder / "log-0").exists():
        servers.stats("server-0")
    servers.kill("server-0")
    servers.start("server-0")
    assert set(client.pull({TABLE: ids[::1000]}, timeout_s=60).rows[TABLE].reshape(-1).tolist()) == {-12.0}
    client.close()


def test_a_server_that_is_not_configured_is_waited_for(servers: World) -> None:
    routing = make_routing(["server-0"], SPEC.dense)
    servers.start("server-0")
    client = servers.client(routing)
    client.push(gradients(0))
    assert servers.stats("server-0").routing == -1
    servers.ask("server-0", lambda link: link.configure(SPEC, routing))
    client.initialize({"bias": np.zeros(3, np.float32)}, 30)
    client.drain(30)
    assert values(client) == {-1.0}
    client.close()


def test_a_table_of_another_dim_is_refused_at_the_next_start(servers: World) -> None:
    routing = servers.begin(1)
    wider = msgspec.structs.replace(SPEC, tables=(msgspec.structs.replace(SPEC.tables[0], dim=8),))
    with pytest.raises(TrainError, match=r"dim 4 became 8"):
        servers.ask("server-0", lambda link: link.configure(wider, routing))
    servers.ask("server-0", lambda link: link.configure(SPEC, routing))


def test_half_rows_carry_the_same_gradients(servers: World) -> None:
    client = servers.client(servers.begin(2), half=True)
    client.push(gradients(0, value=0.5))
    client.drain(30)
    assert values(client) == {-0.5}
    client.close()


def test_a_told_server_ends_with_code_0(servers: World) -> None:
    servers.begin(2)
    servers.ask("server-0", lambda link: link.stop())
    assert servers.processes["server-0"].wait(30) == 0
    servers.processes["server-1"].terminate()
    assert servers.processes["server-1"].wait(30) == 0
