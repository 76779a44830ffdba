"""A server without memory for new rows says what a row costs, and holds them back; known ones are trained on."""

import numpy as np

from trueline.ps.messages import ModelSpec, OptimizerSpec, TableSpec
from trueline.ps.partition import make_routing
from trueline.ps.server import memory
from trueline.ps.server.memory import MemoryBudget, find_system_left
from trueline.ps.tables.held import Held, Push

ROW = 4 * 4 + 4 * 4 + 8
"""Bytes of a row of 4 numbers, with Adagrad's sums and its id."""


def make(**table):
    spec = ModelSpec(
        seed=0, groups=(OptimizerSpec(kind="adagrad"),), tables=(TableSpec(name="users", dim=4, group=0, **table),)
    )
    return Held(spec, make_routing(["server-0"], ()), 0)


def push_of(minibatch, ids):
    rows = np.ones((len(ids), 4), np.float32)
    return Push(epoch=0, minibatch=minibatch, part=0, parts=1, weight=1.0, lrs=(0.1,),
                tables=[("users", np.array(ids, np.int64), rows)], dense=[])  # fmt: skip


def test_new_rows_wait_until_there_is_memory_and_rows_that_are_there_do_not():
    held, left = make(), [3 * ROW]
    budget = MemoryBudget(find_left=lambda: left[0])
    assert budget.take(held, push_of(0, [1, 2, 3])) == ""
    held.push(push_of(0, [1, 2, 3]))
    left[0] = -5
    why = budget.take(held, push_of(1, [3, 4]))
    assert f"users has 3 rows of {held.stats[0].bytes / 3:.0f} bytes; they wait, and nothing is lost" in why
    assert "resume it on a larger one" in why
    assert budget.take(held, push_of(1, [1, 3])) == ""
    left[0] = ROW
    assert budget.take(held, push_of(1, [3, 4])) == ""


def test_an_operators_bound_is_named():
    why = MemoryBudget(1).take(make(), push_of(0, [1]))
    assert "of 0.00 GB that it may have (--server-memory-mb)" in why
    assert "trueline scale JOB --servers N adds servers" in why


def test_rows_that_went_leave_room_for_others():
    held, left = make(), [ROW * 4]
    budget = MemoryBudget(find_left=lambda: left[0])
    held.push(push_of(0, [1, 2, 3]))
    left[0] = 0
    assert budget.take(held, push_of(1, [7])) != ""
    held._tables["users"].drop(np.array([2, 3]))
    assert budget.take(held, push_of(1, [7, 8])) == ""
    assert budget.take(held, push_of(1, [7, 8, 9])) != ""


def test_an_index_that_doubles_may_take_more_at_once_than_the_system_is_asked_for(monkeypatch):
    monkeypatch.setattr(memory, "_STEP", 2 * ROW)
    held = make()
    budget = MemoryBudget(find_left=lambda: 100 * ROW)
    assert budget.take(held, push_of(0, range(50))) == ""
    assert budget.take(held, push_of(0, range(2000))) != ""


def test_a_table_with_a_bound_needs_no_more_than_its_rows():
    held = make(max_rows=2, evict="lru")
    assert held.count_growth(push_of(0, [1, 2, 3, 4])) == 2 * (ROW + 8)  # and when each was used
    held.push(push_of(0, [1, 2]))
    assert held.count_growth(push_of(1, [5, 6])) == 0


def test_an_index_that_has_to_grow_counts():
    held = make()
    ids = np.arange(600)
    growth = held.count_growth(push_of(0, ids))
    held.push(push_of(0, ids))
    assert growth == 600 * ROW + held._tables["users"]._index.nbytes - (1 << 10) * 16


def test_a_cgroup_leaves_what_its_limit_and_copies_of_files_say(tmp_path):
    assert find_system_left() < 1 << 50
    for name, text in (("memory.max", "1000"), ("memory.current", "900"), ("memory.stat", "inactive_file 300\nx 1")):
        (tmp_path / name).write_text(f"{text}\n")
    files = "memory.max", "memory.current", ("inactive_file", "active_file")
    assert list(memory._read_limit(tmp_path, *files)) == [400]
    (tmp_path / "memory.max").write_text("max\n")
    assert list(memory._read_limit(tmp_path, *files)) == []
