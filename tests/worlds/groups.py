"""A small group without a master: each member is a forked process with its own loop over `Elastic`."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import queue
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from trueline.parallel import gloo
from trueline.train import elastic
from trueline.train.link.local_client import LocalLink
from trueline.wire import train_pb2 as pb

WAIT_S = 250
"""A limit that no test reaches: a machine may be slow, and the only view has to be formed."""


class _GroupLink(LocalLink):
    """One view of `size` members that have applied `steps` steps; rank 0's store is passed on through `stores`."""

    applied = -1

    def __init__(self, rank: int, size: int, stores: Any) -> None:
        super().__init__()
        self.ref, self._rank, self._size, self._stores = f"worker-{rank}.0", rank, size, stores

    def join(self, hello: pb.Hello) -> None:
        members = [f"worker-{rank}.0" for rank in range(self._size)]
        self._store, self.view = hello.store, pb.View(generation=1, members=members, cut_below=1)

    def enter(self, generation: int, step: int, rate: float) -> pb.Plan:
        if self._rank == 0:
            for _ in range(1, self._size):
                self._stores.put(self._store)
        store = self._store if self._rank == 0 else self._stores.get(timeout=WAIT_S)
        return pb.Plan(source=0, steps=[self.applied] * self._size, rates=[0.0] * self._size, store=store)


def together(size: int, train: Callable[[], Any], *, steps: int = -1) -> list[Any]:
    """The results of `train` in `size` members. Raises AssertionError when it raises in one.

    `steps`: the steps that they report when they enter; -1: no member has a state.
    """
    stores = multiprocessing.get_context("fork").Queue()

    def member(rank: int) -> Any:
        _GroupLink.applied = steps
        fellow = _GroupLink(rank, size, stores)
        with (
            mock.patch.object(elastic, "connect", return_value=fellow),
            mock.patch.object(gloo, "FORM_TIMEOUT_S", WAIT_S),
        ):
            return train()

    return in_processes(size, member)


def in_processes(size: int, work: Callable[[int], Any]) -> list[Any]:
    """The results of `work(rank)` in `size` forked processes. Raises AssertionError when it raises in one."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def member(rank: int) -> None:
        gc.disable()  # what the test's process has left holds threads that are not here: to destroy it is to crash
        torch.set_num_threads(1)
        try:
            results.put((rank, True, work(rank)))
        except Exception as error:  # noqa: BLE001  handed to the test
            results.put((rank, False, f"{type(error).__name__}: {error}"))

    processes = [context.Process(target=member, args=(rank,), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        found = sorted((_answer(results, processes) for _ in processes), key=lambda one: one[0])
        assert all(fine for _, fine, _ in found), found
        return [one for _, _, one in found]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(results: Any, processes: list[Any]) -> tuple[int, bool, Any]:
    """The next member's result; for one that died without a result, its exit."""
    running = [one.sentinel for one in processes if one.is_alive()]
    multiprocessing.connection.wait([results._reader, *running], timeout=WAIT_S)
    died = any(one.exitcode for one in processes)  # a process that exits normally has sent its result
    try:
        found: tuple[int, bool, Any] = results.get(timeout=5 if died else WAIT_S)
    except queue.Empty:
        ends = [(rank, one.exitcode) for rank, one in enumerate(processes)]
        raise AssertionError(f"no answer; members and how they ended: {ends}") from None
    return found
