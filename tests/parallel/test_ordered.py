"""Promises of the ordered sum: every bit is that of the shards' order, whoever holds them. Members are threads here."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from conformance.gradient_exchange import *  # noqa: F403  its tests
from conformance.gradient_exchange import LOSS_WORD
from trueline.parallel import ordered
from trueline.parallel.ordered import OrderedExchange, OrderedSum

WAIT_S = 60


@pytest.fixture
def make_exchange():
    return lambda model, group, width: OrderedExchange(list(model.parameters()), group, width, loss_word=LOSS_WORD)


class Ranks:
    """What torch.distributed is to the members of one group, each of which is a thread."""

    def __init__(self, size):
        self.size, self._barrier, self._mine = size, threading.Barrier(size), threading.local()
        self._posted = [None] * size

    def run(self, work):
        """What `work` of each rank gives. Raises what one of them raises."""

        def member(rank):
            self._mine.rank = rank
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()  # the others wait for it no longer
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return [future.result(WAIT_S) for future in [pool.submit(member, rank) for rank in range(self.size)]]

    def get_rank(self):
        return self._mine.rank

    def get_world_size(self):
        return self.size

    def _exchanged(self, value):
        self._posted[self._mine.rank] = value
        self._barrier.wait(WAIT_S)
        found = list(self._posted)
        self._barrier.wait(WAIT_S)
        return found

    def all_to_all_single(self, received, sent, taken, given, *, async_op):
        parts = self._exchanged(list(torch.split(sent.clone(), given)))
        received.copy_(torch.cat([part[self._mine.rank] for part in parts]))

    def all_gather_single(self, summed, total, *, async_op):
        summed.copy_(torch.cat(self._exchanged(total.clone())))


GROUP = SimpleNamespace(wait=lambda work: None, sum_rows=lambda *given: None)
SHARDS = [1e8, -1e8, 1.0, 1e8, 1.0, -1e8, 0.5]
"""Added in another order they have another sum."""


def in_order(values):
    total = torch.tensor(values[0])
    for value in values[1:]:
        total = total + torch.tensor(value)
    return total


def parameters():
    return [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(3))]


def add(sums, mine, value):
    """A row of which all gradients and the number beside them are `value`."""
    for parameter in mine:
        parameter.grad = torch.full_like(parameter, value)
    sums.add(torch.tensor([value]))


@pytest.mark.parametrize(
    ("counts", "order"),
    [([7], [0]), ([3, 4], [0, 1]), ([4, 3], [1, 0]), ([2, 0, 5], [0, 1, 2]), ([1, 2, 4], [2, 0, 1])],
)
def test_the_sum_is_that_of_the_shards_in_their_order_whoever_holds_them(monkeypatch, counts, order):
    ranks = Ranks(len(counts))
    monkeypatch.setattr(ordered, "dist", ranks)
    shards, held = list(SHARDS), {}
    for rank in order:
        held[rank], shards = shards[: counts[rank]], shards[counts[rank] :]

    def work(rank):
        mine = parameters()
        sums, found = OrderedSum(mine, GROUP, 1), []
        sums.reset()
        for factor in (1.0, 0.5):  # a second step in the memory of the first
            for value in held[rank]:
                add(sums, mine, factor * value)
            extra = sums.reduce(counts, order)
            found.append([*(value.grad.clone() for value in mine), extra.clone()])
        return found

    expected = [in_order(SHARDS), in_order([0.5 * value for value in SHARDS])]
    for found in ranks.run(work):
        for tensors, total in zip(found, expected, strict=True):
            assert [tensor.shape for tensor in tensors] == [(2, 2), (3,), (1,)]
            assert all(bool((tensor == total).all()) for tensor in tensors)


def test_a_step_that_was_given_up_leaves_no_row_and_a_row_takes_the_gradients_away(monkeypatch):
    ranks = Ranks(1)
    monkeypatch.setattr(ordered, "dist", ranks)

    def work(rank):
        mine = parameters()
        sums = OrderedSum(mine, GROUP, 1)
        sums.reset()
        add(sums, mine, 5.0)
        assert [value.grad for value in mine] == [None, None]
        sums.reset()
        add(sums, mine, 2.0)
        mine[0].grad = None
        sums.add(torch.tensor([1.0]))  # a shard in which no parameter took part
        extra = sums.reduce([2], [0])
        return mine[0].grad.tolist(), extra.tolist()

    assert ranks.run(work) == [([[2.0, 2.0], [2.0, 2.0]], [3.0])]


def test_another_number_of_rows_than_was_agreed_is_refused_before_anything_is_sent(monkeypatch):
    ranks = Ranks(1)
    monkeypatch.setattr(ordered, "dist", ranks)

    def work(rank):
        mine = parameters()
        sums = OrderedSum(mine, GROUP, 1)
        sums.reset()
        add(sums, mine, 1.0)
        sums.reduce([2], [0])

    with pytest.raises(ValueError, match="rank 0 added 1 rows of gradients, expected 2"):
        ranks.run(work)


def test_a_group_of_another_size_begins_with_memory_of_its_own(monkeypatch):
    mine = parameters()
    sums = OrderedSum(mine, GROUP, 1)
    kept = []
    for size in (1, 3, 1):
        ranks = Ranks(size)
        monkeypatch.setattr(ordered, "dist", ranks)

        def work(rank, size=size):
            own = mine if rank == 0 else parameters()
            its = sums if rank == 0 else OrderedSum(own, GROUP, 1)
            its.reset()
            add(its, own, float(rank + 1))
            extra = its.reduce([1] * size, list(range(size)))
            return extra.item(), extra

        totals, (first, *_) = zip(*ranks.run(work), strict=True)
        assert set(totals) == {float(sum(range(size + 1)))}
        kept.append((first, totals[0]))
    assert [extra.item() for extra, _ in kept] == [total for _, total in kept], "an operation may still be under way"


def test_wide_parameters_are_summed_in_their_width(monkeypatch):
    ranks = Ranks(1)
    monkeypatch.setattr(ordered, "dist", ranks)

    def work(rank):
        mine = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)), torch.nn.Parameter(torch.zeros(1))]
        sums = OrderedSum(mine, GROUP, 1)
        sums.reset()
        for value in (1.0, 1e-12):
            add(sums, mine, value)
        sums.reduce([2], [0])
        return [(value.grad.item() > 1.0, value.grad.dtype) for value in mine]

    assert ranks.run(work) == [[(True, torch.float64), (False, torch.float32)]]
