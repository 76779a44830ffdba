"""What a server holds: each minibatch counts once, whatever is repeated, and however rows are divided."""

import dataclasses
import random

import msgspec
import numpy as np
import pytest
import torch

from trueline.ps import partition
from trueline.ps.messages import DenseSpec, ModelSpec, OptimizerSpec, TableSpec
from trueline.ps.split import name_part, parts_of, slice_dense, split_ids
from trueline.ps.tables.held import GradientError, Held, Push

ADAGRAD, SGD = OptimizerSpec(kind="adagrad", eps=1e-10), OptimizerSpec(kind="sgd")
DENSE = (DenseSpec(name="w", shape=(5, 3), group=0), DenseSpec(name="seen", shape=(2,), group=-1))


def spec_of(*, optimizer=ADAGRAD, **table):
    tables = (TableSpec(name="user", dim=4, group=1, **table), TableSpec(name="item", dim=2, group=1))
    return ModelSpec(seed=3, groups=(SGD, optimizer), tables=tables, dense=DENSE)


class Servers:
    """Servers of one routing, and a worker that divides its gradients among them."""

    def __init__(self, count, spec=None):
        self.spec = spec or spec_of()
        names = [f"server-{index}" for index in range(count)]
        self.routing = partition.make_routing(names, self.spec.dense)
        self.held = [Held(self.spec, self.routing, index) for index in range(count)]
        dense = {one.name: np.arange(np.prod(one.shape), dtype=np.float32) for one in self.spec.dense}
        for index, held in enumerate(self.held):
            parts = parts_of(self.routing, index)
            held.initialize(dict(zip(map(name_part, parts), slice_dense(parts, dense), strict=True)))

    def pushes(self, minibatch, seed, *, part=0, parts=1, weight=1.0):
        """The push of a minibatch for each server."""
        draw = np.random.default_rng(seed)
        tables = {}
        for one in self.spec.tables:
            ids = np.unique(draw.integers(-50, 50, 20))
            tables[one.name] = ids, draw.normal(size=(len(ids), one.dim)).astype(np.float32)
        dense = {one.name: draw.normal(size=np.prod(one.shape)).astype(np.float32) for one in self.spec.dense}
        made = []
        for index in range(len(self.held)):
            split = {name: split_ids(self.routing, name, ids).places(index) for name, (ids, _) in tables.items()}
            rows = [(name, ids[split[name]], rows[split[name]].copy()) for name, (ids, rows) in tables.items()]
            own = slice_dense(parts_of(self.routing, index), dense)
            made.append(Push(epoch=0, minibatch=minibatch, part=part, parts=parts, weight=weight, lrs=(0.1, 0.05),
                             tables=rows, dense=own))  # fmt: skip
        return made

    def apply(self, *args, **kwargs):
        for held, push in zip(self.held, self.pushes(*args, **kwargs), strict=True):
            held.check(push)
            held.push(push)

    def rows(self):
        """All rows of all ids, and the dense values, as a worker sees them."""
        ids = np.arange(-60, 60)
        found = {}
        for one in self.spec.tables:
            owner = partition.owners_of(self.routing)[partition.buckets_of(ids.copy(), one.name).astype(int)]
            values = [held.pull([(one.name, ids)], dense=False)[0][0] for held in self.held]
            found[one.name] = np.stack([values[owner[at]][at] for at in range(len(ids))])
        for index, held in enumerate(self.held):
            values = held.pull([], dense=True)[1]
            found |= {name_part(part): value for part, value in zip(parts_of(self.routing, index), values, strict=True)}
        return found


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.mark.parametrize("count", [2, 5])
def test_rows_are_the_same_bits_on_any_number_of_servers(count):
    alone, many = Servers(1), Servers(count)
    for minibatch in range(6):
        alone.apply(minibatch, seed=minibatch)
        many.apply(minibatch, seed=minibatch)
    one, other = alone.rows(), many.rows()
    for name in ("user", "item"):
        np.testing.assert_array_equal(one[name], other[name])


