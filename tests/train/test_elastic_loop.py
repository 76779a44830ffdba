"""Promises of a worker's loop, with a master that the test plays: one process, a group of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.utils.data import TensorDataset

from trueline.errors import TrainError
from trueline.parallel import gloo
from trueline.train import elastic
from trueline.train.elastic import Elastic
from trueline.train.link.local_client import LocalLink
from trueline.train.step import ledger as books
from trueline.train.step import model_traits
from trueline.train.step.commit import StepReporter
from trueline.train.step.ledger import StepAccount
from trueline.train.step.options import Options
from trueline.train.step.plan import JobPlan
from trueline.train.step.validation import Rule, Validation
from trueline.wire import train_pb2 as pb

ME = "worker-0.0"
RECORDS, BATCH, STEPS = 10, 4, 3


_jobs: list[Elastic] = []


@pytest.fixture(autouse=True)
def _no_group_is_left():
    """A loop that a test has left in its middle leaves its group when it is collected, and shuts all sockets that came
    after that group, those of another test among them. So each is left here."""
    yield
    while _jobs:
        _jobs.pop()._group.process_group.close()
    if dist.is_initialized():
        dist.destroy_process_group()


class Line(LocalLink):
    """A line whose views and answers the test gives, and what the worker says on it."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []
        self.entered: list[tuple[int, int]] = []
        self.unfinished = 0

    def next_view(self, *, forced: bool = False, **fields: Any) -> None:
        """The next view, of this worker alone."""
        last = self.view
        assert last is not None
        generation = last.generation + 1
        cut_below = generation if forced else last.cut_below
        self.view = pb.View(generation=generation, members=[self.ref], cut_below=cut_below, **fields)

    def enter(self, generation: int, step: int, rate: float) -> pb.Plan:
        self.entered.append((generation, step))
        return super().enter(generation, step, rate)

    def finish(self, generation: int, step: int, certificates: Sequence[pb.Certificate]) -> pb.Plan:
        self.said.append(("finish", generation, step, [one.epoch for one in certificates]))
        if self.unfinished:
            self.unfinished -= 1
            self.next_view(forced=True)
            return pb.Plan(superseded=True)
        return super().finish(generation, step, certificates)

    def announce_trial(self, step: int, record: int, where: str) -> None:
        self.said.append(("trying", step, record))


def connected(store: str, generation: int, rank: int, size: int, *_: Any) -> Any:
    """A group of one, which needs no network to meet in."""
    named = dist.PrefixStore(f"generation-{generation}", dist.HashStore())
    return ProcessGroupGloo(named, rank, size, timeout=timedelta(seconds=60)), named, None, None


class Checkpointer:
    """Where a checkpointer would write, it notes on the line that it was asked to."""

    def __init__(self, line: Line) -> None:
        self.line = line

    def after_step(self, replica: Any, link: Any, *, ends_epoch: bool, best: bool = False, due: bool = False) -> None:
        asked = [name for name, is_so in (("epoch", ends_epoch), ("best", best), ("due", due)) if is_so]
        self.line.said.append(("keep", replica.ledger.steps, *asked))

    def complete(self, replica: Any, link: Any) -> None:
        self.line.said.append(("complete", replica.ledger.steps))


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(RECORDS, 4, generator=made), torch.randn(RECORDS, 1, generator=made))


def model_of() -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(4, 1)


def job_of(
    monkeypatch: pytest.MonkeyPatch, *, model: Any = None, epochs: int = 2, keep: bool = False, **kind: Any
) -> tuple[Elastic, Line]:
    line = Line()
    monkeypatch.setattr(elastic, "connect", lambda _: line)
    monkeypatch.setattr(elastic, "StoreServer", lambda: SimpleNamespace(address="here:1", close=lambda: None))
    monkeypatch.setattr(gloo, "_connect_members", connected)
    model = model or model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {name: kind.pop(name) for name in ("micro_batch", "bitwise", "clip_norm") if name in kind}
    kind.setdefault("traits", model_traits.read_traits(model))  # as if another worker had tried the loss
    checkpointer: Any = Checkpointer(line) if keep else None
    job = Elastic(model, optimizer, data(), global_batch=BATCH, epochs=epochs, options=Options(**options),
                  checkpointer=checkpointer, **kind)  # fmt: skip
    _jobs.append(job)
    return job, line


