"""Promises of a worker's part of a step: what it reads and draws, what it says of it, and what it reports."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trueline.data.loading.seeding import seed_all
from trueline.data.loading.worker_pool import ReaderLost
from trueline.data.source import Batch
from trueline.errors import RecipeError, TrainError
from trueline.train.step import blame
from trueline.train.step import ledger as books
from trueline.train.step.blame import Trials
from trueline.train.step.commit import StepReporter
from trueline.train.step.contribution import MOST_LOSS, Contribution, StepReader
from trueline.train.step.ledger import StepAccount
from trueline.train.step.plan import DRAWN, JobPlan


def plan_of(**kind):
    """Two epochs of three steps over ten records."""
    return JobPlan(**{"num_records": 10, "global_batch": 4, "epochs": 2, "seed": 0, **kind})


class Reader:
    """Reads record numbers; it may be asked for `ahead` batches before they are read."""

    def __init__(self, ahead=0):
        self.ahead, self.read_of, self.asked, self.early = ahead, [], [], []

    def read(self, records, *, epoch):
        self.read_of.append((records.tolist(), epoch))
        return Batch(torch.from_numpy(records), None)

    def prefetch(self, records, *, epoch):
        self.asked.append((records.tolist(), epoch))

    def read_ahead(self, records, *, epoch):
        self.early.append((records.tolist(), epoch))


def intake_of(plan, *, reader=None, position=0, rank=0, ordered_weights=(1.0, 1.0), draws=False, seed=5):
    group = SimpleNamespace(generation=1, ordered_weights=ordered_weights, position=position, rank=rank)
    timer = SimpleNamespace(end_reading=lambda: None, end_reading_ahead=lambda: None)
    return StepReader(plan, reader or Reader(), group, timer, seed, draws)


def records_of(pieces):
    return [record for piece in pieces for record in piece.records.tolist()]


# What is read. -------------------------------------------------------------------------------------------------------


def test_the_members_parts_make_the_step_in_the_order_in_which_they_are_dealt():
    plan = plan_of()
    parts = [records_of(intake_of(plan, position=position, rank=1 - position).pieces(1)) for position in (0, 1)]
    assert parts[0] + parts[1] == plan.records(1).tolist()


def test_a_part_is_cut_anew_when_the_shares_or_the_members_change():
    plan = plan_of()
    mine = intake_of(plan, ordered_weights=(1.0, 1.0))
    before = records_of(mine.pieces(1))
    mine.group.ordered_weights = (3.0, 1.0)
    assert (len(before), len(records_of(mine.pieces(1)))) == (2, 3)
    plan.leave_out([int(plan.records(1)[0])])
    mine.group.generation = 2  # what is set aside comes with a view
    assert records_of(mine.pieces(1)) == plan.records(1)[:2].tolist()


def test_a_batch_counts_by_its_records_in_the_step_that_there_is():
    plan = plan_of()
    plan.leave_out([int(plan.records(0)[3])])
    mine = intake_of(plan, ordered_weights=(2.0, 1.0))
    (piece,) = mine.pieces(0)
    batch = mine.read(0, piece, last=True)
    assert (len(batch.records), batch.weight, batch.step, batch.last) == (2, pytest.approx(2 / 3), 0, True)
    (last,) = mine.pieces(2)  # the short step at the end of the epoch
    assert mine.read(2, last, last=False).weight == 0.5
    mine.read(5, mine.pieces(5)[0], last=True)
    assert [epoch for _, epoch in mine.reader.read_of] == [0, 0, 1]


@pytest.mark.parametrize("where", [(5, 1, 0), (5, 1, 1), (5, 2, 0), (6, 1, 0)], ids=str)
def test_what_is_drawn_in_a_forward_is_of_seed_step_and_shard(where):
    seed, step, shard = where
    mine = intake_of(plan_of(micro_batch=2), ordered_weights=(1.0,), draws=True, seed=seed)
    random.seed(7)
    mine.read(step, mine.pieces(step)[shard] if step != 2 else mine.pieces(2)[0], last=True)
    drawn = (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random())
    seed_all(*where)
    assert drawn == (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random())


def test_a_model_that_draws_nothing_leaves_the_generators_alone():
    mine = intake_of(plan_of())
    torch.manual_seed(3)
    mine.read(0, mine.pieces(0)[0], last=True)
    first = torch.rand(1).item()
    torch.manual_seed(3)
    assert torch.rand(1).item() == first


def test_the_next_batches_are_asked_for_up_to_the_end_of_the_job_and_no_further():
    plan = plan_of(micro_batch=2)
    mine = intake_of(plan, reader=Reader(ahead=3), ordered_weights=(1.0,))
    shards = [(piece.records.tolist(), plan.epoch_of(step)) for step in range(6) for piece in mine.pieces(step)]
    mine.prefetch(0, mine.pieces(0)[1:])
    assert mine.reader.asked == shards[1:4]
    mine.reader.asked.clear()
    mine.prefetch(4, mine.pieces(4)[2:])
    assert mine.reader.asked == shards[-1:]
    mine.prefetch(5, [])
    assert mine.reader.asked == shards[-1:]


def test_the_first_batch_of_the_next_step_is_read_early_where_no_reader_does_and_there_is_one():
    plan = plan_of()
    mine = intake_of(plan, ordered_weights=(1.0,))
    mine.read_ahead(3)
    mine.read_ahead(6)
    assert mine.reader.early == [(plan.records(3).tolist(), 1)]
    busy = intake_of(plan, reader=Reader(ahead=1))
    busy.read_ahead(3)
    assert busy.reader.early == []


# What is said of it. -------------------------------------------------------------------------------------------------


def test_the_account_of_a_part_is_its_records_and_their_loss():
    part = Contribution()
    part.add(np.array([3, 1]), 0.5)
    part.add(np.array([7]), 2.0)
    part.digest = books.MASK + 5
    account = part.account(2, 9, wish=True, rates=(5.0, 0.0))
    assert account == StepAccount(
        count=3, digest=4, generations=2, steps=9, wishes=1, holders=1, loss_sum=3.0, weight=3.0, rates=(5.0, 0.0)
    )
    assert part.records.tolist() == [3, 1, 7]
    assert Contribution().records.tolist() == []


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, MOST_LOSS, 3e38])
def test_a_loss_that_cannot_be_summed_stays_the_fault_of_its_part(loss):
    part = Contribution()
    part.add(np.array([1]), 0.5)
    assert part.finite
    part.add(np.array([3]), loss)
    part.add(np.array([4]), -loss)
    assert not part.finite


def sent(part):
    """The account of `part` as the others get it."""
    return StepAccount.unpack(part.account(0, 0, wish=False, rates=()).pack())


@pytest.mark.parametrize(("loss", "word"), [(3e38, math.inf), (-3e38, -math.inf), (1e38, 2e38), (-math.inf, -math.inf)])
def test_a_loss_that_a_word_has_no_room_for_is_infinite(loss, word):
    part = Contribution()
    part.add(np.array([1, 2]), loss)
    assert sent(part).loss_sum == word
    part.add(np.array([3]), math.nan)
    assert math.isnan(sent(part).loss_sum)


# What is reported. ---------------------------------------------------------------------------------------------------


def test_each_applied_step_is_reported_with_the_gap_after_a_regroup_and_shares_that_are_new(monkeypatch):
    said, clock = [], iter([1_000_000, 5_000_000, 9_000_000, 9_500_000])
    monkeypatch.setattr("trueline.train.step.commit.time.monotonic_ns", lambda: next(clock))
    link = SimpleNamespace(report_step=lambda *what: said.append(what))
    group = SimpleNamespace(
        generation=3, size=2, rates=(10.0, 30.0), ordered_weights=(10.0, 30.0), by_rank=lambda numbers: numbers[::-1]
    )
    timer = SimpleNamespace(end_committing=lambda: None, last_ms=(1.0, 2.0, 3.0, 4.0))
    report = StepReporter(link, group, timer, plan_of())
    certificate = {"epoch": 0, "steps": 3, "records": 10, "digest": 9, "tally_min": 1, "tally_max": 1}
    report.note_regroup()
    report.redone = 2
    report.report(0, StepAccount(count=4, digest=7), None, (0.1, 2.5))
    report.report(1, StepAccount(count=4, digest=8), certificate, (0.1, 2.0))
    report.note_regroup()
    group.generation = 4
    report.report(2, StepAccount(count=2, digest=9), None, (0.05, 1.5))
    report.report(3, StepAccount(count=2, digest=9), None, (0.05, 1.0))
    assert [(generation, steps) for generation, steps, *_ in said] == [(3, 1), (3, 2), (4, 3), (4, 4)]
    told = [one for _, _, one, _ in said]
    assert [(one.step, one.generation, one.records, one.digest) for one in told] == [
        (0, 3, 4, 7), (1, 3, 4, 8), (2, 4, 2, 9), (3, 4, 2, 9),
    ]  # fmt: skip
    assert [one.gap_ms for one in told] == [0.0, 0.0, 4.0, 0.0], "nothing was before the first group"
    assert [one.redone for one in told] == [2, 0, 0, 0]
    assert [(one.learning_rate, one.gradient_norm) for one in told] == [
        (0.1, 2.5),
        (0.1, 2.0),
        (0.05, 1.5),
        (0.05, 1.0),
    ]
    assert [one.shares for one in told] == [(3, 1), (), (1, 1), ()]
    assert [None if signed is None else signed.epoch for *_, signed in said] == [None, 0, None, None]


# Which records are to blame. -----------------------------------------------------------------------------------------


def attempt(*bad):
    def one(record):
        if record in bad:
            raise ValueError(f"record {record} is odd\nand more")

    return one


@pytest.mark.parametrize(
    ("mine", "others", "bad", "blamed"),
    [
        ([1, 2, 3], [7, 8, 9], (2,), [2]),
        ([1, 2, 3], [7, 8, 9], (), []),
        ([1, 2], [7, 8, 9], (1, 2), [1, 2]),
        ([1, 2], [7, 8, 9], (1, 2, 7), [1, 2]),
        ([1, 2], [7, 8, 9], (1, 2, 7, 8, 9), []),
        ([1, 2], [7, 8, 9, 5], (1, 2, 7, 8, 9), []),
        ([1], [], (1,), []),
        ([1, 2, 3], [7, 8, 9], (1, 2, 7, 8, 9), [1, 2]),
    ],
)
def test_records_are_to_blame_that_fail_alone_unless_others_fail_just_as_well(mine, others, bad, blamed):
    found = blame.find_blamed(mine, others, attempt(*bad))
    assert found == {record: f"ValueError: record {record} is odd" for record in blamed}


def test_a_trial_ends_with_the_process_that_reads_for_it():
    def lost(record):
        raise ReaderLost("a reader died")

    with pytest.raises(ReaderLost):
        blame.find_failing([1, 2], lost)


class Trying:
    """A link, a reader and a replica of a trial: what happens, in its order."""

    def __init__(self):
        self.done, self.exchange = [], SimpleNamespace(syncing=True)

    def report_phase(self, phase):
        self.done.append(phase)

    def suspect(self, step, record, why, where):
        self.done.append(("suspect", step, record, why.partition(":")[0], where))

    def announce_trial(self, step, record, where):
        self.done.append(("trying", record, where))

    def read(self, records, *, epoch):
        self.done.append(("read", records.tolist(), epoch))
        return Batch(torch.from_numpy(records).float(), None)

    def begin(self):
        self.done.append("begin")

    def describe_infinite(self):
        return ""


def trials_of(plan, loss_of=None):
    world = Trying()
    source = SimpleNamespace(units=[])
    found = Trials(world, plan, source, world, world)
    found.loss_of = loss_of
    return found, world


def loss_of(*bad, nan=()):
    def loss(batch):
        record = int(batch.inputs[0])
        if record in bad:
            raise ValueError("odd")
        return torch.tensor(math.nan if record in nan else 1.0, requires_grad=True)

    return loss


def test_a_record_is_tried_alone_with_a_loss_of_its_own_and_no_trace_is_left_in_the_replica():
    found, world = trials_of(plan_of(), loss_of())
    found._attempt(4, 7)
    assert world.done == ["reading", ("read", [7, 7], 1), "begin", "begin"]
    assert not world.exchange.syncing, "its forward goes to no peer"
    failing, world = trials_of(plan_of(), loss_of(7))
    with pytest.raises(ValueError, match="odd"):
        failing._attempt(4, 7)
    assert world.done[-1] == "begin"
    with pytest.raises(RecipeError, match="its loss is nan"):
        trials_of(plan_of(), loss_of(nan=(7,)))[0]._attempt(4, 7)


def test_records_that_fail_are_suspected_and_those_that_are_set_aside_are_no_measure():
    plan = plan_of()
    ids = plan.records(0)
    first = int(ids[0])
    found, world = trials_of(plan, loss_of(first))
    assert found.accuse(ValueError("x"), 0, ids) == [first]
    assert [one for one in world.done if one[0] == "suspect"] == [
        ("suspect", 0, first, "ValueError", f"record {first}")
    ]
    everywhere = {int(record) for record in ids[:2]}
    others = [int(record) for record in (*plan.records(0), *plan.records(1)) if int(record) not in everywhere]
    plan.leave_out(others[:-3])
    judged, _ = trials_of(plan, loss_of(*everywhere, *others[:-3]))
    assert {one.record for one in judged.find_blamed(0, ids[:2])} == everywhere


def test_an_error_that_no_single_record_makes_is_raised_again():
    error = ValueError("of the code")
    found, world = trials_of(plan_of(), loss_of())
    with pytest.raises(ValueError, match="of the code"):
        found.accuse(error, 0, found._plan.records(0))
    assert [one for one in world.done if one[0] == "suspect"] == []


def test_too_little_memory_is_not_the_fault_of_a_record(monkeypatch):
    found, world = trials_of(plan_of(), loss_of())
    with pytest.raises(TrainError, match="does not hold what 4 records take at once"):
        found.accuse(torch.OutOfMemoryError("CUDA out of memory"), 0, found._plan.records(0))
    monkeypatch.setattr("trueline.train.step.blame.devices.is_lost", lambda error: True)
    with pytest.raises(RuntimeError, match="the device is gone"):
        found.accuse(RuntimeError("the device is gone"), 0, found._plan.records(0))
    assert world.done == []


def test_in_a_careful_view_each_record_is_announced_before_it_is_tried_and_the_end_as_well():
    plan = plan_of(blocks=DRAWN, drawn=lambda ids, epoch: (ids + epoch) % 3)  # each record stands at several ids
    found, world = trials_of(plan, loss_of())
    found.try_all(3, [np.array([4, 5]), np.array([7, 8])])
    assert [one for one in world.done if one[0] in ("trying", "read")] == [
        ("trying", 2, "record 2"), ("read", [4, 4], 1), ("trying", 0, "record 0"), ("read", [5, 5], 1),
        ("trying", 2, "record 2"), ("read", [7, 7], 1), ("trying", 0, "record 0"), ("read", [8, 8], 1),
        ("trying", -1, ""),
    ]  # fmt: skip