def test_a_push_that_is_repeated_by_anyone_is_applied_once():
    once, often = Servers(2), Servers(2)
    order = [(minibatch, again) for minibatch in range(8) for again in range(3)]
    random.Random(1).shuffle(order)
    applied = list(dict.fromkeys(minibatch for minibatch, _ in order))
    for minibatch in applied:
        once.apply(minibatch, seed=minibatch)
    for minibatch, again in order:  # another worker's gradients of the same minibatch differ, once one was applied
        often.apply(
            minibatch, seed=minibatch if minibatch not in often.held[0].list_applied().get(0, ()) else 100 + again
        )
    assert_equal(once.rows(), often.rows())
    assert often.held[0].steps == 8
    assert often.held[0].list_applied() == {0: ((0, 8),)}


def test_of_two_gradients_of_one_minibatch_the_first_counts():
    first = Servers(1)
    first.apply(0, seed=1)
    before = first.rows()
    assert not first.held[0].push(first.pushes(0, seed=2)[0])
    assert_equal(before, first.rows())


def test_a_pull_creates_nothing_and_gives_the_initial_values():
    servers = Servers(1)
    one, other = servers.rows(), servers.rows()
    assert_equal(one, other)
    assert [stats.rows for stats in servers.held[0].stats] == [0, 0]
    assert np.abs(one["user"]).max() > 0.5, "normal values"
    assert len(np.unique(one["user"])) > 400


def test_parts_of_a_step_are_one_step_whatever_their_order():
    forwards, backwards, whole = Servers(1), Servers(1), Servers(1)
    pushes = [forwards.pushes(part, seed=part, part=part, parts=3, weight=part + 1.0)[0] for part in range(3)]
    for held, order in ((forwards.held[0], pushes), (backwards.held[0], pushes[::-1])):
        for push in order:
            assert held.steps == 0
            held.push(push)
        assert held.steps == 1
    assert_equal(forwards.rows(), backwards.rows())
    mean = sum(push.dense[0] * np.float32(push.weight / 6.0) for push in pushes)
    whole.held[0].push(Push(epoch=0, minibatch=0, part=0, parts=1, weight=1.0, lrs=(0.1, 0.05), tables=[],
                            dense=[mean, pushes[2].dense[1]]))  # fmt: skip
    np.testing.assert_allclose(whole.rows()["w[0:15]"], forwards.rows()["w[0:15]"], rtol=1e-6)
    np.testing.assert_array_equal(forwards.rows()["seen[0:2]"], pushes[2].dense[1], "a buffer's last value counts")


def copy_of(held):
    """As a snapshot brings it back."""
    header, arrays = held.dump()
    return Held.load(msgspec.msgpack.decode(msgspec.msgpack.encode(header)), [one.copy() for one in arrays])


@pytest.mark.parametrize("table", [{}, {"max_rows": 12, "evict": "lru"}, {"admit_after": 1}], ids=str)
def test_a_server_that_is_dumped_and_loaded_goes_on_with_the_same_bits(table):
    servers, later = Servers(1, spec_of(**table)), Servers(1, spec_of(**table))
    for minibatch in range(5):
        servers.apply(minibatch, seed=minibatch)
    servers.apply(5, seed=5, part=0, parts=2)  # a step that is not complete
    later.held = [copy_of(servers.held[0])]
    for world in (servers, later):
        world.apply(6, seed=6, part=1, parts=2)
        for minibatch in range(7, 11):
            world.apply(minibatch, seed=minibatch)
    assert_equal(servers.rows(), later.rows())
    assert servers.held[0].list_applied() == later.held[0].list_applied()
    assert servers.held[0].stats == later.held[0].stats


@pytest.mark.parametrize("table", [{}, {"admit_after": 2}], ids=str)
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 5)])
def test_rows_and_dense_parts_move_to_other_servers_with_their_slots(before, after, table):
    still, moved = Servers(before, spec_of(**table)), Servers(before, spec_of(**table))
    for world in (still, moved):
        for minibatch in range(5):
            world.apply(minibatch, seed=minibatch)
    names = [f"server-{index}" for index in range(after)]
    routing = partition.move_buckets(moved.routing, names, moved.spec.dense)
    exports = []
    for index, held in enumerate(moved.held):
        leaving = (partition.owners_of(moved.routing) == index) & (partition.owners_of(routing) != index)
        exports += [held.export(np.flatnonzero(leaving).tolist()), held.export([])]
    exports = [(header, [one.copy() for one in arrays]) for header, arrays in exports]
    kept = moved.held[:after]
    for held in kept:
        held.reroute(routing)
    moved.held = kept + [Held(moved.spec, routing, index) for index in range(len(kept), after)]
    moved.routing = routing
    for held in moved.held:
        for header, arrays in exports:
            held.take(header, arrays)
    assert all(held.initialized for held in moved.held)
    for world in (still, moved):
        world.apply(3, seed=77)  # a duplicate, for the new ones too
        for minibatch in range(5, 9):
            world.apply(minibatch, seed=minibatch)
    one, other = still.rows(), moved.rows()
    for name in ("user", "item"):
        np.testing.assert_array_equal(one[name], other[name])
    assert {held.steps for held in moved.held} == {9}


