"""What every gradient exchange promises. Import the tests and define the fixture `make_exchange(model, group, width)`.

Members are processes; `group.form` gives them a group without a master.
"""

import multiprocessing
import os

import pytest
import torch

from trueline.parallel import gloo
from trueline.parallel.exchange import BackwardPiece, Shares, is_collective
from trueline.parallel.gloo import GlooGroup
from trueline.parallel.group_sockets import GroupSockets
from trueline.parallel.store import StoreServer
from worlds.groups import WAIT_S, in_processes

WORDS = 3
"""Records, a constant, and the sum of the losses: the words of these tests."""
LOSS_WORD = 2


def model_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def records(first, last):
    return torch.tensor([[0.1 * n, 1.0 - n, 0.5 * n * n] for n in range(first, last)]).reshape(-1, 3)


def gradients(model):
    return [[] if value.grad is None else value.grad.flatten().tolist() for value in model.parameters()]


def piece_of(exchange, model, first, last, total):
    """The forward of records [first, last) of a step of `total`; notes them beside the gradients."""
    loss = model(records(first, last)).square().sum(1).mean()
    exchange.beside[first:last] += 1.0
    return BackwardPiece(loss, loss, (last - first) / total, last - first)


def step(exchange, model, pieces, shares, total):
    """One step of this member over `pieces`, its ranges of records: summed words, what was beside, gradients."""
    model.zero_grad()
    exchange.beside.zero_()
    losses = 0.0
    last = None
    for number, (first, end) in enumerate(pieces):
        exchange.syncing = number == len(pieces) - 1
        last = piece_of(exchange, model, first, end, total)
        losses += last.loss.item() * last.count
        if not exchange.syncing:
            exchange.add(last)
    words = [float(sum(end - first for first, end in pieces)), 1.0, losses]
    summed, beside = exchange.reduce(last, words, shares)
    return summed, beside.tolist(), gradients(model)


def alone(total):
    """The same step by one process that has all records, without any exchange."""
    model = model_of()
    loss = model(records(0, total)).square().sum(1).mean()
    loss.backward()
    return loss.item() * total, gradients(model)


def in_a_group(size, work):
    """What `work(rank, group, store)` returns in each of `size` processes whose group was formed."""
    stores = multiprocessing.get_context("fork").Queue()

    def member(rank):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        gloo.FORM_TIMEOUT_S = WAIT_S  # a machine may be slow; this is a process of its own
        store = None
        if rank == 0:
            store = StoreServer()
            address = store.address
            for _ in range(1, size):
                stores.put(address)
        else:
            address = stores.get(timeout=WAIT_S)
        group = GlooGroup()
        group.form(1, rank=rank, size=size, store=address)
        found = work(rank, group)
        if store is not None:
            store.close()
        return found

    return in_processes(size, member)


SPLITS = {
    "evenly": [[(0, 3)], [(3, 6)]],
    "raggedly": [[(0, 5)], [(5, 6)]],
    "in pieces": [[(0, 2), (2, 3)], [(3, 4), (4, 5), (5, 6)]],
    "one without records": [[(0, 4), (4, 6)], []],
    "three": [[(0, 1)], [(1, 5)], [(5, 6)]],
}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_every_member_has_the_gradients_and_sums_of_one_process_over_all_records(make_exchange, split):
    shares = Shares([len(pieces) for pieces in split], list(range(len(split))))

    def work(rank, group):
        model = model_of()
        exchange = make_exchange(model, group, 6)
        exchange.attach(WORDS)
        return [step(exchange, model, split[rank], shares, 6) for _ in range(4)]  # buckets stand from the second on

    losses, expected = alone(6)
    for steps in in_a_group(len(split), work):
        for words, beside, found in steps:
            assert words[:2] == [6.0, float(len(split))]
            assert words[LOSS_WORD] == pytest.approx(losses, rel=1e-5)
            assert beside == [1.0] * 6, "each record is noted once"
            for mine, its in zip(found, expected, strict=True):
                assert mine == pytest.approx(its, rel=1e-4, abs=1e-6)


def test_the_memory_of_the_sums_holds_all_that_was_summed_or_is_said_to_lie_elsewhere(make_exchange):
    def work(rank, group):
        model = model_of()
        exchange = make_exchange(model, group, 6)
        exchange.attach(WORDS)
        found = []
        for _ in range(3):
            words, beside, gradients = step(exchange, model, [(3 * rank, 3 * rank + 3)], Shares([1, 1], [0, 1]), 6)
            held = [number for part in exchange.sums for number in part.tolist()]
            users = [2.0] * len(gradients)  # by how many members each parameter was used
            numbers = [number for part in (words, beside, users, *gradients) for number in part]
            found.append((sorted(held), sorted(numbers)))
        return found

    for steps in in_a_group(2, work):
        assert all(not held or held == numbers for held, numbers in steps)


