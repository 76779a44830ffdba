"""Promises of how the members of a generation meet: each is connected to each other one, and to no other process."""

import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from trueline.parallel import handshake, mesh
from trueline.parallel.handshake import Hello, Purpose
from trueline.parallel.store import PeerStore, StoreServer

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def _job(monkeypatch):
    monkeypatch.setenv("TRUELINE_SECRET", "the-secret-of-this-job")


@pytest.fixture
def server():
    found = StoreServer()
    yield found
    found.close()


class Member(threading.Thread):
    """One that meets the others; `links`, or the error."""

    def __init__(self, server, rank, size, patience_s=WAIT_S):
        super().__init__(daemon=True)
        self.store = PeerStore(server.address, 3, rank, timedelta(seconds=patience_s))
        self.given = rank, size, patience_s
        self.links, self.error = {}, None
        self.start()

    def run(self):
        rank, size, patience_s = self.given
        try:
            self.links = mesh.meet(self.store, 3, rank, size, patience_s, lambda link: None)
        except (OSError, dist.DistError) as error:
            self.error = error
        self.store.release()


def met(members):
    for member in members:
        member.join()
        assert member.error is None
    return [member.links for member in members]


def close(all_links):
    for links in all_links:
        for link in links.values():
            link.close()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_member_is_connected_with_each_other_one(server, size):
    all_links = met([Member(server, rank, size) for rank in range(size)])
    assert [sorted(links) for links in all_links] == [[o for o in range(size) if o != rank] for rank in range(size)]
    for rank, links in enumerate(all_links):
        for other, link in links.items():
            link.sendall(bytes([rank]))
            assert all_links[other][rank].recv(1) == bytes([rank])
    close(all_links)


def test_a_member_that_does_not_come_fails_the_others_in_time_and_leaves_no_connection(server):
    first, second = (Member(server, rank, 3, patience_s=0.2) for rank in range(2))
    first.join()
    second.join()
    assert isinstance(first.error, TimeoutError)
    assert isinstance(second.error, TimeoutError)
    assert (first.links, second.links) == ({}, {})


@pytest.mark.parametrize(
    "hello", [Hello(Purpose.LINK, 2, 1), Hello(Purpose.LINK, 4, 1), Hello(Purpose.STATE, 3, 1)], ids=str
)
def test_a_member_of_another_generation_takes_no_place(server, hello):
    first = Member(server, 0, 2)
    reader = PeerStore(server.address, 3, 1, timedelta(seconds=WAIT_S))
    with handshake.connect(reader.get("member-0").decode(), hello, WAIT_S) as late:
        assert late.recv(1) == b"", "it is closed"
    reader.release()
    close(met([first, Member(server, 1, 2)]))


def test_a_place_is_taken_once(server):
    first = Member(server, 0, 3)
    reader = PeerStore(server.address, 3, 1, timedelta(seconds=WAIT_S))
    address, hello = reader.get("member-0").decode(), Hello(Purpose.LINK, 3, 1)
    with handshake.connect(address, hello, WAIT_S) as one, handshake.connect(address, hello, WAIT_S) as other:
        assert other.recv(1) == b""
        with handshake.connect(address, Hello(Purpose.LINK, 3, 2), WAIT_S):
            links = met([first])[0]
            one.sendall(b"x")
            assert links[1].recv(1) == b"x"
            close([links])
    reader.release()


def test_a_stranger_takes_no_place_though_it_comes_first(server):
    first = Member(server, 0, 2)
    reader = PeerStore(server.address, 3, 1, timedelta(seconds=WAIT_S))
    host, _, port = reader.get("member-0").decode().rpartition(":")
    reader.release()
    strangers = [socket.create_connection((host, int(port))) for _ in range(20)]
    for stranger in strangers:
        stranger.sendall(b"\1" + bytes(7) + b"\x7f" * 48)
    all_links = met([first, Member(server, 1, 2)])
    all_links[1][0].sendall(b"x")
    assert all_links[0][1].recv(1) == b"x"
    close([*all_links, dict(enumerate(strangers))])


class Piecemeal:
    """A link over which bytes come one by one, as a network may cut them."""

    def __init__(self, row: bytes) -> None:
        self.left, self.sent = row, b""

    def settimeout(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s

    def sendall(self, row: bytes) -> None:
        self.sent += row

    def recv(self, size: int, flags: int = 0) -> bytes:
        piece, self.left = self.left[:1], self.left[1:]
        return piece


def test_rows_are_exchanged_whole_in_whatever_pieces_they_come(monkeypatch):
    monkeypatch.setattr(mesh, "REASON_S", 0.0)
    links = {1: Piecemeal(b"one"), 2: Piecemeal(b"two")}
    assert mesh.exchange(links, WAIT_S, b"own") == {1: b"one", 2: b"two"}
    assert [link.sent for link in links.values()] == [b"own", b"own"]
    with pytest.raises(ConnectionError, match="rank 3 has left while the group forms"):
        mesh.exchange({3: Piecemeal(b"tw")}, WAIT_S, b"own")