def test_gradients_that_are_not_finite_are_refused_with_table_and_ids_and_change_nothing():
    servers = Servers(1)
    before = servers.rows()
    push = servers.pushes(0, seed=0)[0]
    push.tables[0][2][3, 1] = np.nan
    bad = push.tables[0][1][3]
    with pytest.raises(GradientError, match=f"table user: the gradients of 1 ids are NaN or Inf: {bad}"):
        servers.held[0].check(push)
    push = servers.pushes(0, seed=0)[0]
    push.dense[0][2] = np.inf
    with pytest.raises(Exception, match="the gradient of w has 1 elements that are NaN or Inf"):
        servers.held[0].check(push)
    assert_equal(before, servers.rows())
    assert not servers.held[0].has(0, 0)


def test_ids_of_another_dtype_and_unknown_tables_are_refused_by_name():
    held = Servers(1).held[0]
    push = Servers(1).pushes(0, seed=0)[0]
    name, ids, rows = push.tables[0]
    push.tables[0] = name, ids.astype(np.int32), rows
    with pytest.raises(GradientError, match="ids are int32, expected int64"):
        held.check(push)
    push.tables[0] = "who", ids, rows
    with pytest.raises(GradientError, match="there is no table 'who'"):
        held.check(push)


def test_a_table_with_a_bound_keeps_the_rows_that_were_used_last():
    held = Servers(1, spec_of(max_rows=3, evict="lru", optimizer=SGD)).held[0]
    for minibatch, ids in enumerate(([1, 2, 3], [1], [3], [9])):
        rows = np.ones((len(ids), 4), np.float32)
        dense = [np.zeros(15, np.float32), np.zeros(2, np.float32)]
        held.push(Push(epoch=0, minibatch=minibatch, part=0, parts=1, weight=1.0, lrs=(0.1, 1.0),
                       tables=[("user", np.array(ids), rows)], dense=dense))  # fmt: skip
    stats = held.stats[0]
    assert (stats.rows, stats.evicted, stats.refused) == (3, 1, 0)
    fresh = Servers(1, spec_of(optimizer=SGD)).held[0].pull([("user", np.array([1, 2, 3, 9]))], dense=False)[0][0]
    changed = fresh - held.pull([("user", np.array([1, 2, 3, 9]))], dense=False)[0][0]
    np.testing.assert_allclose(changed[:, 0], [2, 0, 2, 1], atol=1e-6)


def test_an_id_gets_a_row_when_it_was_pushed_often_enough():
    held = Servers(1, spec_of(admit_after=2, optimizer=SGD)).held[0]
    for minibatch in range(4):
        held.push(Push(epoch=0, minibatch=minibatch, part=0, parts=1, weight=1.0, lrs=(0.1, 1.0),
                       tables=[("user", np.array([7]), np.ones((1, 4), np.float32))],
                       dense=[np.zeros(15, np.float32), np.zeros(2, np.float32)]))  # fmt: skip
    assert (held.stats[0].rows, held.stats[0].refused) == (1, 2)


@pytest.mark.parametrize("table", [{}, {"max_rows": 6, "evict": "lru"}, {"admit_after": 1}], ids=str)
def test_pulls_before_a_push_change_nothing_whatever_was_made_or_evicted_between(table):
    draw, spec = np.random.default_rng(2), spec_of(optimizer=SGD, **table)
    pulled, plain = Servers(1, spec).held[0], Servers(1, spec).held[0]
    coming = [np.sort(draw.choice(12, draw.integers(1, 6), replace=False)) for _ in range(60)]
    for ids in coming[:4]:
        pulled.pull([("user", ids)], dense=False)
    for minibatch, ids in enumerate(coming):
        if minibatch + 4 < len(coming):  # four others are under way
            pulled.pull([("user", coming[minibatch + 4])], dense=False)
        rows = draw.normal(size=(len(ids), 4)).astype(np.float32)
        for held in (pulled, plain):
            held.push(Push(epoch=0, minibatch=minibatch, part=0, parts=1, weight=1.0, lrs=(0.1, 1.0),
                           tables=[("user", ids, rows.copy())],
                           dense=[np.zeros(15, np.float32), np.zeros(2, np.float32)]))  # fmt: skip
    one, other = (held.pull([("user", np.arange(12))], dense=False)[0][0] for held in (pulled, plain))
    np.testing.assert_array_equal(one, other)
    assert pulled.stats[0].rows == plain.stats[0].rows