def test_all_members_have_equal_bits(make_exchange):
    def work(rank, group):
        model = model_of()
        exchange = make_exchange(model, group, 6)
        exchange.attach(WORDS)
        return step(exchange, model, [[(0, 5)], [(5, 6)]][rank], Shares([1, 1], [0, 1]), 6)

    first, second = in_a_group(2, work)
    assert first == second


def test_a_step_that_was_given_up_leaves_nothing_in_the_next_group(make_exchange):
    def work(rank, group):
        model = model_of()
        exchange = make_exchange(model, group, 6)
        exchange.attach(WORDS)
        exchange.syncing = False
        exchange.add(piece_of(exchange, model, 0, 3, 6))
        exchange.detach()
        exchange.attach(WORDS)
        return step(exchange, model, [[(0, 3)], [(3, 6)]][rank], Shares([1, 1], [0, 1]), 6)

    for words, beside, found in in_a_group(2, work):
        assert (words[0], beside) == (6.0, [1.0] * 6)
        for mine, its in zip(found, alone(6)[1], strict=True):
            assert mine == pytest.approx(its, rel=1e-4, abs=1e-6)


def step_or_broken(exchange, model):
    """A step whose peer is gone. DDP may find that out in the forward, and keeps it for the caller."""
    step(exchange, model, [(0, 3)], Shares([1, 1], [0, 1]), 6)
    if exchange.broken is not None:
        raise exchange.broken


def test_a_peer_that_leaves_fails_the_sum_and_the_next_group_is_served(make_exchange):
    def work(rank, group):
        model = model_of()
        exchange = make_exchange(model, group, 6)
        exchange.attach(WORDS)
        step(exchange, model, [[(0, 3)], [(3, 6)]][rank], Shares([1, 1], [0, 1]), 6)
        if rank == 1:
            group.close()
            return None
        with pytest.raises(RuntimeError) as raised:
            step_or_broken(exchange, model)
        exchange.detach()
        store = StoreServer()
        group.form(2, rank=0, size=1, store=store.address)
        exchange.attach(WORDS)
        found = step(exchange, model, [(0, 6)], Shares([1], [0]), 6)
        store.close()
        return is_collective(raised.value), found

    collective, (words, beside, found) = in_a_group(2, work)[0]
    assert collective, "the error is distinguished from one of the model"
    assert (words[:2], beside) == ([6.0, 1.0], [1.0] * 6)
    for mine, its in zip(found, alone(6)[1], strict=True):
        assert mine == pytest.approx(its, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_member_of_a_cut_group_waits_for_no_peer_though_gloo_reports_nothing(make_exchange, taken, monkeypatch):
    """gloo reports no error for a message that was partly read; DDP exchanges some in its second forward."""
    shares = Shares([1, 1], [0, 1])
    done = multiprocessing.get_context("fork").Event()
    monkeypatch.setattr(GroupSockets, "cut", lambda sockets: 0)

    def work(rank, group):
        model = model_of()
        exchange = make_exchange(model, group, 6)
        exchange.attach(WORDS)
        for _ in range(taken):
            step(exchange, model, [(3 * rank, 3 * rank + 3)], shares, 6)
        if rank == 1:
            done.wait()  # alive, and in no collective
            return None
        group.cut()
        try:
            with pytest.raises(RuntimeError) as raised:
                step_or_broken(exchange, model)
        finally:
            done.set()
        return is_collective(raised.value)

    assert in_a_group(2, work)[0] is True


def test_the_callbacks_come_once_the_local_part_is_over_and_before_the_peers_are_waited_for(make_exchange):
    def work(rank, group):
        model = model_of()
        exchange = make_exchange(model, group, 6)
        exchange.attach(WORDS)
        calls = []
        exchange.on_computed, exchange.on_sent = lambda: calls.append("computed"), lambda: calls.append("sent")
        step(exchange, model, [[(0, 3)], [(3, 6)]][rank], Shares([1, 1], [0, 1]), 6)
        return calls

    for calls in in_a_group(2, work):
        assert calls.count("sent") == 1
        assert calls[-1] == "sent"
        assert calls[0] == "computed"
