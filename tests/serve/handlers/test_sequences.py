"""Sequences of a stateful model: which worker, in which order, until when. The clock is moved, nothing is started."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trueline.errors import RequestError
from trueline.serve.handlers import config as plans
from trueline.serve.handlers import sequences
from trueline.serve.handlers.archive import ArchiveError, Manifest
from trueline.serve.handlers.config import HandlerPlan, Terms
from trueline.serve.handlers.sequences import Refusal, SequencePart, Sequences
from trueline.torchserve.compat.ts.context import Context, RequestProcessor

MANIFEST = Manifest(model="noop", version="1.0", handler="noop.py")
CONFIG = {
    "batchSize": 2,
    "sequenceMaxIdleMSec": 10_000,
    "sequenceTimeoutMSec": 60_000,
    "maxNumSequence": 3,
    "maxSequenceJobQueueSize": 2,
}


@dataclass(eq=False)
class Job:
    part: SequencePart | None
    since: float = 0.0
    alone: bool = False


def plan(**config: Any) -> HandlerPlan:
    return plans.draw_up(MANIFEST, CONFIG | config, {})


class World:
    """Sequences with a clock of their own; `ask` puts a request behind those of its sequence."""

    def __init__(self, **config: Any) -> None:
        self.plan = plan(**config)
        assert self.plan.sequences is not None
        self.sequences: Sequences[Job] = Sequences(self.plan.sequences)
        self.now = 0.0

    def ask(self, name: str, *, start: bool = False, end: bool = False) -> Job:
        job, refused = self.tried(name, start=start, end=end)
        assert refused is None
        return job

    def tried(self, name: str, *, start: bool = False, end: bool = False) -> tuple[Job, Refusal | None]:
        job = Job(SequencePart(name, start, end), self.now)
        return job, self.sequences.join(job, now=self.now, room=3)

    def take(self, worker: int, *workers: int) -> list[Job]:
        self.sequences.place(workers or (worker,))
        return self.sequences.take(worker, now=self.now, plan=self.plan)[0]

    def answer(self, worker: int, jobs: list[Job], *closed: str) -> list[Job]:
        return [job for job, _ in self.sequences.finish(worker, jobs, closed, now=self.now)]

    def pass_s(self, seconds: float) -> list[Job]:
        self.now += seconds
        return [job for job, _ in self.sequences.expire(self.now)]


def test_a_sequence_stays_on_one_worker_and_its_requests_go_one_after_the_other() -> None:
    world = World()
    first, second = world.ask("a"), world.ask("a")
    assert world.take(0, 0, 1) == [first]
    assert world.take(0, 0, 1) == [], "the second waits for the first to be answered"
    assert world.take(1, 0, 1) == [], "the other worker does not know the sequence"
    world.answer(0, [first])
    assert world.take(0, 0, 1) == [second]


def test_sequences_are_spread_over_the_workers_and_those_of_one_share_its_batches() -> None:
    world = World(maxBatchDelay=1000)
    a, b, c = world.ask("a"), world.ask("b"), world.ask("c")
    assert world.take(0, 0, 1) == [a, c], "a batch is not waited for when every sequence of its worker is in it"
    assert world.take(1, 0, 1) == [b]
    world.answer(0, [a, c])
    again = world.ask("a")
    assert world.take(0, 0, 1) == [], "c may come along"
    assert world.sequences.take(0, now=world.now, plan=world.plan)[1] == 1.0
    world.now = 1.0
    assert world.take(0, 0, 1) == [again]


def test_what_is_over_the_bounds_is_refused_in_words() -> None:
    world = World()
    running = world.ask("a")
    world.take(0)
    world.ask("a")
    world.ask("a")
    _, full = world.tried("a")
    assert full is not None
    assert full.why == "2 requests of sequence 'a' wait already"
    world.ask("b")
    world.ask("c")
    _, crowded = world.tried("d")
    assert crowded is not None
    assert crowded.why == "as many sequences are open as may be (3)"
    assert "maxNumSequence" in crowded.hint
    assert plan(minWorkers=4).max_sequences(4) == 8, "a batch of each worker has room in any case"
    world.answer(0, [running])


def test_a_closed_sequence_is_refused_until_a_request_begins_it_again() -> None:
    world = World()
    world.ask("a", end=True)
    _, behind = world.tried("a")
    assert behind is not None
    assert behind.why == "sequence 'a' is closed"
    last = world.take(0)
    assert world.answer(0, last) == []
    assert world.sequences.num_open == 0
    _, late = world.tried("a")
    assert late is not None
    assert "ts_request_sequence_start: true" in late.hint
    world.ask("a", start=True)
    world.ask("a")
    assert world.sequences.num_open == 1


def test_a_handler_closes_sequences_of_its_own_worker_and_who_waits_there_is_told() -> None:
    world = World()
    a, b = world.ask("a"), world.ask("b")
    assert world.take(0, 0, 1) == [a]
    assert world.take(1, 0, 1) == [b]
    waiting, begun = world.ask("a"), world.ask("a", start=True)
    assert world.answer(0, [a], "b", "a", "nobody") == [waiting], "who begins it again is kept"
    assert world.take(0, 0, 1) == [begun]
    world.answer(1, [b])
    world.ask("b")


def test_a_sequence_that_is_idle_or_lasts_too_long_expires_and_frees_its_place() -> None:
    world = World()
    world.ask("a")
    world.answer(0, world.take(0))
    assert world.sequences.wake_at() == 10.0
    assert (world.pass_s(9.9), world.sequences.num_open) == ([], 1)
    assert (world.pass_s(0.2), world.sequences.num_open) == ([], 0)
    _, idle = world.tried("a")
    assert idle is not None
    assert idle.why == "sequence 'a' has expired: it was idle for 10 s"
    waits = world.ask("b")
    assert world.pass_s(11.0) == [], "one that waits for a worker is not idle"
    first = world.take(0)
    assert first == [waits]
    world.pass_s(59.0)
    assert world.sequences.num_open == 1, "one that runs is not idle"
    behind = world.ask("b")
    assert world.pass_s(2.0) == [], "nor is it cut off while it runs"
    world.answer(0, first)
    assert world.pass_s(0.0) == [behind]
    _, expired = world.tried("b")
    assert expired is not None
    assert expired.why == "sequence 'b' has expired: it lasted 60 s"


def test_an_id_is_as_new_when_its_end_is_long_past_but_one_that_the_server_made_never() -> None:
    world = World()
    made = sequences.read_part({}).id
    for name in ("a", made):
        world.ask(name, start=True, end=True)
    assert len(world.answer(0, world.take(0))) == 0
    world.pass_s(sequences.REMEMBERED_S - 1)
    assert world.tried("a")[1] is not None
    world.pass_s(1)
    world.ask("a")
    _, unknown = world.tried(made)
    assert unknown is not None
    assert "not known here" in unknown.why


def test_what_a_dead_worker_remembered_is_lost_and_what_it_had_not_begun_is_not() -> None:
    world = World()
    running = world.ask("a")
    world.take(0)
    behind, fresh = world.ask("a"), world.ask("b")
    world.sequences.place([0])
    dropped = world.sequences.drop_worker(0, now=world.now)
    assert [(job, refused.why) for job, refused in dropped] == [(behind, "sequence 'a' was lost with its worker")]
    assert world.answer(0, [running]) == []
    _, late = world.tried("a")
    assert late is not None
    assert late.why == "sequence 'a' was lost with its worker"
    assert world.take(1) == [fresh]
    again = world.ask("a", start=True, end=True)
    assert world.take(2, 2) == [again]
    world.answer(2, [running, Job(SequencePart("a", end=True))])
    assert world.sequences.num_open == 2, "an answer of the life before does not end this one"


def test_a_request_that_is_taken_back_leaves_no_gap_that_keeps_others_waiting() -> None:
    world = World()
    gone = world.ask("a")
    assert world.sequences.leave(gone)
    assert not world.sequences.leave(gone)
    assert world.sequences.num_open == 0, "nothing of it has reached a worker"
    first = world.ask("a")
    assert world.take(0) == [first]
    end, again = world.ask("a", end=True), world.ask("a", start=True)
    assert world.sequences.leave(end)
    assert world.answer(0, [first], "a") == [], "who begins it again is kept"
    assert world.sequences.leave(again)
    assert world.tried("a")[1] is not None, "and it is closed as it was when that one goes"


# what requests and archives say


def test_a_request_says_its_sequence_in_headers_and_one_that_says_none_begins_one() -> None:
    assert sequences.read_part({"ts_request_sequence_id": "a", "ts_request_sequence_start": "True"}) == SequencePart(
        "a", True
    )
    made = sequences.read_part({"ts_request_sequence_start": "false"})
    assert re.fullmatch(r"ts-seq-[0-9a-f-]{36}", made.id)
    assert (made.start, made.end) == (True, False)
    for name in ("a\nb", "x" * 129):
        with pytest.raises(RequestError, match="up to 128 printable characters"):
            sequences.read_part({"ts_request_sequence_id": name})


def test_a_handler_finds_its_sequence_in_the_context() -> None:
    context = Context("noop", "/m", {}, 1, None, "1")
    headers = sequences.encode_headers(SequencePart("a", start=True))
    context.request_processor = [RequestProcessor(headers)]
    assert context.get_sequence_id(0) == "a"
    assert context.get_request_header(0, context.header_key_sequence_start) == "true"
    assert context.get_request_header(0, context.header_key_sequence_end) is None
    context.cache["a"] = 1
    context.set_response_header(0, context.header_key_sequence_end, "a")
    assert sequences.closed_by(context.get_response_headers(0)) == ["a"]


def test_an_archive_is_stateful_by_its_configuration() -> None:
    made = plan()
    assert made.sequences == Terms(max_idle_s=10.0, timeout_s=60.0, max_sequences=3, queue_size=2)
    assert plans.find_ignored(CONFIG | {"useVenv": True}, made) == ["useVenv"]
    plain = plan(sequenceBatching=False)
    assert plain.sequences is None
    assert set(plans.find_ignored(CONFIG, plain)) == set(plans.OF_SEQUENCES)
    for config, words in [
        ({"sequenceBatching": True, "sequenceMaxIdleMSec": 0}, "'sequenceMaxIdleMSec'"),
        ({"sequenceBatching": "yes"}, "true or false, not 'yes'"),
        ({"maxNumSequence": "many"}, "'maxNumSequence'"),
    ]:
        with pytest.raises(ArchiveError, match=words):
            plan(**config)


# whatever happens

WORKERS = (0, 1)
NAMES = st.sampled_from("abcd")


class Anything(RuleBasedStateMachine):
    """Requests come and go back, workers run and die, time passes; each request has one fate, in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(maxBatchDelay=500)
        self.batches: dict[int, list[Job]] = {}
        self.fates: dict[Job, str] = {}
        self.numbers: dict[Job, int] = {}
        self.last: dict[str, int] = {}
        self.home: dict[str, int] = {}
        self.began_at: dict[str, float] = {}
        self.answered_at: dict[str, float] = {}

    def settle(self, jobs: list[Job], fate: str) -> None:
        for job in jobs:
            assert self.fates[job] == ("runs" if fate in ("answered", "died") else "waits")
            self.fates[job] = fate

    @rule(name=NAMES, start=st.booleans(), end=st.booleans(), alone=st.booleans())
    def request(self, name: str, start: bool, end: bool, alone: bool) -> None:
        job = Job(SequencePart(name, start, end), self.world.now, alone)
        refused = self.world.sequences.join(job, now=self.world.now, room=3)
        self.fates[job] = "refused" if refused else "waits"
        self.numbers[job] = len(self.numbers)

    @rule(data=st.data())
    @precondition(lambda self: self.world.sequences.waiting())
    def withdraw(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.world.sequences.waiting()))
        assert self.world.sequences.leave(job)
        self.settle([job], "withdrawn")

    @rule(worker=st.sampled_from(WORKERS))
    def run(self, worker: int) -> None:
        if worker in self.batches:
            return
        jobs = self.world.take(worker, *WORKERS)
        names = [job.part.id for job in jobs if job.part]
        assert len(names) == len(set(names)) <= 2
        assert len(jobs) < 2 or not any(job.alone for job in jobs)
        for job, name in zip(jobs, names, strict=True):
            assert self.numbers[job] > self.last.get(name, -1), "in the order in which they came"
            if name not in self.home or (job.part and job.part.start):
                self.began_at[name] = self.world.now
            assert self.home.setdefault(name, worker) == worker, "on the worker that remembers it"
            self.last[name] = self.numbers[job]
            assert self.fates[job] == "waits"
            self.fates[job] = "runs"
        if jobs:
            self.batches[worker] = jobs

    @rule(worker=st.sampled_from(WORKERS), closed=st.lists(NAMES, max_size=2))
    def answer(self, worker: int, closed: list[str]) -> None:
        jobs = self.batches.pop(worker, None)
        if jobs is None:
            return
        self.settle(jobs, "answered")
        self.answered_at |= {job.part.id: self.world.now for job in jobs if job.part}
        self.settle(self.world.answer(worker, jobs, *closed), "dropped")
        for name in [*closed, *(job.part.id for job in jobs if job.part and job.part.end)]:
            if self.home.get(name) == worker:
                del self.home[name]

    @rule(worker=st.sampled_from(WORKERS))
    def die(self, worker: int) -> None:
        self.settle(self.batches.pop(worker, []), "died")
        self.settle([job for job, _ in self.world.sequences.drop_worker(worker, now=self.world.now)], "dropped")
        self.home = {name: where for name, where in self.home.items() if where != worker}
        assert self.world.sequences.on(worker) == 0

    @rule(seconds=st.sampled_from([0.1, 1.0, 9.0, 11.0, 61.0]))
    def wait(self, seconds: float) -> None:
        asked = {job.part.id for job in self.world.sequences.waiting() if job.part}
        runs = {job.part.id for jobs in self.batches.values() for job in jobs if job.part}
        self.settle(self.world.pass_s(seconds), "dropped")
        wake_at = self.world.sequences.wake_at()
        assert wake_at is None or wake_at > self.world.now
        for name in set(self.home) - runs:
            idle = name not in asked and self.world.now >= self.answered_at[name] + 10.0
            if idle or self.world.now >= self.began_at[name] + 60.0:
                del self.home[name]

    @invariant()
    def bounded(self) -> None:
        waiting = [job.part.id for job in self.world.sequences.waiting() if job.part]
        assert all(waiting.count(name) <= 2 for name in waiting)
        assert self.world.sequences.num_open <= 3
        assert sorted(map(id, self.world.sequences.waiting())) == sorted(
            id(job) for job, fate in self.fates.items() if fate == "waits"
        )

    def teardown(self) -> None:
        for _ in range(100):
            for worker in WORKERS:
                self.answer(worker, [])
                self.world.now += 0.5
                self.run(worker)
        assert set(self.fates.values()) <= {"refused", "withdrawn", "answered", "died", "dropped"}
        self.world.pass_s(100.0)
        assert (self.world.sequences.num_open, self.world.sequences.wake_at()) == (0, None)


Anything.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestEveryRequestHasOneFateAndEverySequenceItsOrder = Anything.TestCase
