"""Frames in memory that a worker and a server share: the bytes of the socket, and no memory used again too early."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from trueline.ps import dial
from trueline.ps.client import PsClient
from trueline.ps.gradients import Gradients
from trueline.ps.link import ServerLink
from trueline.ps.shared_memory import HEADER, SIZE, Buffer, CallerMemory, FoundFrame, ListenerMemory, ReplyRoom
from trueline.ps.wire import HEAD, Array, Call, FrameError, Inbox, PullReply, ReceivedFrame, encode
from worlds.parameter_servers import SECRET, TABLE, world
from worlds.waiting import until_told


def share(size: int = SIZE) -> tuple[CallerMemory, ListenerMemory]:
    caller = CallerMemory(size)
    listener = ListenerMemory(caller.handle)
    return caller, listener


def receive(place: bytes, by: CallerMemory | ListenerMemory | None) -> ReceivedFrame:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(place)
        frame = Inbox(by).receive(there)
    assert frame is not None
    return frame


def ask(caller: CallerMemory, listener: ListenerMemory, number: int, ids: Array, reply: int) -> ReplyRoom:
    place = caller.send(number, encode(Call.PULL, number, None, [ids]), reply)
    assert place is not None
    assert len(place) == HEAD.size
    frame = receive(place, listener)
    assert frame.number == number
    np.testing.assert_array_equal(frame.arrays[0], ids)
    assert frame.room is not None
    return frame.room


def answer(caller: CallerMemory, room: ReplyRoom, number: int, arrays: list[Array]) -> list[Array]:
    place = room.write(encode(Call.OK, number, PullReply(3), arrays))
    assert place is not None
    frame = receive(place, caller)
    caller.free(number)
    assert (frame.kind, frame.number, frame.read(PullReply).steps) == (Call.OK, number, 3)
    return frame.arrays


def taken(caller: CallerMemory) -> int:
    return 512 * os.fstat(caller.handle).st_blocks


def test_a_request_and_its_reply_travel_with_the_same_bytes() -> None:
    caller, listener = share()
    random = np.random.default_rng(0)
    for number in range(1, 40):
        ids = random.integers(0, 1 << 60, int(random.integers(1200, 9000)))
        made = [random.standard_normal((len(ids), 5)).astype("f4"), random.random(3).astype("f4"), np.ones(7, "u1")]
        room = ask(caller, listener, number, ids, sum(one.nbytes + 8 for one in made))
        rows = room.empty((len(ids), 5), np.float32)
        rows[:] = made[0]
        for one, other in zip(made, answer(caller, room, number, [rows, *made[1:]]), strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_memory_of_a_reply_stays_as_long_as_one_of_its_arrays() -> None:
    caller, listener = share()
    held = []
    for number in range(1, 30):
        room = ask(caller, listener, number, np.arange(2000), 80_000)
        held.append(answer(caller, room, number, [np.full((2000, 10), number, np.float32)])[0][5:7])
    assert [one.min() == one.max() == number for number, one in enumerate(held, 1)] == [True] * 29
    before = taken(caller)
    held.clear()
    gc.collect()
    for number in range(30, 60):
        answer(caller, ask(caller, listener, number, np.arange(2000), 80_000), number, [np.ones(9, np.float32)])
    assert taken(caller) == before


def test_memory_that_is_free_again_is_used_again_whatever_the_sizes() -> None:
    caller, listener = share(8 << 20)
    random = np.random.default_rng(1)
    for number in range(1, 2000):
        ids = np.arange(int(random.integers(1100, 60_000)))
        answer(caller, ask(caller, listener, number, ids, 8 * len(ids)), number, [ids])


def test_what_is_small_or_finds_no_memory_goes_through_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    caller, _ = share(1 << 20)
    assert caller.send(1, encode(Call.PULL, 1, None, [np.arange(9)])) is None
    assert caller.send(2, encode(Call.PULL, 2, None, [np.arange(200_000)])) is None

    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    caller, _ = share(64 << 20)
    assert caller.send(1, encode(Call.PULL, 1, None, [np.arange(9000)])) is None


def test_a_reply_that_is_larger_than_its_room_goes_through_the_socket() -> None:
    caller, listener = share()
    room = ask(caller, listener, 1, np.arange(2000), 8000)
    rows = room.empty((5000, 5), np.float32)
    rows[:] = 7.0
    assert room.write(encode(Call.OK, 1, None, [rows])) is None
    first, second = room.empty((10, 4), np.float32), room.empty((20, 4), np.float32)
    first[:], second[:] = 1.0, 2.0
    assert room.write(encode(Call.OK, 1, None, [second, first])) is None  # one would be written over the other
    assert (first.max(), second.min()) == (1.0, 2.0)
    assert room.write(encode(Call.OK, 1, "x" * HEADER, [first])) is None


def test_a_place_outside_of_the_memory_is_no_frame() -> None:
    caller, listener = share(1 << 20)
    place = caller.send(1, encode(Call.PULL, 1, None, [np.arange(2000)]), 8000)
    assert place is not None
    numbers = np.frombuffer(place[4:], "<u4").copy()
    for at, by in ((0, listener), (1, listener), (2, listener), (3, listener), (0, caller), (1, caller), (2, caller)):
        wrong = numbers.copy()
        wrong[at] = 1 << 30
        with pytest.raises(FrameError):
            receive(place[:4] + wrong.tobytes(), by)
    with pytest.raises(FrameError):
        receive(place, None)


def list_targets(handles: Path) -> list[str]:
    found = []
    for one in handles.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(one))
    return found


@pytest.mark.slow
def test_only_memory_that_cannot_become_shorter_is_shared(tmp_path: Path) -> None:
    file = (tmp_path / "file").open("w+b")
    file.truncate(1 << 20)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 1 << 20)
    with world(tmp_path) as servers:
        servers.begin(1)
        address = servers.addresses("server-0")
        assert address is not None
        handles = Path(f"/proc/{servers.processes['server-0'].pid}/fd")
        for handle in (file.fileno(), unsealed):
            connection, shared = dial.dial(address.unix, SECRET, 10, handle)
            assert not shared
            assert not [one for one in list_targets(handles) if "unsealed" in one or one == file.name]
            connection.close()
            servers.stats("server-0")
        with pytest.raises(FrameError, match="secret"):
            dial.dial(address.unix, b"another", 10, unsealed)
        caller = CallerMemory()
        for where, expected in ((address.tcp, False), (address.unix, True)):
            connection, shared = dial.dial(where, SECRET, 10, caller.handle)
            connection.close()
            assert shared is expected
    file.close()
    os.close(unsealed)


def count_places(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each reply lay in shared memory."""
    found: list[bool] = []
    find = CallerMemory.find

    def note(memory: CallerMemory, place: Buffer) -> FoundFrame:
        found.append(True)
        return find(memory, place)

    monkeypatch.setattr(CallerMemory, "find", note)
    return found


