"""Promises of a state on its way to a joiner: who may have it, of which generation it is, whole or not at all."""

import contextlib
import json
import socket
import struct
import threading

import pytest
import torch

from trueline.checkpoint.snapshot import Snapshot
from trueline.parallel import handshake
from trueline.parallel.handshake import Hello, PeerListener
from trueline.train.regroup import state_transfer
from trueline.train.regroup.state_transfer import Fetch, Offer, Room

STATE = {"model": {"w": torch.arange(5.0), "half": torch.ones(3, dtype=torch.bfloat16)}, "ledger": {"steps": 7}}
NEWER = {**STATE, "ledger": {"steps": 8}}


@pytest.fixture
def offer(monkeypatch):
    monkeypatch.setenv("TRUELINE_SECRET", "secret")
    found = Offer()
    yield found
    found.close()


def fetched(fetch):
    """What came, and in a word why nothing did."""
    fetch.join(lambda: False)
    assert fetch.over
    return fetch.state, fetch.trouble


def sent():
    """Waits until every thread that answers a joiner has returned."""
    for thread in threading.enumerate():
        if thread.name == "state_answer":
            thread.join()


def ledger_of(found):
    state, trouble = found
    assert trouble == ""
    return state["ledger"]["steps"]


def refused(found, address):
    state, trouble = found
    return state is None and trouble.startswith(f"the state was not received from {address}: ")


def test_a_joiner_gets_the_state_as_it_is_with_tensors_of_its_own(offer):
    offer.publish(3, Snapshot(STATE, readers=2))
    state, trouble = fetched(Fetch(offer.address, 3))
    assert (trouble, state["ledger"]) == ("", {"steps": 7})
    assert state["model"]["half"].dtype is torch.bfloat16
    for name, value in STATE["model"].items():
        assert torch.equal(state["model"][name], value)
        assert state["model"][name].untyped_storage().nbytes() == value.nbytes, "it keeps no larger buffer alive"


@pytest.mark.parametrize("secret", ["", "other", "secret "])
def test_without_the_jobs_secret_no_state_is_given(offer, monkeypatch, secret):
    offer.publish(3, Snapshot(STATE, readers=2))
    monkeypatch.setenv("TRUELINE_SECRET", secret)
    assert refused(fetched(Fetch(offer.address, 3)), offer.address)


def test_a_state_of_a_newer_generation_is_not_given_to_a_joiner_of_an_older_one(offer):
    offer.publish(4, Snapshot(STATE))
    assert refused(fetched(Fetch(offer.address, 3)), offer.address)


def test_a_state_of_an_older_generation_is_not_given_to_a_joiner_of_a_newer_one(offer, monkeypatch):
    monkeypatch.setattr(state_transfer, "PATIENCE_S", 0.05)
    offer.publish(3, Snapshot(STATE, readers=2))
    assert refused(fetched(Fetch(offer.address, 4)), offer.address)


def test_a_joiner_that_is_early_waits_for_the_state_of_its_generation(offer):
    offer.publish(3, Snapshot(STATE, readers=2))
    early = Fetch(offer.address, 4)
    assert ledger_of(fetched(Fetch(offer.address, 3))) == 7  # the early one has been heard, or will be now
    offer.publish(4, Snapshot(NEWER))
    assert ledger_of(fetched(early)) == 8


def test_a_state_that_was_withdrawn_is_given_to_nobody(offer, monkeypatch):
    monkeypatch.setattr(state_transfer, "PATIENCE_S", 0.05)
    offer.publish(3, Snapshot(STATE, readers=2))
    offer.withdraw()
    assert refused(fetched(Fetch(offer.address, 3)), offer.address)


def answering(data):
    """The address of a member of the job that answers with `data` and hangs up."""

    def answer(_hello, connection):
        with connection:
            connection.sendall(data)
        listener.close()

    listener = PeerListener(answer, name="state")
    return listener.address


def message(body):
    return struct.pack("!Q", len(body)) + body


HEADER = json.dumps([{"t": 0}, [["float32", [4]]]]).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        message(HEADER)[:20],
        message(HEADER),
        message(HEADER) + bytes(15),
        message(b"{"),
        struct.pack("!Q", 1 << 40),
    ],
    ids=["nothing", "half a header", "no tensor", "a torn tensor", "no JSON", "a length beyond all bounds"],
)
def test_a_transfer_that_breaks_off_gives_no_state_and_says_so(data):
    address = answering(data)
    assert refused(fetched(Fetch(address, 3)), address)