def test_ids_that_are_not_admitted_yet_are_counted_on_where_their_bucket_is_now():
    def push(held, minibatch):
        ids = np.arange(40)
        ids = ids[partition.owners_of(held.routing)[partition.buckets_of(ids, "user").astype(int)] == held.index]
        dense = [np.zeros(part.stop - part.start, np.float32) for part in parts_of(held.routing, held.index)]
        held.push(Push(epoch=0, minibatch=minibatch, part=0, parts=1, weight=1.0, lrs=(0.1, 1.0),
                       tables=[("user", ids, np.ones((len(ids), 4), np.float32))], dense=dense))  # fmt: skip

    before = Servers(1, spec_of(admit_after=2, optimizer=SGD))
    for minibatch in range(2):
        push(before.held[0], minibatch)
    after = Servers(3, before.spec)
    dumped = before.held[0].dump()
    for held in after.held:  # as from a checkpoint
        held.take(*dumped)
    assert [held.stats[0].rows for held in after.held] == [0, 0, 0]
    for held in after.held:
        push(held, 2)
    assert sum(held.stats[0].rows for held in after.held) == 40
    giver = Servers(1, before.spec).held[0]
    giver.take(*dumped)
    header, arrays = giver.export([bucket for bucket in range(partition.BUCKETS) if bucket % 2])
    assert 0 < len(header["seen"]["user"]) < 40
    giver.reroute(give_every_second_bucket(giver.routing))
    assert len(giver.dump()[0]["tables"]["user"]["seen"]) == 40 - len(header["seen"]["user"])
    assert all(not len(one) for one in arrays[:2])


def give_every_second_bucket(routing):
    """Every second bucket is another server's."""
    owners = (np.arange(partition.BUCKETS) % 2).astype("<u2").tobytes()
    return msgspec.structs.replace(routing, version=2, servers=(*routing.servers, "server-1"), owners=owners)


MADE = {
    "sgd": (SGD, lambda p: torch.optim.SGD(p, lr=0.05)),
    "momentum": (
        OptimizerSpec(kind="sgd", momentum=0.9, dampening=0.3, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01),
    ),
    "nesterov": (
        OptimizerSpec(kind="sgd", momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "adagrad": (
        OptimizerSpec(kind="adagrad", eps=1e-10, lr_decay=0.01, initial_accumulator=0.1, weight_decay=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1, weight_decay=0.01),
    ),
    "adam": (OptimizerSpec(kind="adam", weight_decay=0.01), lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.01)),
    "adamw": (
        OptimizerSpec(kind="adamw", weight_decay=0.1, maximize=True),
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, maximize=True),
    ),
}


