"""Promises of sums on one host: all members get the same, and none counts what a member held that had left."""

import hashlib
import itertools
import os
import select
import threading

import pytest
import torch

from trueline.parallel import gloo_sockets, local_sums, peer_memory
from trueline.parallel.exchange import is_collective
from trueline.parallel.gloo import GlooGroup
from trueline.parallel.local_sums import LocalSums
from trueline.parallel.peer_memory import HostMemories, PeerMemory
from trueline.parallel.store import StoreServer
from worlds.cases import few
from worlds.groups import in_processes

pytestmark = pytest.mark.slow


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setenv("TRUELINE_SECRET", "the-secret-of-this-job")
    server = StoreServer()
    yield server.address
    server.close()


def _form(store: str, rank: int, size: int) -> GlooGroup:
    group = GlooGroup()
    group.form(1, rank=rank, size=size, store=store)
    assert isinstance(group._host_sums, LocalSums)
    return group


def _is_lost(group: GlooGroup, numbers: int) -> bool:
    """Whether sums fail, this one and a later one, as errors of the group."""
    found = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            group.wait_bucket(group.sum_bucket(torch.ones(numbers)))
        found.append(is_collective(error.value))
    group.close()
    return all(found)


@pytest.mark.parametrize("size", few([2, 3, 5], 1, pytest.mark.jobs))
def test_members_on_one_host_get_one_and_the_same_sum_and_may_leave_at_once(store, size):
    def work(rank):
        group, digests = _form(store, rank, size), []
        for numbers, dtype in ((0, torch.float32), (1, torch.float32), (7, torch.float64), (100_003, torch.bfloat16),
                               (100_003, torch.float32), (3_000_001, torch.float32)):  # fmt: skip
            values = [torch.randn(numbers, generator=torch.Generator().manual_seed(other)) for other in range(size)]
            mine = values[rank].to(dtype, copy=True)
            group.wait_bucket(group.sum_bucket(mine))
            within = 1e-5 if dtype != torch.bfloat16 else 0.1
            torch.testing.assert_close(mine.float(), torch.stack(values).sum(0), rtol=within, atol=within)
            digests.append(hashlib.sha256(mine.view(torch.uint8).numpy().tobytes()).hexdigest())
        group.close()
        return digests

    first, *others = in_processes(size, work)
    assert all(found == first for found in others)


