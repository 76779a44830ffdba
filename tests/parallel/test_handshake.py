"""Promises of connections between workers: a process without the job's secret gets, gives and delays nothing."""

import hashlib
import hmac
import os
import queue
import socket
import struct
import threading

import pytest

from trueline.parallel import handshake
from trueline.parallel.handshake import Hello, PeerListener, connect

SECRET, HELLO = "the-secret-of-this-job", Hello(1, 7, 2)
GREETING = b"TLP1" + struct.pack("!Bqq", *HELLO)
WAIT_S = 30


@pytest.fixture(autouse=True)
def _job(monkeypatch):
    monkeypatch.setenv("TRUELINE_SECRET", SECRET)


class World(queue.Queue):
    """A listener, and what it accepted: pairs of hello and connection."""

    def __init__(self):
        super().__init__()
        self.listener = PeerListener(lambda *accepted: self.put(accepted), name="test")
        self.address = self.listener.address

    def call(self):
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=WAIT_S)

    def refuses(self, connection):
        """Whether the listener closes `connection`, and has handed nothing over."""
        try:
            while connection.recv(1024):
                pass
        except ConnectionError:  # it closed before it had read everything
            pass
        return self.empty()

    def still_serves(self):
        with connect(self.address, HELLO, WAIT_S) as mine:
            hello, theirs = self.get(timeout=WAIT_S)
            with theirs:
                mine.sendall(b"here")
                return hello == HELLO and theirs.recv(4) == b"here"


@pytest.fixture
def world():
    found = World()
    yield found
    found.listener.close()


class Stranger:
    """A process that listens where a worker did. `answer(connection)` runs for the first caller."""

    def __init__(self, answer):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, args=(answer,), daemon=True)
        self._thread.start()

    def _run(self, answer):
        connection, _ = self._listener.accept()
        with connection, self._listener:
            answer(connection)


def read(connection, size):
    return connection.recv(size, socket.MSG_WAITALL)


def mac(role, transcript, secret=SECRET):
    return hmac.new(secret.encode(), b"trueline " + role + b"\0" + transcript, hashlib.sha256).digest()


def test_two_workers_of_one_job_meet_and_know_what_the_connection_is_for(world):
    assert world.still_serves()


def test_the_proof_is_an_hmac_over_both_nonces_the_role_and_the_address(world):
    greeting = GREETING + bytes(32)
    with world.call() as caller:
        caller.sendall(greeting)
        nonce, theirs = read(caller, 32), read(caller, 32)
        transcript = greeting + nonce + world.address.encode()
        assert theirs == mac(b"listener", transcript)
        caller.sendall(mac(b"caller", transcript))
        hello, connection = world.get(timeout=WAIT_S)
        connection.close()
        assert hello == HELLO


def test_no_two_challenges_are_equal(world):
    nonces = set()
    for _ in range(4):
        with world.call() as caller:
            caller.sendall(GREETING + bytes(32))
            nonces.add(read(caller, 32))
    assert len(nonces) == 4


@pytest.mark.parametrize("secret", ["", "other", f"{SECRET} "])
def test_a_caller_without_the_secret_is_refused_and_learns_that(world, monkeypatch, secret):
    monkeypatch.setenv("TRUELINE_SECRET", secret)
    with pytest.raises(PermissionError, match="does not have the secret of this job"):
        connect(world.address, HELLO, WAIT_S)
    assert world.empty()


def wrong_proofs(nonce, theirs, transcript):
    return {
        "nothing known": bytes(32),
        "the listener's own": theirs,
        "another role": mac(b"listener", transcript),
        "another secret": mac(b"caller", transcript, "guess"),
        "another address": mac(b"caller", GREETING + bytes(32) + nonce + b"127.0.0.1:1"),
        "another nonce": mac(b"caller", GREETING + bytes(64)),
        "another generation": mac(b"caller", transcript.replace(struct.pack("!q", 7), struct.pack("!q", 8))),
    }