@pytest.mark.parametrize("kind", MADE)
def test_hundreds_of_steps_are_those_of_torch(kind):
    """Of a dense parameter, and of rows that every step reaches."""
    optimizer, make = MADE[kind]
    spec = ModelSpec(seed=0, groups=(optimizer,), tables=(TableSpec(name="t", dim=6, group=0),),
                     dense=(DenseSpec(name="w", shape=(7,), group=0),))  # fmt: skip
    held = Held(spec, partition.make_routing(["server-0"], spec.dense), 0)
    held.initialize({"w[0:7]": np.linspace(-1, 1, 7, dtype=np.float32)})
    ids = np.array([5, -3, 99])
    (rows,), (dense,) = held.pull([("t", ids)], dense=True)
    table = torch.nn.Parameter(torch.from_numpy(rows.copy()))
    weight = torch.nn.Parameter(torch.from_numpy(dense.copy()))
    theirs = make([table, weight])
    draw = torch.Generator().manual_seed(1)
    for step in range(400):
        lr = 0.05 / (1 + 0.01 * step)
        theirs.param_groups[0]["lr"] = lr
        table.grad, weight.grad = torch.randn(3, 6, generator=draw), torch.randn(7, generator=draw)
        held.push(Push(epoch=0, minibatch=step, part=0, parts=1, weight=1.0, lrs=(lr,),
                       tables=[("t", ids, table.grad.numpy().copy())], dense=[weight.grad.numpy().copy()]))  # fmt: skip
        theirs.step()
    (rows,), (dense,) = held.pull([("t", ids)], dense=True)
    np.testing.assert_allclose(rows, table.detach().numpy(), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(dense, weight.detach().numpy(), rtol=2e-5, atol=2e-6)


def test_rowwise_adagrad_keeps_one_number_a_row():
    spec = spec_of(optimizer=OptimizerSpec(kind="rowwise_adagrad", eps=1e-10))
    held = Servers(1, spec).held[0]
    before = held.pull([("user", np.array([1]))], dense=False)[0][0]
    gradient = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    held.push(Push(epoch=0, minibatch=0, part=0, parts=1, weight=1.0, lrs=(0.1, 0.5),
                   tables=[("user", np.array([1]), gradient.copy())],
                   dense=[np.zeros(15, np.float32), np.zeros(2, np.float32)]))  # fmt: skip
    after = held.pull([("user", np.array([1]))], dense=False)[0][0]
    np.testing.assert_allclose(before - after, 0.5 * gradient / np.sqrt(7.5), rtol=1e-6)


def push_of(minibatch, ids, rows):
    return Push(epoch=0, minibatch=minibatch, part=0, parts=1, weight=1.0, lrs=(0.1, 1.0),
                tables=[("user", np.array(ids), np.array(rows, np.float32).repeat(4).reshape(-1, 4))],
                dense=[np.zeros(15, np.float32), np.zeros(2, np.float32)])  # fmt: skip


def test_a_push_evicts_no_row_that_it_changes_itself():
    held = Servers(1, spec_of(max_rows=2, evict="lru", optimizer=SGD, init="zeros")).held[0]
    held.push(push_of(0, [1, 2], [1.0, 1.0]))
    held.push(push_of(1, [-5, 1, 2], [10.0, 1.0, 1.0]))
    values = held.pull([("user", np.array([-5, 1, 2]))], dense=False)[0][0][:, 0]
    assert (values.tolist(), held.stats[0].refused) == ([0.0, -2.0, -2.0], 1)
    held.push(push_of(2, [-5, 2], [10.0, 1.0]))
    values = held.pull([("user", np.array([-5, 1, 2]))], dense=False)[0][0][:, 0]
    assert values.tolist() == [-10.0, 0.0, -3.0]


def test_a_table_with_more_rows_than_its_bound_after_a_move_gets_no_others():
    wide = Servers(1, spec_of(optimizer=SGD, init="zeros")).held[0]
    wide.push(push_of(0, [1, 2, 3, 4, 5], [1.0] * 5))
    bound = Servers(1, spec_of(max_rows=3, optimizer=SGD, init="zeros")).held[0]
    header, arrays = wide.export(range(1024))
    bound.take(header, [one.copy() for one in arrays])
    bound.push(push_of(1, [7, 8, 9], [1.0] * 3))
    assert (bound.stats[0].rows, bound.stats[0].refused) == (5, 3)


def test_what_was_used_last_is_known_after_a_move():
    spec = spec_of(max_rows=2, evict="lru", optimizer=SGD, init="zeros")
    held, other = Servers(1, spec).held[0], Servers(1, spec).held[0]
    for minibatch, one in enumerate((1, 2, 1)):
        held.push(push_of(minibatch, [one], [1.0]))
    header, arrays = held.export(range(1024))
    other.take(header, [one.copy() for one in arrays])
    other.push(push_of(3, [9], [1.0]))
    values = other.pull([("user", np.array([1, 2, 9]))], dense=False)[0][0][:, 0]
    assert values.tolist() == [-2.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lrs": (0.1, float("nan"))}, "the learning rates are"),
        ({"weight": float("inf")}, "with weight inf"),
        ({"tables": [("user", np.array([4, 4]), np.ones((2, 4), np.float32))]}, "are not unique"),
    ],
    ids=["lr", "weight", "ids"],
)
def test_a_push_that_makes_no_sense_is_refused(change, message):
    held = Servers(1).held[0]
    with pytest.raises(GradientError, match=message):
        held.check(dataclasses.replace(push_of(0, [1], [1.0]), **change))
