"""Process groups meet at the master: the hook of a script's processes and the service that it reaches."""

import asyncio
import collections
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from trueline.train.learners.rendezvous import Rendezvous
from trueline.train.learners.scripts import hook
from worlds.waiting import until

MINUTE = timedelta(minutes=1)


class Meeting:
    """A master's service for learners, each at a socket of its own, as their relays have it."""

    def __init__(self, folder: Path, learners: int) -> None:
        self.noted, self.faults = [], []
        self.rendezvous = Rendezvous(
            learners, lambda name, **fields: self.noted.append((name, fields)), self.faults.append
        )
        self._paths = {number: folder / f"s{number}" for number in range(1, learners + 1)}
        self._ready, self._tasks = threading.Event(), set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        self._ready.wait()

    async def _run(self) -> None:
        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        servers = [
            await asyncio.start_unix_server(functools.partial(self._serve, number), path)
            for number, path in self._paths.items()
        ]
        self._ready.set()
        await self._stop.wait()
        for server in servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())
        try:
            await self.rendezvous.serve(number, reader, writer)
        finally:
            writer.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@pytest.fixture
def meet(tmp_path, monkeypatch):
    """Starts a Meeting of some learners."""
    made = []

    def start(learners):
        made.append(Meeting(tmp_path, learners))
        return made[-1]

    monkeypatch.setattr(hook, "_joined", [])
    monkeypatch.setattr(hook, "_rounds", collections.Counter())
    yield start
    for connection in hook._joined:
        connection.close()
    for one in made:
        one.close()


def join(folder, learner, rank, world, key="/job/x"):
    """A process of a learner joins a group; returns the master's answer."""
    connection = hook._Connection(60.0, str(folder / f"s{learner}"))
    hook._joined.append(connection)
    return connection.ask(60.0, op="join", key=key, round=1, rank=rank, world=world, pid=learner, wait_s=60.0)


def test_a_group_forms_once_all_are_there_and_equal_ranks_are_corrected(meet, tmp_path):
    meeting = meet(3)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda learner: join(tmp_path, learner, 0, 3), (1, 2, 3)))
    assert [one["rank"] for one in found] == [0, 1, 2]
    assert {one["world"] for one in found} == {3}
    assert [name for name, _ in meeting.noted] == ["group.formed", "group.corrected"]


def test_members_that_ask_for_different_sizes_are_refused_with_both(meet, tmp_path):
    meeting = meet(2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, tmp_path, 1, 0, 2)
        until(lambda: meeting.rendezvous.count_waiting() == 1, "the first member")
        with pytest.raises(RuntimeError, match=r"learner 2 asks for a group of 3 processes under /job/x, .* for 2"):
            join(tmp_path, 2, 1, 3)
        join(tmp_path, 2, 1, 2)
        assert first.result()["rank"] == 0


def test_one_member_too_many_is_refused(meet, tmp_path):
    meet(1)
    join(tmp_path, 1, 0, 1)
    with pytest.raises(RuntimeError, match="has its 1 processes"):
        join(tmp_path, 1, 0, 1)


def test_a_member_that_goes_without_a_bye_is_a_death_and_one_with_it_is_none(meet, tmp_path):
    meeting = meet(1)
    for key in ("/job/a", "/job/b", "/job/c"):
        join(tmp_path, 1, 0, 1, key=key)
    polite, failing, dying = hook._joined
    polite.send(op="bye")
    polite.close()
    failing.send(op="failed", code=3)
    failing.close()
    until(lambda: meeting.faults, "the failure")
    assert meeting.faults == [(1, 1, 3)]
    dying.close()
    until(lambda: len(meeting.faults) == 2, "the death")
    assert meeting.faults[1] == (1, 1, 0)


def test_the_store_of_a_group_does_what_torchs_stores_do(meet, tmp_path, monkeypatch):
    meet(1)
    monkeypatch.setenv(hook.SOCKET, str(tmp_path / "s1"))
    monkeypatch.setattr(hook, "_call_at_exit", lambda function: None)
    store, rank, world = hook._join("/job/x", 0, 1, MINUTE)
    assert (rank, world) == (0, 1)
    store.set("a", b"\0\xff")
    assert store.get("a") == b"\0\xff"
    assert [store.add("n", 2), store.add("n", 3)] == [2, 5]
    assert store.compare_set("a", b"\0\xff", b"z") == b"z"
    assert store.check(["a"])
    assert not store.check(["b"])
    assert store.delete_key("a")
    assert store.num_keys() == 1
    with pytest.raises(dist.DistStoreError, match="got no"):
        store.wait(["b"], timedelta(seconds=0.05))
    prefixed = dist.PrefixStore("p", store)  # by torch's C++
    prefixed.set("k", b"v")
    assert prefixed.get("k") == b"v"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "late")
        store.set("late", b"1")
        assert waiting.result() == b"1"
    for connection in store._idle:
        connection.close()


def test_a_learner_has_parted_once_none_of_its_processes_has_a_connection(meet, tmp_path):
    meeting = meet(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda learner: join(tmp_path, learner, learner - 1, 2), (1, 2)))

    def wait(learner: int, limit_s: float):
        return asyncio.run_coroutine_threadsafe(meeting.rendezvous.wait_parted(learner, limit_s), meeting._loop)

    parting = wait(1, 60.0)
    wait(1, 0.0).result()  # there is a limit
    assert not parting.done()
    for connection in hook._joined:
        connection.close()
    parting.result()
    assert meeting.faults[0].learner in (1, 2), "the death is known before the parting"