@pytest.mark.parametrize("kind", list(wrong_proofs(b"", b"", b"")))
def test_a_wrong_proof_is_refused(world, kind):
    greeting = GREETING + bytes(32)
    with world.call() as caller:
        caller.sendall(greeting)
        nonce, theirs = read(caller, 32), read(caller, 32)
        caller.sendall(wrong_proofs(nonce, theirs, greeting + nonce + world.address.encode())[kind])
        assert world.refuses(caller)
    assert world.still_serves()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"T", b"TLP2" + bytes(45), bytes(1 << 16), os.urandom(400)])
def test_what_is_no_greeting_is_refused_at_its_first_wrong_byte_or_at_its_end(world, data):
    with world.call() as caller:
        caller.sendall(data)
        if data == b"T":
            caller.shutdown(socket.SHUT_WR)
        assert world.refuses(caller)
    assert world.still_serves()


def test_the_secret_is_never_sent_not_even_to_a_stranger_that_listens_where_a_worker_did():
    heard = queue.SimpleQueue()

    def answer(connection):
        greeting = connection.recv(1 << 16)
        connection.sendall(os.urandom(64))
        heard.put(greeting + connection.recv(1 << 16))

    stranger = Stranger(answer)
    with pytest.raises(PermissionError, match=stranger.address):
        connect(stranger.address, HELLO, WAIT_S)
    sent = heard.get(timeout=WAIT_S)
    assert sent[:21] == GREETING
    assert len(sent) == 53, "no proof for a listener that has none"
    assert SECRET.encode() not in sent


def test_a_stranger_cannot_pass_the_proof_of_a_live_worker_on(world):
    """A relay between a caller and another worker would read and change what follows the handshake."""

    def relay(connection):
        with world.call() as real:
            real.sendall(read(connection, 53))
            connection.sendall(read(real, 64))
            connection.recv(1)

    with pytest.raises(PermissionError):
        connect(Stranger(relay).address, HELLO, WAIT_S)
    assert world.empty()


@pytest.mark.parametrize("answer", [lambda c: c.recv(1 << 16), lambda c: c.sendall(bytes(63))], ids=["none", "short"])
def test_a_listener_that_hangs_up_before_its_proof_fails_the_connection(answer):
    with pytest.raises(OSError, match=r"closed the connection|Connection reset"):
        connect(Stranger(answer).address, HELLO, WAIT_S)


def test_a_listener_that_answers_byte_by_byte_gets_the_time_of_one_handshake():
    over = threading.Event()

    def drip(connection):
        while not over.wait(0.01):
            connection.sendall(b"x")

    with pytest.raises(OSError, match=r"in time|timed out"):
        connect(Stranger(drip).address, HELLO, 0.1)
    over.set()


def test_a_caller_that_is_silent_is_closed_after_the_time_of_one_handshake(world, monkeypatch):
    monkeypatch.setattr(handshake, "PROOF_S", 0.05)
    with world.call() as silent, world.call() as half:
        half.sendall(GREETING)
        assert world.refuses(silent)
        assert world.refuses(half)
    assert world.still_serves()


def test_strangers_that_hold_connections_open_keep_no_worker_out(world, monkeypatch):
    monkeypatch.setattr(handshake, "MOST_UNPROVEN", 8)
    threads = threading.active_count()
    held = [world.call() for _ in range(20)]
    assert world.still_serves()
    assert threading.active_count() <= threads, "strangers cost no threads"
    assert all(world.refuses(stranger) for stranger in held[:12]), "the oldest were closed"
    for stranger in held:
        stranger.close()


def test_a_process_without_a_job_has_a_secret_that_no_other_process_can_know(world, monkeypatch):
    monkeypatch.delenv("TRUELINE_SECRET")
    mine = World()
    assert mine.still_serves()
    assert not hmac.compare_digest(handshake._job_secret(), b"")
    with pytest.raises(PermissionError):
        connect(world.address, HELLO, WAIT_S)
    mine.listener.close()


def test_a_closed_listener_accepts_nothing(world):
    world.listener.close()
    with pytest.raises(OSError):  # refused, or cut off as its thread ends
        connect(world.address, HELLO, 1)
