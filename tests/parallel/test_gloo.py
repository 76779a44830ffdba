"""Promises of the process group, each of which was once broken by a stall."""

import fcntl
import os
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import trueline
from trueline.parallel import gloo as group
from trueline.parallel import group_sockets, handshake
from trueline.parallel.gloo import GlooGroup
from trueline.parallel.handshake import Hello, PeerListener, Purpose
from trueline.parallel.store import PeerStore, StoreServer
from worlds.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _job(monkeypatch):
    monkeypatch.setenv("TRUELINE_SECRET", "the-secret-of-this-job")


PEER = """
import sys, torch, torch.distributed as dist
from trueline.parallel import gloo as groups
groups.FORM_TIMEOUT_S = 30.0
group = groups.GlooGroup()
print("here", flush=True)
group.form(2, rank=1, size=2, store=sys.argv[1])
value = torch.ones(1)
dist.all_reduce(value)
print(int(value.item()))
group.close()
"""


def test_the_rendezvous_store_listens_on_the_loopback_alone():
    store = StoreServer()
    port = int(store.address.rpartition(":")[2])
    listening = [c for c in psutil.Process().net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"]
    assert [c.laddr.ip for c in listening] == ["127.0.0.1"]
    store.close()


@pytest.mark.jobs
def test_a_member_whose_group_failed_to_form_meets_one_that_never_failed(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("trueline.parallel.gloo.FORM_TIMEOUT_S", 0.05)
    store = StoreServer()
    peer = subprocess.Popen([sys.executable, "-c", PEER, store.address], stdout=subprocess.PIPE, text=True)
    group = GlooGroup()
    with pytest.raises(RuntimeError):
        group.form(1, rank=0, size=2, store=store.address)  # nobody comes
    assert peer.stdout.readline() == "here\n"  # torch is imported
    monkeypatch.setattr("trueline.parallel.gloo.FORM_TIMEOUT_S", 30.0)
    group.form(2, rank=0, size=2, store=store.address)
    value = torch.ones(1)
    dist.all_reduce(value)
    assert (peer.communicate()[0], peer.returncode) == ("2\n", 0)
    assert value.item() == 2
    group.close()
    store.close()


@pytest.mark.jobs
def test_where_the_system_has_no_socket_filters_gloo_connects_by_itself_and_it_is_said(monkeypatch):
    monkeypatch.setattr("trueline.parallel.gloo.FORM_TIMEOUT_S", 30.0)
    monkeypatch.setattr("trueline.parallel.gloo_sockets.find_lack", lambda: "no socket filters")
    said = []
    monkeypatch.setattr("trueline.parallel.gloo.events.emit", lambda name, **fields: said.append((name, fields)))
    lacking = "from trueline.parallel import gloo_sockets; gloo_sockets.find_lack = lambda: 'none'\n" + PEER
    store = StoreServer()
    peer = subprocess.Popen([sys.executable, "-c", lacking, store.address], stdout=subprocess.PIPE, text=True)
    assert peer.stdout.readline() == "here\n"
    group = GlooGroup()
    group.form(2, rank=0, size=2, store=store.address)
    value = torch.ones(1)
    dist.all_reduce(value)
    assert (peer.communicate()[0], peer.returncode) == ("2\n", 0)
    assert said == [("gloo.unproven", {"why": "no socket filters"})]
    group.close()
    store.close()


def test_each_try_to_form_a_group_that_fails_gives_the_next_more_time(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("trueline.parallel.gloo.FORM_TIMEOUT_S", 0.05)
    store = StoreServer()
    group, allowed = GlooGroup(), []
    for generation in range(1, 4):
        allowed.append(group.patience_s)
        with pytest.raises(RuntimeError):
            group.form(generation, rank=0, size=2, store=store.address)  # nobody comes
    monkeypatch.setattr("trueline.parallel.gloo.FORM_TIMEOUT_S", 2.0)
    group.form(4, rank=0, size=1, store=store.address)
    assert allowed == [0.05, 0.1, 0.2]
    assert group.patience_s == 2.0
    group.close()
    store.close()


def sockets_of(formed):
    there = group_sockets._list_sockets()
    return [there[inode] for inode in there.keys() & formed._sockets._inodes]


def unsent(number):
    """How many bytes wait in a socket for its peer to read what came before them; 0 for a listening one."""
    try:
        return struct.unpack("i", fcntl.ioctl(number, termios.TIOCOUTQ, b"\0" * 4))[0]
    except OSError:
        return 0


def test_a_cut_fails_a_pending_operation_at_once_and_leaves_other_sockets_alone(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = StoreServer()
    code = (
        "import sys, torch, torch.distributed as dist\n"
        "from trueline.parallel import gloo as groups\n"
        "groups.FORM_TIMEOUT_S = 30.0\n"
        "group = groups.GlooGroup()\n"
        "print('here', flush=True)\n"
        "group.form(1, rank=1, size=2, store=sys.argv[1])\n"
        "work = dist.all_reduce(torch.ones(16 << 20), async_op=True)\n"
        "print('posted', flush=True); sys.stdin.readline()\n"
    )
    peer = subprocess.Popen(
        [sys.executable, "-c", code, store.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    group = GlooGroup()
    assert peer.stdout.readline() == "here\n"  # torch is imported
    monkeypatch.setattr("trueline.parallel.gloo.FORM_TIMEOUT_S", 30.0)
    group.form(1, rank=0, size=2, store=store.address)
    assert peer.stdout.readline() == "posted\n"
    peer.send_signal(signal.SIGSTOP)  # messages to it are partly written from now on
    large = dist.all_reduce(torch.ones(16 << 20), async_op=True)

    def partly_written():
        if any(map(unsent, sockets_of(group))):
            return True
        peer.send_signal(signal.SIGCONT)  # for a moment: it has not told yet that it is ready to receive
        peer.send_signal(signal.SIGSTOP)
        return False

    until(partly_written, "the socket's buffer is full, and the rest of the message not written")
    assert not large.is_completed()
    assert group.cut() >= 1
    with pytest.raises(RuntimeError, match="gloo: the group was cut"):
        group.wait(large)  # gloo itself waits for its timeout
    group.close()
    assert group.cut() == 0
    known = PeerStore(store.address, 1, 0, timedelta(seconds=30))
    known.set("still", "there")
    assert known.get("still") == b"there", "the store still serves"
    known.release()
    store.close()
    peer.kill()
    peer.communicate()


class Operation:
    """An operation that is over after so many looks at it; `error` is what it ends with."""

    def __init__(self, looks: int, error: str = "") -> None:
        self.looks, self.error = looks, error

    def is_completed(self) -> bool:
        return self.looks <= 0

    def wait(self, timeout: object = None) -> None:
        self.looks -= 1
        if self.looks > 0:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


def test_a_wait_goes_on_until_the_operation_is_over_and_tells_how_it_ended():
    group = GlooGroup()
    group.wait(Operation(3))
    with pytest.raises(RuntimeError, match="gloo: Connection closed by peer"):
        group.wait(Operation(3, "Connection closed by peer"))


def test_an_operation_that_ends_in_the_moment_in_which_a_look_at_it_does_has_not_failed():
    class JustOver(Operation):
        def wait(self, timeout: object = None) -> None:
            self.looks -= 1
            if self.looks == 0:  # it ended after the wait for it, before anybody asked
                raise RuntimeError("Operation timed out!")
            super().wait(timeout)

    GlooGroup().wait(JustOver(1))


def test_what_an_operation_did_before_a_cut_counts_and_what_it_might_do_after_it_is_not_waited_for():
    group = GlooGroup()
    group.open = True
    group.cut()
    group.wait(Operation(1))
    with pytest.raises(RuntimeError, match="gloo: the group was cut"):
        group.wait(Operation(2))


def test_a_group_whose_cut_came_before_it_was_formed_is_not_formed():
    store = StoreServer()
    group = GlooGroup()
    group.cut_until_left(5)
    with pytest.raises(RuntimeError, match="gloo: generation 4 was cut"):
        group.form(4, rank=0, size=2, store=store.address)  # the second member is dead: it would wait
    group.close()
    group.form(5, rank=0, size=1, store=store.address)
    group.close()


def test_a_death_while_a_group_forms_holds_nobody_up(monkeypatch):
    """Whoever connects to the dead member tries again and again, with no socket that a cut could shut."""
    store = StoreServer()
    forming, outcome, trying, over = GlooGroup(), queue.SimpleQueue(), threading.Event(), threading.Event()

    def tries_again(*_):
        trying.set()
        over.wait()
        raise RuntimeError("timed out at last")

    def form():
        try:
            forming.form(4, rank=0, size=2, store=store.address)
        except RuntimeError as error:
            outcome.put(str(error))
            forming.close()

    with monkeypatch.context() as dead:
        dead.setattr(group, "_connect_members", tries_again)
        thread = threading.Thread(target=form, daemon=True)
        thread.start()
        assert trying.wait(100)
        forming.cut_until_left(5)
        thread.join()
    assert "generation 4 was not formed: it was cut" in outcome.get_nowait()
    forming.form(5, rank=0, size=1, store=store.address)
    over.set()  # what was given up comes to its end in nobody's way
    dist.all_reduce(torch.ones(1))
    forming.close()


def test_whatever_breaks_while_a_group_forms_is_raised_where_its_member_waits(monkeypatch):
    monkeypatch.setattr(group, "_connect_members", lambda *_: "no group")
    forming = GlooGroup()
    with pytest.raises(RuntimeError, match="generation 4 was not formed"):
        forming.form(4, rank=0, size=1, store="here:1")
    forming.close()


def test_nothing_waits_for_gloo_itself(monkeypatch):
    """A large operation that a peer left in the middle would wait for its timeout, whatever is cut."""
    sources = [path for path in Path(trueline.__file__).parent.rglob("*.py") if "dist." in path.read_text()]
    lines = [line for path in sources for line in path.read_text().splitlines()]
    calls = [line for line in lines if re.search(r"dist\.(all_|broad)", line)]
    assert calls
    assert all("async_op=True" in line for line in calls), calls


def test_a_collective_inside_torch_ends_with_its_own_outcome_or_with_the_cut():
    def fails():
        raise RuntimeError("Connection closed by peer")

    group, over = GlooGroup(), threading.Event()
    group.call(lambda: None)
    with pytest.raises(RuntimeError, match="gloo: Connection closed by peer"):
        group.call(fails)
    group.open = True
    group.cut()
    with pytest.raises(RuntimeError, match="gloo: the group was cut"):
        group.call(over.wait)
    over.set()


def test_a_cut_leaves_sockets_alone_that_were_opened_after_the_group_had_formed():
    """A user's data set reads over connections of its own, and gRPC connects to a master that came back."""
    store = StoreServer()
    group = GlooGroup()
    group.form(1, rank=0, size=1, store=store.address)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        theirs, _ = server.accept()
        with theirs:
            group.cut()
            mine.sendall(b"here")
            assert theirs.recv(4) == b"here"
    group.close()


def test_leaving_a_group_that_did_not_form_cuts_no_member_that_the_store_has_accepted_for_the_next(monkeypatch):
    """It was cut now and then, when it was faster than this member: the next group did not form either."""
    monkeypatch.setattr("trueline.parallel.gloo.FORM_TIMEOUT_S", 0.05)
    store, group = StoreServer(), GlooGroup()
    with pytest.raises(RuntimeError, match="generation 1 was not formed"):
        group.form(1, rank=0, size=2, store=store.address)  # nobody comes
    early = PeerStore(store.address, 2, 1, timedelta(seconds=30))
    early.set("member-1", "is here")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        theirs, _ = server.accept()  # as a data set's, opened meanwhile
        with theirs:
            group.close()
            mine.sendall(b"here")
            assert theirs.recv(4) == b"here"
    assert early.get("member-1") == b"is here"
    early.release()
    store.close()


def test_a_connection_that_comes_after_the_cut_of_its_group_is_shut_at_once():
    sockets = group_sockets.GroupSockets()
    mine, theirs = (one for one in linked())
    with mine, theirs:
        assert sockets.cut() == 0
        sockets.add(mine)
        assert theirs.recv(1) == b""


def test_a_cut_ends_what_gloo_or_nccl_opened_out_of_sight_and_spares_what_a_listener_of_the_job_accepted():
    sockets, accepted = group_sockets.GroupSockets(), queue.SimpleQueue()
    listener = PeerListener(lambda hello, connection: accepted.put(connection), name="state")
    with sockets.watch():
        mine, theirs = linked()
        caller = handshake.connect(listener.address, Hello(Purpose.STATE, 1), 30)
        fetching = accepted.get(timeout=100)
    sockets._inodes.discard(os.fstat(caller.fileno()).st_ino)  # the peer's end, in another process
    with mine, theirs, caller, fetching:
        assert sockets.cut() == 2
        assert mine.recv(1) == theirs.recv(1) == b""
        fetching.sendall(b"state")
        assert caller.recv(5) == b"state"
    listener.close()


def linked():
    """Two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        return mine, server.accept()[0]