@pytest.mark.parametrize("numbers", [5, 100_003])
@pytest.mark.parametrize(
    ("counts", "order"), [([3, 4], [0, 1]), ([4, 3], [1, 0]), ([2, 0, 5], [0, 1, 2]), ([1, 2, 4], [2, 0, 1])]
)
def test_rows_of_members_on_one_host_are_added_bit_by_bit_in_their_order(store, numbers, counts, order):
    size, total = len(counts), sum(counts)
    width = -(-numbers // size)
    shards = torch.randn(2, total, size * width, generator=torch.Generator().manual_seed(1)) * 1e4
    firsts = dict(zip(order, itertools.accumulate([0, *(counts[member] for member in order)]), strict=False))

    def work(rank):
        group, found = _form(store, rank, size), []
        rows = torch.empty(size, counts[rank], width)
        for step in range(2):  # the second in the memory of the first
            mine = shards[step, firsts[rank] : firsts[rank] + counts[rank]]
            rows.copy_(mine.view(counts[rank], size, width).transpose(0, 1))
            group.wait(group.sum_rows(rows, counts, order, into := torch.full((size * width,), torch.nan)))
            expected = shards[step, 0].clone()
            for row in shards[step, 1:]:
                expected += row
            found.append(torch.equal(into.view(torch.int32), expected.view(torch.int32)))
        group.wait(group.sum_on_host(torch.zeros(1)))
        group.close()
        return found

    assert in_processes(size, work) == [[True, True]] * size


@pytest.mark.parametrize("prompt", [0, 1 << 30], ids=["by the waiting thread", "by the thread that begins"])
def test_sums_that_are_begun_before_others_are_over_are_each_their_own(store, monkeypatch, prompt):
    monkeypatch.setattr(local_sums, "PROMPT", prompt)

    def work(rank):
        group = _form(store, rank, 3)
        for step in range(20):
            values = [torch.full((numbers,), float(step + rank)) for numbers in (300_000, 5, 40_000, 9_000, 100_000)]
            begun = [group.sum_bucket(value) for value in values]
            for one in begun:
                group.wait_bucket(one)
            assert all(torch.equal(value, torch.full_like(value, 3.0 * step + 3.0)) for value in values)
        group.close()

    in_processes(3, work)


def test_a_sum_is_over_once_all_members_have_read_what_they_need_of_this_one(store):
    over, told = os.pipe()

    def work(rank):
        group = _form(store, rank, 2)
        if rank == 1:
            fill = group._host_sums._memories.fill

            def fill_late(*given):
                assert not select.select([over], [], [], 0.3)[0]  # the owner still waits
                fill(*given)

            group._host_sums._memories.fill = fill_late
        value = torch.full((20_000,), rank + 1.0)
        group.wait_bucket(group.sum_bucket(value))
        if rank == 0:
            os.write(told, b".")
            value.fill_(torch.nan)
        group.wait(group.sum_on_host(torch.zeros(1)))
        group.close()
        return rank == 0 or bool((value == 3.0).all())

    assert in_processes(2, work) == [True, True]


@pytest.mark.parametrize("numbers", [100, 1_000_000])
@pytest.mark.parametrize("end", ["is cut", "leaves"])
def test_a_member_that_is_gone_fails_the_sums_of_all_others(store, numbers, end):
    def work(rank):
        group = _form(store, rank, 3)
        group.wait_bucket(group.sum_bucket(torch.ones(1000)))
        if rank != 1:
            return _is_lost(group, numbers)
        group.cut() if end == "is cut" else group.close()
        return end

    assert in_processes(3, work) == [True, end, True]


@pytest.mark.parametrize("begun", [0, 1, 2])
def test_a_member_that_dies_fails_the_sums_of_all_others_without_a_cut(store, begun):
    def work(rank):
        if rank == 1 and not (child := os.fork()):
            group = _form(store, rank, 3)
            for _ in range(begun):
                group.sum_bucket(torch.ones(1_000_000))  # the others have its address, and its memory is gone
            os._exit(0)
        if rank == 1:
            os.waitpid(child, 0)
            return "gone"
        group = _form(store, rank, 3)
        return _is_lost(group, 1_000_000)

    assert in_processes(3, work) == [True, "gone", True]


def test_a_cut_ends_the_wait_for_a_member_that_stands_still(store):
    def work(rank):
        group = _form(store, rank, 2)
        if rank == 1:
            group.wait(group.sum_on_host(torch.zeros(1)))
            return True
        begun = group.sum_bucket(torch.ones(1_000_000))
        cutting = threading.Thread(target=lambda: (group.wait(group.sum_on_host(torch.zeros(1))), group.cut()))
        cutting.start()
        with pytest.raises(RuntimeError, match="gloo: "):
            group.wait_bucket(begun)
        cutting.join()
        group.close()
        return True

    assert in_processes(2, work) == [True, True]


def test_members_whose_gloo_connects_by_itself_find_each_others_memory_too(store, monkeypatch):
    monkeypatch.setattr(gloo_sockets, "find_lack", lambda: "no socket filters")

    def work(rank):
        group, value = _form(store, rank, 3), torch.full((100_000,), float(rank))
        group.wait_bucket(group.sum_bucket(value))
        group.close()
        return value[0].item()

    assert in_processes(3, work) == [3.0] * 3


def test_members_whose_kernel_refuses_one_of_them_sum_over_gloo(store, monkeypatch):
    def work(rank):
        if rank == 1:
            monkeypatch.setattr(peer_memory, "_read_memory", lambda *_: -1)
        group = GlooGroup()
        group.form(1, rank=rank, size=3, store=store)
        value = torch.full((100_000,), float(rank))
        group.wait_bucket(group.sum_bucket(value))
        group.wait(group.sum_on_host(torch.zeros(1)))
        local = group._host_sums
        group.close()
        return local, value[0].item()

    assert in_processes(3, work) == [(None, 3.0)] * 3


def test_memory_that_can_be_told_and_not_read_is_summed_over_gloo_from_the_next_group_on(store, monkeypatch):
    def work(rank):
        group, value = _form(store, rank, 2), torch.ones(1_000_000)
        read = peer_memory._read_memory
        if rank == 1:
            monkeypatch.setattr(peer_memory, "_read_memory", lambda *of: -1 if of[2] == 2 else read(*of))
        with pytest.raises(RuntimeError, match="gloo: "):
            group.wait_bucket(group.sum_bucket(value))
        group.form(2, rank=rank, size=2, store=store)
        value.fill_(1.0)
        group.wait_bucket(group.sum_bucket(value))
        group.wait(group.sum_on_host(torch.zeros(1)))
        local = group._host_sums
        group.close()
        return local, value[0].item()

    assert in_processes(2, work) == [(None, 2.0)] * 2


def test_a_file_that_has_the_number_of_a_pipe_by_now_gets_no_message(tmp_path):
    pipe, memory = local_sums.MessagePipe(), PeerMemory.of([])
    (number, inode), taken = pipe.place, os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.close(local_sums.LocalMember(memory, (number, inode)).open_inbox())
    other = local_sums.MessagePipe()
    for reused in (taken, other.reads):
        with pytest.raises(OSError, match="has closed its pipe"):
            local_sums.LocalMember(memory, (reused, inode)).open_inbox()
    os.close(taken)


def test_what_others_hold_is_added_piece_by_piece_and_counts_only_while_their_marks_are_there(monkeypatch):
    monkeypatch.setattr(peer_memory, "_ADDED", 100)
    held = [torch.arange(1000.0) * factor for factor in (1, 2)]
    memory = PeerMemory.of(held)
    memories, own, filled = HostMemories({1: memory, 2: memory}), torch.ones(1000), torch.zeros(1000)
    memories.add(own, {1: memory.at[0], 2: memory.at[1]})
    memories.fill(filled, 2, memory.at[1])
    assert torch.equal(own, 1 + 3 * torch.arange(1000.0))
    assert torch.equal(filled, held[1])
    PeerMemory.of(held)  # another mark, as of a member that has left: its memory may have changed meanwhile
    with pytest.raises(RuntimeError, match="has left the group"):
        memories.add(own, {1: memory.at[0]})
    with pytest.raises(RuntimeError, match="has left the group"):
        memories.fill(filled, 1, memory.at[0])
