"""Promises of a pool that need no process: which answer counts, whom a failure is put down to, when it ends."""

import asyncio
import io
import json
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from trueline import errors
from trueline.batch import evaluate, worker
from trueline.batch import job as parts
from trueline.batch.job import BatchJob
from trueline.batch.pool import ChunkOrder, ChunkScheduler, Work, WorkerMessage
from trueline.checkpoint import checkpoint
from trueline.data.tools.writer import WritePlan
from trueline.engine.contract import Kind, Seen

WORK = Work(entry="x:y", recipe="r.py", recipe_digest="d", source="", mode="evaluation", num_records=10, batch=4)


class Line:
    """What a worker is sent."""

    def __init__(self):
        self.orders = []

    def write(self, line):
        self.orders.append(json.loads(line))


class Engine:
    def __init__(self):
        self.added = []

    async def add(self, specs):
        self.added += [spec.ref for spec in specs]


class Pool:
    """A pool in a loop of its own, with workers that the test plays."""

    def __init__(self, tmp_path, work=WORK, workers=2):
        self.loop, self.advanced = asyncio.new_event_loop(), []
        self.pool = ChunkScheduler(work, workers, tmp_path, self.advanced.append)
        self.pool.ended = self.loop.create_future()
        self.pool.engine = Engine()
        self.lines = {}

    def ready(self, *slots, records=10):
        for slot in slots:
            self.pool._check_ready(WorkerMessage(op="ready", records=records))
            self.lines[slot] = self.pool.connections[f"pool-{slot}.0"] = Line()
            self.pool._offer(f"pool-{slot}.0")
        return self

    def done(self, slot, reply):
        self.pool._finish_chunk(f"pool-{slot}.0", reply)
        self.pool._offer(f"pool-{slot}.0")
        return self

    def died(self, ref):
        self.loop.run_until_complete(self.pool._replace(Seen(ref=ref, kind=Kind.EXITED, code=1, reason="exit code 1")))

    def ended(self):
        return self.pool.ended.done()

    def orders(self, slot):
        return [(one["start"], one["stop"], one["careful"]) for one in self.lines[slot].orders]


@pytest.fixture
def of(tmp_path):
    made = []

    def new(*how, **kind):
        made.append(Pool(tmp_path, *how, **kind))
        return made[-1]

    yield new
    for one in made:
        if one.ended():
            one.pool.ended.exception()
        one.loop.close()


def test_a_pool_ends_with_the_last_chunk_and_its_replies_are_those_of_their_chunks(of):
    found = of().ready(0, 1)
    assert (found.orders(0), found.orders(1)) == ([(0, 4, False)], [(4, 8, False)])
    found.done(1, {"n": 2})
    assert found.orders(1)[1:] == [(8, 10, False)]
    found.done(1, {"n": 3})
    assert not found.ended()
    found.done(0, {"n": 1})
    assert (found.ended(), found.pool.replies, found.advanced) == (
        True,
        {0: {"n": 1}, 1: {"n": 2}, 2: {"n": 3}},
        [4, 6, 10],
    )


def test_a_chunk_that_two_workers_answer_counts_once(of):
    found = of().ready(0, 1)
    found.pool.chunks.held["pool-1.0"] = (0, 0.0)  # it was slow, and given again
    found.done(0, {"n": 1}).done(1, {"n": 2})
    assert (found.pool.replies, found.advanced, found.ended()) == ({0: {"n": 1}}, [4], False)


def test_a_record_that_was_tried_in_an_earlier_chunk_is_not_named_in_a_later_one(of):
    found = of().ready(0)
    found.pool.trying["pool-0.0"] = 3
    found.done(0, {})
    assert found.pool.trying == {}


def test_chunks_that_were_done_before_are_given_to_nobody_and_no_worker_is_started_for_them(of):
    found = of(msgspec.structs.replace(WORK, done=(0, 2)), workers=5).ready(0)
    assert (found.pool.workers, found.orders(0)) == (1, [(4, 8, False)])
    assert found.done(0, {}).ended()


def failed(found, slot, **how):
    found.pool._fail_chunk(f"pool-{slot}.0", WorkerMessage(op="failed", code="data", why="torn", hint="look", **how))
    found.pool._offer(f"pool-{slot}.0")


def test_a_chunk_that_fails_three_times_ends_the_pool_and_is_tried_record_by_record_before(of):
    found = of(msgspec.structs.replace(WORK, num_records=4)).ready(0, records=4)
    for _ in range(2):
        failed(found, 0)
    assert [careful for *_, careful in found.orders(0)] == [False, True, True]
    with pytest.raises(errors.DataError, match="torn") as last:
        failed(found, 0)
    assert last.value.hint == "look"


def test_what_every_worker_would_meet_ends_the_pool_at_once(of):
    with pytest.raises(errors.DataError, match="torn"):
        failed(of().ready(0), 0, fatal=True)


def test_a_worker_that_sees_other_records_ends_the_pool(of):
    with pytest.raises(errors.DataError, match=r"has 11 records in a worker and 10 here"):
        of().ready(0, records=11)


def test_a_worker_that_dies_is_replaced_and_its_chunk_given_to_another(of):
    found = of().ready(0, 1)
    found.died("pool-0.0")
    assert found.pool.engine.added == ["pool-0.1"]
    found.done(1, {}).done(1, {})
    assert found.orders(1) == [(4, 8, False), (8, 10, False), (0, 4, True)]


