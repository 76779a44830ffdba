"""Which hosts may join, the errors of those that may not, and how a lost connection is made again."""

import asyncio
import socket
import time

import msgspec
import pytest

from trueline import events
from trueline.engine.hosts import relay as relays
from trueline.engine.hosts import route, tls, token
from trueline.engine.hosts.host_clock import OwnClock
from trueline.engine.hosts.messages import Pulse, Welcome
from trueline.engine.hosts.reach import check_port, find_open
from trueline.engine.hosts.relay import check_packages, check_store
from trueline.engine.hosts.service import find_version_fault
from trueline.errors import TrainError, UsageError
from worlds.hosts import WAIT_S, HostWorld
from worlds.loopback import free_ports
from worlds.waiting import until_async


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = HostWorld(tmp_path)
    yield made
    made.close()
    made.end_loop()


def test_a_token_is_of_one_launch_and_of_its_time():
    now = 1_000_000.0
    issued = token.issue_token("secret", now=now)
    assert token.find_fault(issued, "secret", now=now + 1) == ""
    assert "wrong" in token.find_fault(issued, "another launch", now=now)
    assert "wrong" in token.find_fault(issued.replace(issued[0], "9", 1), "secret", now=now)
    assert "wrong" in token.find_fault("", "secret", now=now)
    assert "expired 1970-01-19" in token.find_fault(issued, "secret", now=now + 8 * 86400)


def test_a_host_of_another_version_is_told_which(world):
    _, future = world.join(versions={"trueline": "0", "torch": "2"})
    with pytest.raises(UsageError, match="refuses this host: the host has trueline 0, and the job runs on trueline 1"):
        future.result(WAIT_S)
    assert world.wait("host.refused")["host"] == "host-b"


def test_the_first_version_that_differs_is_named():
    ours = {"trueline": "1", "torch": "2.13"}
    assert find_version_fault(ours, dict(ours)) == ""
    assert find_version_fault(ours, {"trueline": "1"}) == "the host has no torch, and the job runs on torch 2.13"


def test_an_address_where_nothing_listens_is_named(world, monkeypatch):
    monkeypatch.setattr("trueline.engine.hosts.reach.REFUSED_S", 0.0)
    port = free_ports(1)[0]
    _, future = world.join(address=f"127.0.0.1:{port}")
    with pytest.raises(TrainError, match=rf"cannot reach 127.0.0.1:{port}"):
        future.result(WAIT_S)


def test_a_host_waits_for_a_master_that_listens_a_moment_later(monkeypatch):
    port, refused = free_ports(1)[0], []
    connect = asyncio.open_connection

    async def count(*address):
        try:
            return await connect(*address)
        except ConnectionRefusedError:
            refused.append(address)
            raise

    async def join():
        asking = asyncio.ensure_future(check_port(f"127.0.0.1:{port}"))
        await until_async(lambda: refused, "the port refuses")
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port)
        await asyncio.wait_for(asking, WAIT_S)
        server.close()

    monkeypatch.setattr(asyncio, "open_connection", count)
    asyncio.run(join())


def test_of_hosts_that_could_lead_one_that_listens_is_found_whatever_the_others_do(monkeypatch):
    silent, closed = "192.0.2.1:7700", f"127.0.0.1:{free_ports(1)[0]}"
    connect = asyncio.open_connection

    async def open_or_hang(host, port):
        if host == "192.0.2.1":  # a host that died: no packet comes back
            await asyncio.Event().wait()
        return await connect(host, port)

    async def look():
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        listens = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await find_open([silent, closed, listens]) == listens
        server.close()
        monkeypatch.setattr("trueline.engine.hosts.reach.PROBE_S", 0.01)
        assert await find_open([silent, closed]) == ""

    monkeypatch.setattr(asyncio, "open_connection", open_or_hang)
    asyncio.run(look())


def test_a_master_with_another_certificate_is_not_trusted(world, monkeypatch):
    monkeypatch.setattr(world, "certificates", tls.make_certificates("another"))
    monkeypatch.setattr("trueline.engine.hosts.relay.CONNECT_S", 0.5)
    _, future = world.join()
    with pytest.raises(UsageError, match="is not the start of the job that the token is of"):
        future.result(WAIT_S)


def test_a_host_that_takes_connections_and_answers_nothing_is_told_apart_from_another_job(world, monkeypatch):
    for limit in ("relay.CONNECT_S", "reach.SILENT_S"):
        monkeypatch.setattr(f"trueline.engine.hosts.{limit}", 0.2)
    half_open = socket.create_server(("127.0.0.1", 0))  # the kernel takes connections, and nobody reads them
    with half_open:
        address = f"127.0.0.1:{half_open.getsockname()[1]}"
        _, future = world.join(address=address)
        with pytest.raises(TrainError, match=f"{address} takes connections and answers nothing"):
            future.result(WAIT_S)


def test_a_host_whose_messages_are_of_another_version_is_refused_in_words_on_both_sides(world, monkeypatch):
    monkeypatch.setattr(relays, "encode", lambda message: msgspec.msgpack.encode({"type": "Hello", "protocol": 1}))
    _, future = world.join()
    with pytest.raises(UsageError, match="its messages are of another version of Trueline than 1, which the job runs"):
        future.result(WAIT_S)
    assert "Invalid value 'Hello'" in world.wait("host.refused")["why"]


