"""Promises of reading a peer's memory: what lies there, of that process and no other, or nothing that is believed."""

import os
import threading

import pytest
import torch

from trueline.parallel import peer_memory
from trueline.parallel.peer_memory import PeerMemory
from worlds.groups import in_processes

SOURCE = [torch.arange(5.0), torch.ones(3, dtype=torch.bfloat16), torch.zeros(0), torch.tensor(7)]


def rooms():
    return [torch.zeros_like(tensor) for tensor in SOURCE]


def equal(tensors):
    return all(torch.equal(one, other) for one, other in zip(tensors, SOURCE, strict=True))


@pytest.mark.parametrize("piece", [8, 1 << 20])
def test_a_process_reads_the_tensors_of_another_one_in_pieces(monkeypatch, piece):
    monkeypatch.setattr(peer_memory, "PIECE_BYTES", piece)
    memory = PeerMemory.of(SOURCE)

    def read(rank):
        for tensor in SOURCE:
            tensor.zero_()  # of the child, which is a copy
        found = rooms()
        return memory.pid != os.getpid() and memory.reads(found), [tensor.tolist() for tensor in found]

    assert in_processes(1, read) == [(True, [tensor.tolist() for tensor in SOURCE])]


def test_threads_read_a_large_state_and_share_its_pieces(monkeypatch):
    monkeypatch.setattr(peer_memory, "PIECE_BYTES", 8)
    monkeypatch.setattr(peer_memory.os, "sched_getaffinity", lambda _: range(16))
    told, all_here, plain = PeerMemory.of(SOURCE), threading.Barrier(peer_memory.MOST_THREADS), peer_memory._read_memory
    readers = set()

    def read(*given):
        reader = threading.current_thread()
        if reader is not threading.main_thread() and reader not in readers:
            readers.add(reader)
            all_here.wait(60)
        return plain(*given)

    monkeypatch.setattr(peer_memory, "_read_memory", read)
    found = rooms()
    assert told.reads(found)
    assert equal(found)
    assert len(readers) == peer_memory.MOST_THREADS
    monkeypatch.setattr(peer_memory, "_read_memory", lambda *given: plain(*given) if reads_mark(given) else -1)
    assert not told.reads(rooms())


def reads_mark(given):
    return given[1]._obj.length == 16


def test_another_process_under_that_number_is_not_believed():
    told = PeerMemory.of(SOURCE)
    stranger = told._replace(mark="00" * 16)
    found = rooms()
    assert not stranger.reads(found)
    assert not any(tensor.any() for tensor in found), "nothing of it was read"
    assert told.reads(found)
    assert equal(found)


def test_what_the_kernel_refuses_or_has_no_more_is_no_state(monkeypatch):
    told = PeerMemory.of(SOURCE)
    assert not told._replace(at=[8, *told.at[1:]]).reads(rooms()), "no such address"
    monkeypatch.setattr(peer_memory, "_read_memory", lambda *_: -1)
    assert not told.reads(rooms())