def test_a_record_that_ends_every_process_is_named_as_far_as_it_is_known(of):
    for trying, named in ((3, "record 3 of"), (None, "one of the records 0 to 3 of")):
        found = of().ready(0)
        for _ in range(2):
            found.died("pool-0.0")
            found.pool.connections["pool-0.0"] = Line()
            found.pool.chunks._waiting.rotate(1)  # it is the next one again
            found.pool._offer("pool-0.0")
        if trying is not None:
            found.pool.trying["pool-0.0"] = trying
        with pytest.raises(errors.DataError, match=f"{named} .*ends every process that works on it: exit code 1"):
            found.died("pool-0.0")


def test_workers_that_end_before_they_are_ready_end_the_pool_when_it_is_three_in_a_row(of):
    found = of()
    found.died("pool-0.0")
    found.died("pool-1.0")
    found.ready(0)
    found.died("pool-1.1")
    found.died("pool-1.2")
    with pytest.raises(errors.TrainError, match="workers end before they are ready: exit code 1"):
        found.died("pool-1.3")


# The worker's side. --------------------------------------------------------------------------------------------------


def compute(*bad, whole=True):
    def one(start, stop):
        if any(start <= record < stop for record in bad) or (not whole and stop - start > 1):
            raise ValueError("odd")
        return {"sum": sum(range(start, stop))}

    return one


@pytest.mark.parametrize(
    ("bad", "whole", "bounds", "named"),
    [
        ((6,), True, (4, 8), "record 6: ValueError: odd"),
        ((5, 7), True, (4, 8), "record 5: ValueError: odd"),
        ((4, 5, 6, 7), True, (4, 8), "records 4 to 7: ValueError: odd"),
        ((), False, (4, 8), "records 4 to 7: ValueError: odd"),
        ((4,), True, (4, 5), "record 4: ValueError: odd"),
    ],
)
def test_a_chunk_that_fails_names_the_record_at_fault_where_one_is(bad, whole, bounds, named):
    answer = worker._compute(
        io.BytesIO(), compute(*bad, whole=whole), ChunkOrder(start=bounds[0], stop=bounds[1], careful=False)
    )
    assert (answer["op"], answer["why"], answer["code"]) == ("failed", named, "recipe")


def test_a_careful_worker_says_which_record_it_tries_before_it_answers():
    said = io.BytesIO()
    answer = worker._compute(said, compute(), ChunkOrder(start=4, stop=7, careful=True))
    assert answer == {"op": "done", "reply": {"sum": 15}}
    assert [json.loads(line)["record"] for line in said.getvalue().splitlines()] == [4, 5, 6]


# Sums of an evaluation. ----------------------------------------------------------------------------------------------


def test_sums_count_each_record_once_whatever_the_chunks_are():
    chunks = [{"loss": 8.0, "metric a": 2.0, "taken 0 1": 1.0}, {"loss": 1.0, "metric a": 3.0}]
    assert evaluate._add(chunks) == {"loss": 9.0, "metric a": 5.0, "taken 0 1": 1.0}


def test_a_recipe_that_no_other_process_could_load_is_not_shared_out():
    recipe, how = SimpleNamespace(path=None, digest="d", name="r"), {"source": "s", "mode": "evaluation"}
    found = BatchJob(recipe=recipe, given="r:x", **how).work("a:b", num_records=3, chunk=2)
    assert (found.recipe, found.recipe_digest, found.num_records, found.batch) == ("r:x", "d", 3, 2)
    with pytest.raises(errors.UsageError, match="has no file that worker processes could load"):
        BatchJob(recipe=recipe, given=object(), **how).work("a:b", num_records=3, chunk=2)


# Parts. --------------------------------------------------------------------------------------------------------------


def digest_of(source, *, digest="r", mode="evaluation", batch=4):
    job = BatchJob(recipe=SimpleNamespace(digest=digest), given="r", source=source, mode=mode, batch=batch)
    return parts.digest_inputs(job)


def test_answers_are_made_of_the_recipe_the_checkpoints_content_what_is_read_and_the_batch(tmp_path):
    def made_of(value, *, digest="r", mode="evaluation", batch=4):
        path = checkpoint.write(tmp_path, step=1, state={"w": torch.full((2,), value)}, facts={})
        return digest_of(str(path), digest=digest, mode=mode, batch=batch)

    others = [made_of(2.0), made_of(1.0, digest="s"), made_of(1.0, mode="training"), made_of(1.0, batch=5)]
    assert len({made_of(1.0), *others, digest_of("")}) == 6


@pytest.mark.parametrize("workers", [1, 3])
def test_where_all_parts_are_there_nothing_is_opened_or_started(tmp_path, monkeypatch, workers):
    plan = WritePlan(num_records=5, range_records=2, format="jsonl", of="x")

    def answer(start, stop):
        return {"y": np.arange(start, stop, dtype=np.float64)}

    def job(workers):
        return BatchJob(recipe=None, given=None, source="", mode="evaluation", batch=1, workers=workers)

    out, how = tmp_path / "out", {"entry": "no:pool", "event": "evaluation.advanced"}
    assert parts.write(out, job(1), plan, open_answer=lambda: (5, answer), **how) == 3
    monkeypatch.setattr(parts.pool, "run", lambda *_, **__: pytest.fail("no pool"))
    assert parts.write(out, job(workers), plan, open_answer=lambda: pytest.fail("no model"), **how) == 0
    assert parts.sum_columns(out) == {"record": 10.0, "y": 10.0}