def loss_of(job: Elastic, batch: Any) -> torch.Tensor:
    return ((job.model(batch.inputs) - batch.labels) ** 2).mean()


def trained(job: Elastic, at: Any = lambda step: None) -> list[tuple[int, list[int]]]:
    """Runs the loop; the batches that it gave out, and `at` is called before each."""
    given = []
    for batch in job:
        at(batch.step)
        given.append((batch.step, batch.records.tolist()))
        job.step(loss_of(job, batch))
    return given


def expected(epochs: int = 2) -> torch.nn.Linear:
    """The model after plain training: the mean loss of each step's records."""
    model, plan = model_of(), JobPlan(num_records=RECORDS, global_batch=BATCH, epochs=epochs, seed=0)
    optimizer, tensors = torch.optim.SGD(model.parameters(), lr=0.1), data().tensors
    for step in range(plan.total_steps):
        at = torch.from_numpy(plan.records(step))
        optimizer.zero_grad()
        ((model(tensors[0][at]) - tensors[1][at]) ** 2).mean().backward()
        optimizer.step()
    return model


def expect_the_same(model: Any, other: Any) -> None:
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [{}, {"micro_batch": 3}, {"micro_batch": 1}, {"bitwise": True}], ids=str)
def test_a_step_is_one_of_the_mean_loss_of_its_records_however_it_is_cut(monkeypatch, kind):
    job, line = job_of(monkeypatch, **kind)
    given = trained(job)
    expect_the_same(job.model, expected())
    for epoch in range(2):
        of_epoch = [record for step, records in given if step // STEPS == epoch for record in records]
        assert sorted(of_epoch) == list(range(RECORDS))
    whole = {"steps": STEPS, "records": RECORDS, "digest": books.digest_of_all(RECORDS), "tally_min": 1,
             "tally_max": 1, "set_aside": [], "set_aside_of": [], "reduction": "mean"}  # fmt: skip
    assert job.certificates == [{"epoch": epoch, **whole} for epoch in range(2)]
    assert [one.step for one in line.steps] == list(range(2 * STEPS))
    assert [one.records for one in line.steps] == [4, 4, 2] * 2


def test_the_end_of_a_job_is_certified_reported_and_written_before_it_is_said(monkeypatch):
    job, line = job_of(monkeypatch, keep=True)
    trained(job)
    assert line.said == [
        ("keep", 1), ("keep", 2), ("keep", 3, "epoch"), ("keep", 4), ("keep", 5), ("keep", 6, "epoch"),
        ("complete", 6), ("finish", 1, 6, [0, 1]),
    ]  # fmt: skip
    assert line.entered == [(1, -1)]


def test_a_worker_that_is_done_stays_for_the_others_until_all_are(monkeypatch):
    job, line = job_of(monkeypatch)
    line.unfinished = 2
    trained(job)
    assert [one for one in line.said if one[0] == "finish"] == [
        ("finish", generation, 6, [0, 1]) for generation in (1, 2, 3)
    ]
    assert line.entered == [(1, -1), (2, 6), (3, 6)]
    assert job.steps == 6


def test_a_planned_view_is_entered_between_two_steps_with_all_that_was_applied(monkeypatch):
    job, line = job_of(monkeypatch)
    given = trained(job, lambda step: line.next_view() if step == 2 else None)
    assert line.entered == [(1, -1), (2, 3)]
    assert [step for step, _ in given] == list(range(6))
    expect_the_same(job.model, expected())


def test_a_forced_view_takes_the_step_at_hand_back_and_gives_its_records_out_again(monkeypatch):
    job, line = job_of(monkeypatch, micro_batch=2)
    forced = iter([True])
    given = trained(job, lambda step: line.next_view(forced=True) if step == 1 and next(forced, False) else None)
    assert line.entered == [(1, -1), (2, 1)]
    assert [step for step, _ in given] == [0, 0, 1, 1, 1, 2, 3, 3, 4, 4, 5]
    assert (job.certificates[0]["tally_min"], job.certificates[0]["tally_max"]) == (1, 1)
    expect_the_same(job.model, expected())


class Norm(torch.nn.Module):
    """A normalization layer before a linear one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.line = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.line(self.norm(inputs))


def failing(job: Elastic, *steps: int, early: bool = False) -> None:
    """The sums of these steps fail once, as when a peer dies; `early`: before any of them is there."""
    reduce, left = job._replica.reduce, list(steps)

    def broken(*how: Any) -> list[float]:
        fails = bool(left) and job.steps == left[0]
        summed = reduce(*how) if not (fails and early) else []
        if fails:
            left.pop(0)
            raise RuntimeError("gloo: Connection closed by peer")
        return summed

    job._replica.reduce = broken  # type: ignore[method-assign]


def complain(line: Line) -> None:
    """A worker whose step failed waits for a view that cuts its group, and gets one."""
    waits, wait = [], line.wait_view

    def wait_view(after: int, timeout_s: float, *, cuts: int = -1) -> Any:
        waits.append(cuts)
        if cuts > 0:
            line.next_view(forced=True)
        return wait(after, timeout_s, cuts=cuts)

    line.wait_view = wait_view  # type: ignore[method-assign]
    line.waits = waits  # type: ignore[attr-defined]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", [{}, {"micro_batch": 2}], ids=str)
def test_a_step_whose_sums_failed_leaves_no_trace_and_is_done_again(monkeypatch, kind, early):
    calm, _ = job_of(monkeypatch, model=Norm(), **kind)
    trained(calm)
    job, line = job_of(monkeypatch, model=Norm(), **kind)
    failing(job, 1, 4, early=early)
    complain(line)
    trained(job)
    assert line.waits == [-1, 1, 2]  # type: ignore[attr-defined]
    assert line.entered == [(1, -1), (2, 1), (3, 4)]
    assert job.certificates == calm.certificates
    for name, value in calm.model.state_dict().items():
        assert torch.equal(job.model.state_dict()[name], value), name
    assert [one.step for one in line.steps] == list(range(6))


def test_records_that_a_view_sets_aside_are_in_no_later_step(monkeypatch):
    job, line = job_of(monkeypatch)
    given = trained(job, lambda step: line.next_view(set_aside=[3, 8]) if step == 2 else None)
    later = [record for step, records in given if step > 2 for record in records]
    assert sorted(later) == [0, 1, 2, 4, 5, 6, 7, 9]
    assert [one["set_aside"] for one in job.certificates] == [[], [3, 8]]


def test_in_a_careful_view_each_record_is_announced_before_it_is_trained_in_a_step(monkeypatch):
    job, line = job_of(monkeypatch, epochs=1)

    def at(step):
        line.said.append(("given", step))
        if step == 0:
            line.next_view(careful=True)

    given = dict(trained(job, at))
    said = [one for one in line.said if one[0] in ("given", "trying")]
    assert said == [("given", 0)] + [
        one
        for step in (1, 2)
        for one in [*(("trying", step, record) for record in given[step]), ("trying", step, -1), ("given", step)]
    ]
    expect_the_same(job.model, expected(1))


def stopping(stop_at: int) -> Validation:
    """The evaluation after step `stop_at` is the first that is no better."""
    values = iter([10.0 - at if at < stop_at else 99.0 for at in range(1, 99)])
    return Validation(rule=Rule(every=1, monitor="loss", patience=1), num_records=1, names=(),
                      measure=lambda start, stop: [next(values)])  # fmt: skip


@pytest.mark.parametrize(("stop_at", "certified"), [(2, [2]), (3, [3]), (4, [3, 1])])
def test_a_job_that_an_evaluation_stops_ends_there_with_what_it_has_certified_and_written(
    monkeypatch, stop_at, certified
):
    job, line = job_of(monkeypatch, keep=True, validation=stopping(stop_at))
    trained(job)
    assert job.steps == stop_at
    assert [one["steps"] for one in job.certificates] == certified
    part = [] if stop_at == 3 else [("keep", stop_at, "due")]
    assert line.said[-2 - len(part) :] == [
        *part, ("complete", stop_at), ("finish", 1, stop_at, list(range(len(certified)))),
    ]  # fmt: skip
    best = [one for one in line.said if one[0] == "keep" and "best" in one]
    assert best == [("keep", step, "best") for step in range(1, stop_at)]


def test_after_a_regroup_the_evaluation_of_the_step_at_hand_is_made_again_and_counts_once(monkeypatch):
    measured: list[int] = []
    checked = Validation(rule=Rule(every=2, monitor="loss"), num_records=1, names=(),
                         measure=lambda start, stop: [float(measured.append(job.steps) or 1.0)])  # fmt: skip
    job, line = job_of(monkeypatch, validation=checked)
    trained(job, lambda step: line.next_view() if step == 1 else None)
    assert measured == [2, 4, 6]
    assert [one["step"] for one in job.evaluations] == [2, 4, 6]
    job, line = job_of(monkeypatch, validation=checked)
    measured.clear()
    failing(job, 2, 3)
    complain(line)
    trained(job)
    assert measured == [2, 2, 4, 6], "not all members need have entered the first one"
    assert [one["step"] for one in job.evaluations] == [2, 4, 6]


def test_who_has_no_state_yet_says_nothing_but_its_wish(monkeypatch):
    job, line = job_of(monkeypatch)
    batch = next(iter(job))
    job._contribution.add(batch.records, 0.5)
    holding, observing = job._account(0, holds=True), job._account(0, holds=False)
    assert (holding.count, holding.holders, holding.rates[0] > 0) == (4, 1, True)
    assert not any(observing.settings), "what its optimizer has is not the job's"
    assert observing == StepAccount(rates=[0.0], settings=observing.settings)
    line.next_view()
    assert job._account(0, holds=False) == StepAccount(wishes=1, rates=[0.0], settings=observing.settings)


def test_members_say_their_speed_at_the_place_of_their_rank(monkeypatch):
    job, _ = job_of(monkeypatch)
    next(iter(job))
    group = job._group
    group.view, group.rank = pb.View(generation=1, members=["a", "b", ME], cut_below=1), 2
    job._timer.rate, group.split = 7.0, SimpleNamespace(weights=(1.0, 1.0, 1.0))
    assert job._account(0, holds=True).rates == [0.0, 0.0, 7.0]


def test_random_numbers_of_a_shard_are_its_own_whatever_was_drawn_before(monkeypatch):
    class Drawing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.drop = torch.nn.Linear(4, 1), torch.nn.Dropout(0.5)
            self.drawn: list[tuple[int, float]] = []

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.line(self.drop(inputs))

    def masks(seed: int, disturb: bool) -> list[list[float]]:
        job, _ = job_of(monkeypatch, model=Drawing(), micro_batch=2, seed=seed, epochs=1)
        found = []
        for batch in job:
            found.append(torch.rand(3).tolist() + np.random.rand(2).tolist())
            if disturb:
                torch.rand(17), np.random.rand(5)
            job.step(loss_of(job, batch))
        return found

    calm = masks(0, False)
    assert masks(0, True) == calm
    assert len({tuple(one) for one in calm + masks(1, False)}) == 10, "each shard of each step and seed has others"


@pytest.mark.parametrize("micro_batch", [4, 2])
def test_running_statistics_move_once_a_step_by_what_its_shards_saw(monkeypatch, micro_batch):
    job, _ = job_of(monkeypatch, model=Norm(), micro_batch=micro_batch, epochs=1)
    plan, inputs = JobPlan(num_records=RECORDS, global_batch=BATCH, epochs=1, seed=0), data().tensors[0]
    mean, variance = torch.zeros(4), torch.ones(4)
    for step in range(STEPS):
        records = plan.records(step)
        shards = [
            inputs[torch.from_numpy(records[at : at + micro_batch])] for at in range(0, len(records), micro_batch)
        ]
        weights = [len(shard) / len(records) for shard in shards]
        mean += sum(weight * 0.1 * (shard.mean(0) - mean) for shard, weight in zip(shards, weights, strict=True))
        variance += sum(weight * 0.1 * (shard.var(0) - variance) for shard, weight in zip(shards, weights, strict=True))
    trained(job)
    torch.testing.assert_close(job.model.norm.running_mean, mean)
    torch.testing.assert_close(job.model.norm.running_var, variance)
    assert job.model.norm.num_batches_tracked == STEPS


def test_a_loss_that_is_no_number_is_looked_into_and_no_member_applies_the_step(monkeypatch):
    job, _ = job_of(monkeypatch)
    before = [value.clone() for value in job.model.parameters()]

    def take_all():
        for batch in job:
            job.step(loss_of(job, batch) * float("nan"))

    with pytest.raises(TrainError, match="the loss of step 0 is not finite"):
        take_all()
    assert (job.steps, job._link.steps) == (0, [])
    assert all(torch.equal(value, was) for value, was in zip(job.model.parameters(), before, strict=True))


def test_only_rank_0_writes_checkpoints(monkeypatch):
    job, line = job_of(monkeypatch, keep=True, epochs=1)
    group = job._group

    def report(step, *_):
        group.rank = 1 if step == 1 else 0

    monkeypatch.setattr(StepReporter, "report", lambda self, *what: report(*what))

    def back(step):
        group.rank = 0

    trained(job, back)
    assert [one for one in line.said if one[0] == "keep"] == [("keep", 1), ("keep", 3, "epoch")]


def test_a_member_that_still_takes_the_state_stands_at_the_step_of_the_others(monkeypatch):
    job, _ = job_of(monkeypatch)
    next(iter(job))
    assert job._at == 0
    job._recovery._fetch, job._recovery.observed = SimpleNamespace(over=False), 7
    assert job._at == 7


def test_a_loss_that_is_no_number_for_a_peers_sake_is_the_peers_to_explain(monkeypatch):
    job, line = job_of(monkeypatch)
    reduce, left = job._replica.reduce, [1]

    def poisoned(*how):
        summed = reduce(*how)
        if left and job.steps == left[0]:
            left.pop()
            return replace(summed, loss_sum=float("nan"))
        return summed

    monkeypatch.setattr(job._replica, "reduce", poisoned)
    complain(line)
    trained(job)
    assert line.entered == [(1, -1), (2, 1)], "it waits for the view without the record"
    expect_the_same(job.model, expected())


def test_what_is_read_ahead_is_the_part_of_the_next_step(monkeypatch):
    job, _ = job_of(monkeypatch)
    ahead, read = [], job._reader.read_ahead

    def watched(records, *, epoch):
        ahead.append((records.tolist(), epoch))
        return read(records, epoch=epoch)

    job._reader.read_ahead = watched
    given = trained(job)
    assert ahead == [(records, step // STEPS) for step, records in given[1:]]


def test_a_group_is_left_with_the_state_of_the_last_applied_step_and_nothing_on_its_way(monkeypatch):
    job, line = job_of(monkeypatch, model=Norm(), micro_batch=2)
    heal, begun, healed = job._recovery.heal, [], []

    def watched():
        healed.append((job.model.norm.running_mean.clone(), list(job._recovery._kept)))
        heal()

    def at(step):
        begun.append(job.model.norm.running_mean.clone())
        if step == 1:
            job._recovery._kept.append([0.0])

    monkeypatch.setattr(job._recovery, "heal", watched)
    failing(job, 1, early=True)
    complain(line)
    trained(job, at)
    (_, (mean, kept)) = healed
    assert torch.equal(mean, begun[2]), "as the failed step had found them"
    assert kept == []


def test_an_observer_that_keeps_too_much_waits_and_catches_up_when_the_state_is_there(monkeypatch):
    job, _ = job_of(monkeypatch)
    done = []
    monkeypatch.setattr(job, "_catch_up", lambda: done.append("catch up"))
    for crowded, arrived in ((False, False), (True, False), (True, True)):
        job._recovery = SimpleNamespace(
            keep=lambda words: done.append("keep"), crowded=crowded, wait=lambda: done.append("wait"),
            has_arrived=lambda arrived=arrived: arrived,
        )  # fmt: skip
        job._observe([0.0] * 10)
    assert done == ["keep", "keep", "wait", "keep", "wait", "catch up"]
