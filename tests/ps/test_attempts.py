"""Steps of a hybrid job at one server: an attempt counts as a whole, and a step counts once."""

import dataclasses

import numpy as np
import pytest

from trueline.ps.messages import ModelSpec, OptimizerSpec, TableSpec
from trueline.ps.partition import make_routing
from trueline.ps.tables.held import GradientError, Held, Push

IDS = np.array([7], np.int64)


def make_held():
    tables = (TableSpec(name="t", dim=2, group=0, init="zeros"),)
    spec = ModelSpec(seed=0, groups=(OptimizerSpec(kind="sgd"),), tables=tables)
    return Held(spec, make_routing(["server-0"], ()), 0)


def part_of(step, part, value, *, attempt, parts=2, weight=1.0, lr=1.0, scale=0.0):
    rows = np.full((1, 2), value, np.float32)
    return Push(
        epoch=0, minibatch=step, part=part, parts=parts, weight=weight, lrs=(lr,), tables=[("t", IDS, rows)],
        dense=[], attempt=attempt, scale=scale,
    )  # fmt: skip


def test_an_attempt_takes_the_place_of_the_parts_of_the_one_before_and_a_step_is_applied_once():
    held = make_held()
    assert held.push(part_of(0, 0, 100.0, attempt=1))
    assert held.push(part_of(0, 1, 1.0, attempt=2, lr=9.0, weight=0.0))
    assert not held.push(part_of(0, 1, 50.0, attempt=1))  # of a member that the group has left behind
    held = Held.load(*held.dump())
    assert held.push(part_of(0, 0, 2.0, attempt=2))
    assert held.steps == 1
    assert not held.push(part_of(0, 0, 2.0, attempt=3))
    (rows,), _ = held.pull([("t", IDS)], dense=False)
    assert rows.tolist() == [[-3.0, -3.0]]  # the sum of the parts, with the learning rate of the one that weighs


def test_a_part_of_another_step_than_the_next_one_is_refused():
    with pytest.raises(GradientError, match="a part of step 3 after 0 steps"):
        make_held().check(part_of(3, 0, 1.0, attempt=1))


def scale_of(step, scale, *, attempt):
    """The last part, of rank 0, whose learning rate does not count."""
    return dataclasses.replace(
        part_of(step, 2, 0.0, attempt=attempt, parts=3, weight=0.0, lr=9.0, scale=scale), tables=[]
    )


def test_a_step_that_is_clipped_waits_for_its_factor_and_gives_the_squares_of_the_sum_of_its_parts_until_the_next_one():
    held = make_held()
    for part, value in ((0, 2.0), (1, 1.0)):
        assert held.push(part_of(0, part, value, attempt=1, parts=3))
    assert held.sum_squares(0, 0) == 18.0  # of one row of two threes
    held = Held.load(*held.dump())
    assert held.push(scale_of(0, 0.5, attempt=1))
    (rows,), _ = held.pull([("t", IDS)], dense=False)
    assert rows.tolist() == [[-1.5, -1.5]]
    held = Held.load(*held.dump())
    assert held.sum_squares(0, 0) == 18.0  # a group that repeats the step asks again
    assert not held.push(scale_of(0, 0.1, attempt=2))
    assert held.pull([("t", IDS)], dense=False)[0][0].tolist() == rows.tolist()
    with pytest.raises(GradientError, match="no gradients of step 1, after 1 steps"):
        held.sum_squares(0, 1)


def test_the_factor_of_an_attempt_that_died_scales_no_later_one():
    held = make_held()
    held.push(part_of(0, 0, 5.0, attempt=1, parts=3))
    held.push(scale_of(0, 0.5, attempt=1))
    for part, value in ((0, 2.0), (1, 1.0)):
        held.push(part_of(0, part, value, attempt=2, parts=3))
    assert held.steps == 0
    assert not held.push(scale_of(0, 0.5, attempt=1))
    assert held.push(scale_of(0, 1.0, attempt=2))
    assert held.pull([("t", IDS)], dense=False)[0][0].tolist() == [[-3.0, -3.0]]