def test_a_member_that_is_gone_gives_no_state(offer):
    offer.close()
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    assert refused(fetched(Fetch(address, 3)), address)


def test_a_stranger_that_asks_for_the_state_gets_no_byte_of_it(offer):
    offer.publish(3, Snapshot(STATE, readers=2))
    host, _, port = offer.address.rpartition(":")
    question = json.dumps({"secret": "guess", "generation": 3}).encode()
    greeting = b"TLP1" + struct.pack("!Bqq", 1, 3, -1) + bytes(32)
    for said in (struct.pack("!Q", 1 << 40), message(question), b"not json", b"\0", greeting + bytes(32)):
        with socket.create_connection((host, int(port)), timeout=100) as connection:
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            assert len(received(connection)) in (0, 64), "nothing, or the challenge"
    assert ledger_of(fetched(Fetch(offer.address, 3))) == 7


def received(connection):
    """Everything until the peer closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(1 << 16):
            data += more
    return data


FALSE = message(json.dumps([{"t": 0}, [["float32", [64]]]]).encode()) + bytes(256)


@pytest.mark.parametrize("prefix", [b"", bytes(64)], ids=["as before there was a proof", "after a false proof"])
def test_a_false_state_from_where_a_dead_source_listened_is_not_taken(monkeypatch, prefix):
    monkeypatch.setenv("TRUELINE_SECRET", "secret")
    stranger, heard = socket.create_server(("127.0.0.1", 0)), []

    def answer():
        connection, _ = stranger.accept()
        with connection, stranger:
            connection.sendall(prefix + FALSE)
            heard.append(received(connection))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    address = f"127.0.0.1:{stranger.getsockname()[1]}"
    assert refused(fetched(Fetch(address, 3)), address)
    thread.join()
    assert b"secret" not in heard[0]
    assert fetched(Fetch(answering(FALSE), 3))[1] == "", "the same bytes from a member of the job are a state"


def test_a_connection_for_another_purpose_gets_no_state(offer):
    offer.publish(3, Snapshot(STATE, readers=2))
    with handshake.connect(offer.address, Hello(99, 3), 100) as connection:
        assert received(connection) == b""


def test_whoever_waits_for_a_state_stops_when_it_is_needed_no_more(offer, monkeypatch):
    monkeypatch.setattr(state_transfer, "PATIENCE_S", 0.2)
    fetch = Fetch(offer.address, 3)
    asked = iter([False, True])
    fetch.join(lambda: next(asked))
    assert fetch.state is None
    fetched(fetch)


def test_a_state_is_received_into_the_models_own_tensors_where_they_fit(offer):
    offer.publish(3, Snapshot(STATE))
    room = {"w": torch.zeros(5), "half": torch.zeros(4, dtype=torch.bfloat16)}
    fetch = Fetch(offer.address, 3, Room(room))
    state, trouble = fetched(fetch)
    assert (trouble, fetch.moved, fetch.total) == ("", 26, 26)
    assert state["model"]["w"].data_ptr() == room["w"].data_ptr()
    assert room["w"].tolist() == [0, 1, 2, 3, 4]
    assert state["model"]["half"].tolist() == [1.0] * 3, "another shape gets its own memory"


def test_both_ends_know_how_many_bytes_have_moved(offer):
    taken = Snapshot(STATE)
    assert offer.progress == (0, 0)
    offer.publish(3, taken)
    assert offer.progress == (0, 26)
    fetched(Fetch(offer.address, 3))
    sent()
    assert taken.moved == 26
    assert offer.progress == (0, 0), "it is over"


def test_nothing_that_holds_the_interpreters_lock_grows_with_the_state(offer, monkeypatch):
    """A bytearray is filled with zeros under the lock: of a state of 3.6 GB that took longer than a lease."""
    filled, received, connect = [], [], handshake.connect

    class Listening(socket.socket):
        def recv_into(self, room, size, flags):
            received.append((size, flags))
            return super().recv_into(room, size, flags)

    def listening(*how):
        found = connect(*how)
        return Listening(found.family, found.type, fileno=found.detach())

    monkeypatch.setattr(handshake, "connect", listening)
    monkeypatch.setattr(state_transfer, "bytearray", lambda size: filled.append(size) or bytearray(size), raising=False)
    offer.publish(3, Snapshot({"model": {"w": torch.zeros(3 << 20)}}, live=lambda _: True))
    state, trouble = fetched(Fetch(offer.address, 3))
    assert (trouble, state["model"]["w"].sum().item()) == ("", 0.0)
    assert max(filled) < 1000, "the header alone"
    assert max(size for size, _ in received) == state_transfer.CHUNK
    assert len(received) == 1 + 3, "whole chunks: the kernel waits for them, without the lock"


class Members:
    """Two members in threads, of which the first has the state; `sums` fail from the given one on for a member."""

    def __init__(self, monkeypatch, *, fails=None):
        self.fails, self.lock = fails or {}, threading.Barrier(2)
        self.words, self.sent, self.here = [None, None], [], threading.local()
        monkeypatch.setattr(state_transfer.dist, "broadcast", self.broadcast)

    def broadcast(self, tensor, source, *, async_op):
        if self.here.rank == source:
            self.sent.append(tensor.nbytes)
        self.exchange(tensor)
        if self.here.rank != source:
            tensor.copy_(self.words[source])
        self.lock.wait()

    def exchange(self, tensor):
        self.words[self.here.rank] = tensor.clone()
        self.lock.wait()

    def sum_on_host(self, tensor):
        self.here.sums = getattr(self.here, "sums", 0) + 1
        if self.fails.get(self.here.rank) == self.here.sums:
            self.lock.abort()
        self.exchange(tensor)
        tensor.copy_(self.words[0] + self.words[1])
        self.lock.wait()

    def wait(self, work):
        """What this one begins is over at once."""

    def run(self, room):
        results = [None, None]

        def member(rank):
            self.here.rank = rank
            try:
                results[rank] = state_transfer.broadcast(
                    self, None if rank else STATE, source=0, room=room if rank else None
                )
            except RuntimeError as error:
                results[rank] = error

        threads = [threading.Thread(target=member, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def is_equal(state):
    return state["ledger"] == {"steps": 7} and all(
        torch.equal(state["model"][name], value) for name, value in STATE["model"].items()
    )


def test_a_member_on_the_sources_machine_reads_the_state_where_it_lies(monkeypatch):
    members = Members(monkeypatch)
    mine, received = members.run(Room())
    assert mine is STATE
    assert is_equal(received)
    assert received["model"]["w"].data_ptr() != STATE["model"]["w"].data_ptr()
    assert len(members.sent) == 2, "the header's length and the header"


def test_where_a_member_cannot_read_it_the_state_is_sent(monkeypatch):
    monkeypatch.setattr("trueline.parallel.peer_memory._read_memory", lambda *_: -1)
    members, room = Members(monkeypatch), {"w": torch.zeros(5)}
    _, received = members.run(Room(room))
    assert is_equal(received)
    assert received["model"]["w"].data_ptr() == room["w"].data_ptr()
    assert sum(members.sent[2:]) == 5 * 4 + 3 * 2


def test_a_member_that_needs_no_state_reads_none(monkeypatch):
    monkeypatch.setattr(state_transfer.PeerMemory, "reads", lambda *_: pytest.fail("it read the state"))
    assert Members(monkeypatch).run(None) == [STATE, None]


@pytest.mark.parametrize(("rank", "sums"), [(1, 1), (0, 2)], ids=["a reader dies", "the source leaves"])
def test_no_state_is_believed_unless_the_source_was_there_until_all_had_read_it(monkeypatch, rank, sums):
    results = Members(monkeypatch, fails={rank: sums}).run(Room())
    assert all(isinstance(result, RuntimeError) for result in results)


def test_spare_memory_that_was_touched_before_is_used_where_dtype_and_shape_fit(offer):
    room, like = Room(), torch.zeros(5)
    room._touch([like, like])
    spare = [tensor.data_ptr() for tensor in room._spare[torch.float32, like.shape]]
    first, other, half, new = room.allocate(
        None, [["float32", [5]], ["float32", [4]], ["float16", [5]], ["float32", [5]]]
    )
    assert [first.data_ptr(), new.data_ptr()] == spare[::-1]
    assert (list(other.shape), half.dtype) == ([4], torch.float16)
    room._touch([like])
    assert not room._spare[torch.float32, like.shape], "nobody needs more of it"