MANY = np.arange(6000, dtype=np.int64) * 977


def many(minibatch: int) -> Gradients:
    rows = np.ones((len(MANY), 4), np.float32)
    return Gradients(0, minibatch, 1.0, (1.0,), {TABLE: (MANY, rows)}, {"bias": np.ones(3, np.float32)})


def pull_many(client: PsClient) -> set[float]:
    pulled = client.pull({TABLE: MANY}, timeout_s=30)
    return set(np.unique(pulled.rows[TABLE]).tolist()) | set(np.unique(pulled.dense["bias"]).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_large_pushes_that_wait_for_the_end_of_a_cut_are_applied_as_they_were_sent(tmp_path: Path, count: int) -> None:
    with world(tmp_path) as servers:
        client = servers.client(servers.begin(count), outstanding=4)

        async def cut() -> None:
            links = [ServerLink(servers.addresses, ref, SECRET) for ref in client.routing.servers]
            for link in links:
                await link.begin_cut(1, {})
            for minibatch in range(3):
                client.push(many(minibatch))
            for link in links:
                await until_told(partial(count_queued, link, 3), "three queued pushes")
            assert [pull_many(client) for _ in range(20)] == [{0.0}] * 20
            for link in links:
                await link.close()

        asyncio.run(cut())
        client.drain(30)
        assert pull_many(client) == {-3.0}
        client.close()


async def count_queued(link: ServerLink, count: int) -> bool:
    return (await link.stats()).queued == count


@pytest.mark.slow
def test_servers_that_are_killed_under_large_pushes_apply_each_once(tmp_path: Path) -> None:
    with world(tmp_path) as servers:
        client = servers.client(servers.begin(2), outstanding=8)
        for minibatch in range(60):
            client.push(many(minibatch))
            if minibatch % 12 == 11:
                ref = f"server-{minibatch // 12 % 2}"
                servers.kill(ref)
                servers.start(ref)
        client.drain(60)
        assert pull_many(client) == {-60.0}
        client.close()


@pytest.mark.slow
def test_a_worker_on_another_host_and_one_on_this_host_get_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path) as servers:
        routing = servers.begin(1)

        def find_remote(ref: str) -> dial.ServerAddress | None:
            address = servers.addresses(ref)
            return None if address is None else msgspec.structs.replace(address, unix="")

        near, far = servers.client(routing), PsClient(find_remote, routing, SECRET)
        random = np.random.default_rng(5)
        places = count_places(monkeypatch)
        for minibatch in range(6):
            rows = random.standard_normal((len(MANY), 4)).astype("f4")
            client = (near, far)[minibatch % 2]
            client.push(Gradients(0, minibatch, 1.0, (0.1,), {TABLE: (MANY, rows)}, {"bias": rows[:3, 0].copy()}))
            client.drain(30)
            pulled = [one.pull({TABLE: MANY}, timeout_s=30) for one in (near, far)]
            np.testing.assert_array_equal(pulled[0].rows[TABLE], pulled[1].rows[TABLE])
            np.testing.assert_array_equal(pulled[0].dense["bias"], pulled[1].dense["bias"])
        assert len(places) == 5  # all but the first, which does not know how long a row is
        near.close()
        far.close()