def test_a_host_that_changes_its_version_while_it_lends_is_sent_away_with_the_reason(world, monkeypatch):
    relay, future = world.join()
    world.wait("host.joined")
    world.loop.call_soon_threadsafe(relay._outgoing.put_nowait, {"type": "Hello"})
    assert "its messages are of another version" in future.result(WAIT_S)


def test_a_clock_that_is_too_far_off_for_the_certificate_is_named(world, monkeypatch):
    monkeypatch.setattr("trueline.engine.hosts.relay.find_clock_fault", lambda ca, now: tls.find_clock_fault(ca, 1e9))
    monkeypatch.setattr(world, "certificates", tls.make_certificates("another"))  # gRPC refuses either in the same way
    monkeypatch.setattr("trueline.engine.hosts.relay.CONNECT_S", 0.5)
    _, future = world.join()
    with pytest.raises(
        UsageError, match=r"the clock of this host says 2001-09-09 01:46 UTC, and the job's certificate"
    ):
        future.result(WAIT_S)


def test_a_certificate_lets_clocks_be_a_day_off():
    ca = tls.make_certificates("job").ca.decode()
    assert [tls.find_clock_fault(ca, time.time() + days * 86400) for days in (-1, 0, 1)] == [""] * 3


def test_both_sides_tell_of_a_clock_that_is_an_hour_off_and_of_one_that_is_right_again(world, monkeypatch):
    told, off = [], [3600.0]
    wall = time.time
    monkeypatch.setattr("trueline.engine.hosts.relay.OwnClock", lambda: OwnClock(wall=lambda: wall() + off[0]))
    with events.listening(lambda name, fields: told.append(fields["off"]) if name == "join.clock" else None):
        world.join()
        assert world.wait("host.clock")["off"] == "1 h 0 min ahead"
        assert world.fleet.describe()[1]["clock"] == "clock 1 h 0 min ahead"
        world.events.clear()
        off[0] = 0.0
        assert world.wait("host.clock")["off"] == "right"
    assert told == ["1 h 0 min ahead", "right"]
    assert world.fleet.describe()[1]["clock"] == ""


def test_an_answer_that_took_long_says_nothing_of_a_clock():
    now, off = 100.0, [0.0]
    own = OwnClock(wall=lambda: 5000.0 + off[0], now=lambda: now)
    assert own.take_answer(Pulse(sent_at=now - 40.0, clock=4960.0)) == ""  # this process was stopped meanwhile
    assert own.make_pulse(0.0).off_s == 0.0
    assert own.take_answer(Pulse(sent_at=now - 0.1, clock=4960.0)) == "0 min 40 s ahead"
    assert own.make_pulse(0.0).off_s == 40.0


def test_a_missing_package_and_another_version_are_named_together():
    found = {"numpy": "2.0", "pandas": ""}
    check_packages({"numpy": "2.0"}, found.__getitem__)
    with pytest.raises(UsageError, match=r"numpy 2.1 \(here is 2.0\), pandas 3.0 \(not installed here\)"):
        check_packages({"numpy": "2.1", "pandas": "3.0"}, found.__getitem__)


def test_a_store_that_the_host_does_not_see_is_named(tmp_path):
    greet = Welcome(job="j", secret="s", lease_s=3.0, preload=(), files=(), store=str(tmp_path), probe="mark")
    with pytest.raises(UsageError, match="does not see the folder of the job's checkpoints"):
        check_store(greet)
    (tmp_path / "mark").touch()
    check_store(greet)


def test_a_host_whose_connection_breaks_comes_back_and_keeps_its_processes(world):
    _, future = world.join()
    world.wait("host.joined")
    (host,) = world.fleet.hosts.values()

    async def break_connection():
        host.orders.put_nowait(None)

    world.call(break_connection())
    assert world.wait("host.returned")["cores"] == 4
    assert not future.done()


def test_a_host_that_takes_its_cores_back_goes_without_an_error(world):
    relay, future = world.join()
    world.wait("host.joined")
    world.loop.call_soon_threadsafe(relay.withdraw)
    assert future.result(WAIT_S) == "it had no workers"
    assert world.wait("host.left")["host"] == "host-b"


@pytest.mark.parametrize("text", ["7700", "host", "host:", "host:70000", "fd00::1:7700"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(UsageError, match="is not HOST:PORT"):
        route.split_address(text)


def test_workers_listen_on_the_route_to_the_master_or_on_the_named_interface():
    assert route.announce("", "127.0.0.1") == "127.0.0.1"
    assert route.announce("lo", "192.0.2.1") == "127.0.0.1"
    assert route.announce("127.0.0.1", "192.0.2.1") == "127.0.0.1"
    with pytest.raises(UsageError, match="there is no interface or address 'none0' here"):
        route.announce("none0", "127.0.0.1")


def test_a_token_file_that_is_torn_or_absent_is_named(tmp_path):
    path = tmp_path / "t"
    content = token.TokenFile(job="j", token=token.issue_token("s", now=time.time()), ca="PEM")
    token.write_token(path, content)
    assert token.read_token(path) == content
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UsageError, match="is no token file"):
        token.read_token(path)
    with pytest.raises(UsageError, match="cannot read the token file"):
        token.read_token(tmp_path / "absent")


def test_the_fingerprint_is_of_the_certificate_and_not_of_its_text():
    ca = tls.make_certificates("j").ca.decode()
    assert tls.fingerprint(ca) == tls.fingerprint("\n" + ca + "\n\n")
    assert tls.fingerprint(ca) != tls.fingerprint(tls.make_certificates("j").ca.decode())
