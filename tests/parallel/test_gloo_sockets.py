"""Promises of gloo over proven connections: it uses these alone, and no other process reaches it."""

import multiprocessing
import os
import select
import socket
import struct
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from trueline.errors import TrainError
from trueline.parallel import gloo, gloo_sockets
from trueline.parallel.gloo import GlooGroup
from trueline.parallel.store import StoreServer
from worlds.groups import WAIT_S, in_processes
from worlds.strangers import Strangers
from worlds.waiting import until

pytestmark = pytest.mark.slow
WAIT = timedelta(seconds=30)
GARBAGE = struct.pack("<q", 1) + b"\x7f" * 400


def linked(size):
    """Connections between each two of `size` members: for each member a dictionary by rank."""
    links = [{} for _ in range(size)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for rank in range(size):
            for other in range(rank):
                links[rank][other] = socket.create_connection(listener.getsockname())
                links[other][rank] = listener.accept()[0]
    return links


def together(work, size):
    """The results of `work(rank)` in threads."""
    found = [None] * size

    def run(rank):
        try:
            found[rank] = work(rank)
        except Exception as error:  # noqa: BLE001  compared by the test
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def formed(size):
    links = linked(size)
    names = [{other: (link.getsockname(), link.getpeername()) for other, link in mine.items()} for mine in links]
    groups = together(lambda rank: gloo_sockets.form(links[rank], rank, size, WAIT), size)
    assert all(isinstance(group, ProcessGroupGloo) for group in groups), groups
    return groups, names


def sums(groups, length=1000):
    def add(rank):
        value = torch.full((length,), float(rank + 1))
        groups[rank].allreduce([value]).wait()
        return value[0].item(), value[-1].item()

    return together(add, len(groups))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gloo_sums_over_the_connections_that_it_is_given(size):
    groups, names = formed(size)
    whole = sum(range(1, size + 1))
    assert sums(groups) == [(whole, whole)] * size
    assert sums(groups, 1 << 20) == [(whole, whole)] * size
    in_use = {
        pair for number, kind in gloo_sockets._descriptors().items() if kind.startswith("socket:")
        if (pair := ends(number)) is not None
    }  # fmt: skip
    assert {pair for mine in names for pair in mine.values()} <= in_use


def ends(number):
    try:
        with gloo_sockets._borrow(number) as connection:
            return connection.getsockname(), connection.getpeername()
    except OSError:
        return None


def test_a_peer_that_is_gone_fails_a_sum_at_once():
    links = linked(2)
    mine, theirs = links[0], links[1][0]
    group = gloo_sockets.form(mine, 0, 2, WAIT)
    theirs.close()
    with pytest.raises(RuntimeError, match=r"closed by peer|reset by peer"):
        group.allreduce([torch.ones(1)]).wait()


def knock(address, data=GARBAGE):
    """A stranger's connection attempt that may be dropped."""
    stranger = socket.socket()
    stranger.setblocking(False)
    stranger.connect_ex(address)
    try:
        stranger.send(data)
    except OSError:  # not connected
        stranger.close()
        return None
    return stranger


def test_no_other_process_reaches_gloo_while_a_group_forms_or_later(monkeypatch):
    devices, reached = [], []
    wait_accepted = gloo_sockets._Device.wait_accepted

    def attacked(device, names):
        devices.append(device)
        reached.extend(knock(device.address) for _ in range(5))
        for _, port in names:  # the port of a socket that is admitted, from an address that is not
            with socket.socket() as stranger:
                stranger.bind(("127.0.0.2", port))
                stranger.setblocking(False)
                stranger.connect_ex(device.address)
                with pytest.raises(OSError):
                    stranger.send(GARBAGE)
        return wait_accepted(device, names)

    monkeypatch.setattr(gloo_sockets._Device, "wait_accepted", attacked)
    groups, _ = formed(2)
    assert len(devices) == 2
    assert reached == [None] * 10
    assert [knock(device.address) for device in devices] == [None, None]
    assert sums(groups) == [(3, 3)] * 2


@pytest.mark.parametrize("data", [GARBAGE, GARBAGE[:8], b""], ids=["garbage", "a place", "nothing"])
@pytest.mark.parametrize("stays", [True, False], ids=["that stays", "that leaves"])
def test_a_stranger_that_is_faster_than_the_filter_costs_another_listener(monkeypatch, data, stays):
    admit, seen, strangers = gloo_sockets._Device.admit, set(), []

    def late(device, ports):
        if device not in seen and len(seen) < 4:
            strangers.append(socket.create_connection(device.address))
            strangers[-1].sendall(data)
            if not stays:
                strangers[-1].close()
        seen.add(device)
        admit(device, ports)

    monkeypatch.setattr(gloo_sockets._Device, "admit", late)
    groups, _ = formed(2)
    assert len(strangers) >= 4
    assert sums(groups) == [(3, 3)] * 2
    for stranger in strangers:
        stranger.close()


def test_a_stranger_that_was_accepted_behind_the_place_that_was_read_is_found(monkeypatch):
    """Descriptors are read number by number, and its own may be lower than those that were accepted after it."""
    admit, listed, strangers = gloo_sockets._Device.admit, gloo_sockets._Device._list_accepted, []
    blind = set()

    def late(device, ports):
        if len(strangers) < 2:
            strangers.append(socket.create_connection(device.address))
            strangers[-1].sendall(GARBAGE)
        admit(device, ports)

    def skip(device):
        found = list(listed(device))
        known = [one for one in found if one[1] not in {stranger.getsockname() for stranger in strangers}]
        if not known or device in blind:
            return found
        blind.add(device)
        return known

    monkeypatch.setattr(gloo_sockets._Device, "admit", late)
    monkeypatch.setattr(gloo_sockets._Device, "_list_accepted", skip)
    groups, _ = formed(2)
    assert len(strangers) == 2
    assert len(blind) > 2
    assert sums(groups) == [(3, 3)] * 2
    for stranger in strangers:
        stranger.close()


def test_a_stranger_that_is_always_faster_fails_the_group_and_not_the_process(monkeypatch):
    admit, strangers = gloo_sockets._Device.admit, []

    def late(device, ports):
        strangers.append(socket.create_connection(device.address))
        strangers[-1].sendall(GARBAGE)
        admit(device, ports)

    monkeypatch.setattr(gloo_sockets._Device, "admit", late)
    monkeypatch.setattr(gloo_sockets, "_TRIES", 3)
    links = linked(2)
    with pytest.raises(RuntimeError, match="3 times in a row: another process was faster"):
        gloo_sockets.form(links[0], 0, 2, WAIT)
    assert len(strangers) == 3
    assert links[1][0].recv(1) == b"", "the peer is told: its connection is closed"
    for stranger in [*strangers, *links[1].values()]:
        stranger.close()


def test_a_device_is_found_though_others_had_its_descriptors_before(monkeypatch):
    """The epoll set of a group that is being dropped has the same name in /proc, and its number is used again."""
    create, older = ProcessGroupGloo.create_device, [select.epoll() for _ in range(8)]

    def create_late(**options):
        for poll in older:
            poll.close()
        return create(**options)

    monkeypatch.setattr(ProcessGroupGloo, "create_device", create_late)
    monkeypatch.setattr(gloo_sockets, "_TRIES", 1)
    assert sums(formed(2)[0]) == [(3, 3)] * 2


def test_a_device_is_found_though_another_epoll_set_has_its_number_for_another_socket(monkeypatch):
    """As a set does that a fork shares with its parent, in which strangers have connected to the parent's listeners."""
    monkeypatch.setattr(gloo_sockets, "_TRIES", 1)
    others = [socket.socket() for _ in range(16)]
    with select.epoll() as shared:
        for other in others:
            shared.register(other)
        copies = [other.dup() for other in others]
        for other in others:
            other.close()
        assert sums(formed(2)[0]) == [(3, 3)] * 2
    for copy in copies:
        copy.close()


def test_a_gloo_that_announces_its_address_differently_is_refused_by_name():
    with pytest.raises(TrainError, match=r"gloo of torch .* cannot be given proven connections: its members"):
        gloo_sockets._OwnAddress(80).set("0/0", b"elsewhere")


def test_members_that_are_attacked_at_every_port_while_one_is_late_form_their_group(tmp_path):
    """Two members wait for the third: as long as that takes, strangers have time to take its place."""
    addresses = multiprocessing.get_context("fork").Queue()
    strangers = Strangers(tmp_path)

    def member(rank):
        gloo.FORM_TIMEOUT_S = WAIT_S
        server = StoreServer() if rank == 0 else None
        if server is not None:
            for _ in range(2):
                addresses.put(server.address)
        address = addresses.get(timeout=WAIT_S) if server is None else server.address
        if rank == 1:
            strangers.aim([os.getpid()])
        if rank == 2:
            until(lambda: strangers.tried() > 200, "the members that wait were attacked")
        group = GlooGroup()
        group.form(2, rank=rank, size=3, store=address)
        value = torch.ones(1, dtype=torch.float64)
        for _ in range(20):
            dist.all_reduce(value)
        group.close()
        return value.item()

    assert in_processes(3, member) == [3.0**20] * 3
    assert strangers.stop()["ports"] >= 1


def test_a_kernel_without_socket_filters_is_found_before_any_group(monkeypatch):
    assert gloo_sockets.find_lack.__wrapped__() == ""

    def refuse(*_):
        raise OSError(92, "Protocol not available")

    monkeypatch.setattr(gloo_sockets, "_attach_filter", refuse)
    assert gloo_sockets.find_lack.__wrapped__() == "the kernel takes no socket filter: Protocol not available"
