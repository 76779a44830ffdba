"""The ledger leases every minibatch until all servers have it, and begins none too early."""

import random

import pytest

from trueline.ps.master.ledger import MOST, MinibatchGrid, MinibatchLedger


def ledger_of(num_records=100, batch=10, *, parts=1, epochs=2, **kwargs):
    return MinibatchLedger(
        grid=MinibatchGrid(num_records=num_records, batch=batch, parts=parts), epochs=epochs, **kwargs
    )


@pytest.mark.parametrize(
    ("records", "batch", "parts"), [(100, 10, 1), (103, 10, 1), (103, 10, 3), (7, 20, 4), (64, 8, 8)]
)
def test_minibatches_cover_an_epoch_once_and_steps_keep_their_records(records, batch, parts):
    grid = MinibatchGrid(num_records=records, batch=batch, parts=parts)
    at = 0
    for minibatch in range(grid.minibatches):
        start, stop, part, of = grid.locate(minibatch)
        assert (start, part < of) == (at, True)
        assert start // batch == (stop - 1) // batch == grid.step_of(minibatch)
        at = stop
    assert at == records


def test_every_minibatch_is_done_once_whatever_workers_die():
    ledger, dice, done, now = ledger_of(num_records=1003, epochs=3), random.Random(4), [], 0.0
    held = {}
    while not ledger.finished:
        now += 0.01
        worker = f"worker-{dice.randrange(4)}.0"
        if dice.random() < 0.05:
            ledger.release(worker)
            held.pop(worker, None)
            continue
        if worker not in held and (grant := ledger.lease(worker, now)) is not None:
            held[worker] = [grant, grant.start]
        if worker in held:
            grant, at = held[worker]
            if ledger.commit(grant.token, grant.epoch, at + 1, now):
                done.append((grant.epoch, at))
                held[worker][1] += 1
            if held[worker][1] == grant.stop:
                del held[worker]
    assert sorted(done) == [(epoch, minibatch) for epoch in range(3) for minibatch in range(101)]
    assert ledger.steps == ledger.total_steps == 303


def test_a_lease_that_was_lost_cannot_be_committed():
    ledger = ledger_of()
    grant = ledger.lease("worker-0.0", 0.0)
    ledger.release("worker-0.0")
    assert not ledger.commit(grant.token, grant.epoch, grant.start + 1, 1.0)
    assert ledger.lease("worker-1.0", 1.0).start == grant.start


def test_silent_workers_lose_their_leases_and_those_that_beat_do_not():
    ledger = ledger_of(lease_s=3.0)
    ledger.lease("worker-0.0", 0.0)
    ledger.lease("worker-1.0", 0.0)
    ledger.beat("worker-1.0", 2.0)
    assert ledger.expire(3.5) == ["worker-0.0"]


@pytest.mark.parametrize("staleness", [1, 3])
def test_at_most_so_many_others_are_under_way(staleness):
    ledger = ledger_of(staleness=staleness)
    grants = [grant for number in range(9) if (grant := ledger.lease(f"worker-{number}.0", 0.0))]
    assert len(grants) == staleness + 1
    assert all(grant.stop == grant.start + 1 for grant in grants)
    ledger.commit(grants[0].token, 0, grants[0].stop, 0.1)
    assert ledger.lease("worker-9.0", 0.2) is not None


def test_without_a_bound_leases_are_small_enough_for_a_cut():
    ledger = ledger_of(num_records=100_000)
    for number in range(50):
        grant = ledger.lease("worker-0.0", float(number))
        assert grant.stop - grant.start <= MOST
        ledger.commit(grant.token, 0, grant.stop, number + 0.001)


def test_a_synchronous_step_begins_when_the_one_before_is_done():
    ledger = ledger_of(num_records=40, batch=20, parts=2, staleness=0)
    one, two = ledger.lease("worker-0.0", 0.0), ledger.lease("worker-1.0", 0.0)
    assert ledger.lease("worker-2.0", 0.0) is None
    assert ledger.outstanding() == {0: ((0, 2),)}
    ledger.commit(one.token, 0, 1, 0.1)
    assert ledger.lease("worker-0.0", 0.2) is None
    assert (ledger.steps, ledger.outstanding()) == (0, {0: ((0, 2),)}), "the whole step, so that none is cut in two"
    ledger.commit(two.token, 0, 2, 0.3)
    assert (ledger.steps, ledger.outstanding()) == (1, {})
    assert ledger.lease("worker-0.0", 0.4).start == 2


def test_after_a_restart_what_all_servers_have_is_done_and_the_rest_is_leased_again():
    ledger = ledger_of(num_records=100, batch=10, epochs=3)
    assert ledger.restore([{0: ((0, 10),), 1: ((0, 7),)}, {0: ((0, 10),), 1: ((0, 3), (5, 8))}]) == 5
    assert (ledger.epoch, ledger.done, ledger.steps) == (1, ((0, 3), (5, 7)), 15)
    left = []
    while (grant := ledger.lease("worker-0.0", 0.0)) is not None and grant.epoch == 1:
        left += range(grant.start, grant.stop)
        ledger.commit(grant.token, 1, grant.stop, 0.1)
    assert left == [3, 4, 7, 8, 9]


def test_old_tokens_are_void_after_a_restart():
    ledger = ledger_of()
    grant = ledger.lease("worker-0.0", 0.0)
    ledger.restore([{}])
    assert not ledger.commit(grant.token, 0, grant.stop, 0.1)
