"""Promises of the rendezvous store: a torch store of one generation, for processes that have the job's secret."""

import socket
import struct
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from trueline.parallel import handshake
from trueline.parallel import store as stores
from trueline.parallel.exchange import is_collective
from trueline.parallel.handshake import Hello, Purpose
from trueline.parallel.store import PeerStore, StoreServer

WAIT = timedelta(seconds=30)
SECRET = "the-secret-of-this-job"


@pytest.fixture(autouse=True)
def _job(monkeypatch):
    monkeypatch.setenv("TRUELINE_SECRET", SECRET)


@pytest.fixture
def server():
    found = StoreServer()
    yield found
    found.close()


@pytest.fixture
def member(server):
    made = []

    def make(generation=3, rank=0, timeout=WAIT):
        made.append(PeerStore(server.address, generation, rank, timeout))
        return made[-1]

    yield make
    for store in made:
        store.release()


def call(server):
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def through_torch(store):
    """The store as gloo and NCCL call it: from C++, under a prefix."""
    return PrefixStore("plane", store)


@pytest.mark.parametrize("view", [lambda store: store, through_torch], ids=["called directly", "through torch"])
def test_a_member_reads_what_another_wrote(member, view):
    first, second = view(member(rank=0)), view(member(rank=1))
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert (first.add("count", 2), second.add("count", 3)) == (2, 5)
    assert first.get("count") == b"5"
    assert second.check(["key", "count"])
    assert not second.check(["key", "other"])
    second.wait(["key"], WAIT)
    assert first.compare_set("turn", "", "mine") == b"mine"
    assert second.compare_set("turn", "", "its") == b"mine"
    assert second.compare_set("turn", "mine", "its") == b"its"
    assert second.num_keys() == 3
    assert second.delete_key("key")
    assert not first.delete_key("key")
    assert first.num_keys() == 2


def test_bytes_come_back_as_they_were(member):
    value = bytes(range(256)) * 1000
    through_torch(member()).set("key", value.decode("latin1"))
    member().set("raw", value)
    assert member().get("raw") == value
    assert through_torch(member()).get("key") == value.decode("latin1").encode()


def test_a_wait_ends_when_the_key_appears_and_holds_no_other_call_up(member):
    store, found = member(), []
    waits = [threading.Thread(target=lambda key=key: found.append(store.get(key))) for key in ("a", "b")]
    for wait in waits:
        wait.start()
    for key in ("b", "a"):
        store.set(key, key)
    for wait in waits:
        wait.join()
    assert sorted(found) == [b"a", b"b"]


@pytest.mark.parametrize("read", [lambda s: s.get("no"), lambda s: s.wait(["no"], timedelta(seconds=0.01))])
def test_a_key_that_does_not_appear_in_time_is_a_failure_of_the_group(member, read):
    for store in (member(timeout=timedelta(seconds=0.05)), through_torch(member(timeout=timedelta(seconds=0.05)))):
        with pytest.raises(dist.DistStoreError, match="no") as raised:
            read(store)
        assert is_collective(raised.value)


def test_each_generation_has_keys_of_its_own_and_one_that_is_over_has_none(member):
    member(3).set("key", "old")
    newer = member(4)
    assert not newer.check(["key"])
    newer.set("key", "new")
    with pytest.raises(dist.DistStoreError, match="gone"):
        member(3).get("key")
    assert newer.get("key") == b"new"


def test_a_store_whose_rank_0_is_dead_is_named_at_once():
    server = StoreServer()
    address = server.address
    server.close()
    while True:
        try:
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))).close()
        except OSError:
            break
    with pytest.raises(dist.DistStoreError, match=f"the rendezvous store at {address} is gone"):
        PeerStore(address, 3, 1, WAIT).open()


def test_a_released_store_can_be_called_again(member):
    store = member()
    store.open()
    store.set("key", "value")
    store.release()
    assert store.get("key") == b"value"


def test_a_stranger_that_speaks_torchs_own_protocol_writes_nothing(server, member):
    store = member()
    store.set("key", "value")
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(dist.DistError):
        TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=0.2))
    assert (store.get("key"), store.num_keys()) == (b"value", 1)


def test_a_stranger_that_knows_the_protocol_and_not_the_secret_writes_nothing(server, member, monkeypatch):
    store = member()
    store.set("key", "value")
    stores._send(stranger := call(server), ("set", "key", b"false"))
    monkeypatch.setenv("TRUELINE_SECRET", "guess")
    with pytest.raises(dist.DistStoreError, match="does not have the secret"):
        member().set("key", "false")
    greeting = b"TLP1" + struct.pack("!Bqq", Purpose.STORE, 3, 0) + bytes(32)
    with call(server) as caller, stranger:
        caller.sendall(greeting)
        caller.recv(64, socket.MSG_WAITALL)
        caller.sendall(bytes(32))
        stores._send(caller, ("delete", "key"))
        with pytest.raises((ConnectionError, OSError)):
            stores._receive(caller)
    monkeypatch.setenv("TRUELINE_SECRET", SECRET)
    assert (store.get("key"), store.num_keys()) == (b"value", 1)


def test_a_stranger_cannot_end_a_generation_by_naming_a_later_one(server, member):
    store = member(3)
    store.set("key", "value")
    with call(server) as caller:
        caller.sendall(b"TLP1" + struct.pack("!Bqq", Purpose.STORE, 1 << 60, 0) + bytes(32))
        caller.recv(64, socket.MSG_WAITALL)
    assert store.get("key") == b"value"


@pytest.mark.parametrize(
    "data", [struct.pack("!I", 1 << 31), struct.pack("!I", 3) + b"\xc1\xc1\xc1", b"\0\0\0\5\x91\xa3bad"]
)
def test_a_request_that_is_none_ends_its_connection_alone(server, member, data):
    store = member()
    store.set("key", "value")
    with handshake.connect(server.address, Hello(Purpose.STORE, 3, 1), 30) as caller:
        caller.sendall(data)
        with pytest.raises((ConnectionError, OSError)):
            stores._receive(caller)
    assert store.get("key") == b"value"


def test_a_connection_for_another_purpose_is_not_served(server):
    with handshake.connect(server.address, Hello(Purpose.STATE, 3), 30) as caller:
        assert caller.recv(1) == b""
