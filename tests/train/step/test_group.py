"""Promises of how a worker gets from one group into the next; line and group are given, no process takes part."""

import pytest
import torch

from trueline.parallel.exchange import Overtaken
from trueline.train.faults import Faults
from trueline.train.step.group import PATIENCE_S, WorkerGroup
from trueline.wire import train_pb2 as pb

ME, PEER = "worker-0.0", "worker-1.0"


def view(generation, *members, cut_below=0, rotation=0):
    return pb.View(generation=generation, members=members or (ME, PEER), cut_below=cut_below, rotation=rotation)


class Line:
    """A line to a master that has these views in store; each wait for one takes the next, None for none in time."""

    def __init__(self, *views, plans=()):
        self.ref, self.leads = ME, False
        self.views, self.plans, self.view = list(views), list(plans), None
        self.waits, self.entered, self.complaints, self.phases = [], [], [], []

    def wait_view(self, after, timeout_s, *, cuts=-1):
        self.waits.append((after, cuts))
        assert timeout_s == PATIENCE_S
        found = self.views.pop(0)
        self.view = found or self.view
        return found

    def enter(self, generation, step, rate):
        self.entered.append((generation, step, rate))
        return self.plans.pop(0) if self.plans else pb.Plan(steps=[step, 4], store="here:1", rates=[rate, 2.0])

    def report_broken_group(self, generation, why):
        self.complaints.append((generation, why))

    def report_phase(self, phase):
        self.phases.append(phase)


class Group:
    """A group that fails to form with these errors first."""

    def __init__(self, *errors):
        self.errors, self.formed, self.closed = list(errors), [], 0

    def form(self, generation, *, rank, size, store):
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        self.formed.append((generation, rank, size, store))

    def close(self):
        self.closed += 1


def group_of(line, group=None, *, generation=1, **fields):
    found = WorkerGroup(line, group or Group(), Faults((), ME), **fields)
    if generation >= 0:
        found.view = line.view = view(generation)
    return found


def regroup(found, *, steps=5, rate=3.0, heal=lambda: None):
    found.regroup(steps=steps, rate=rate, heal=heal)
    return found


GLOO = RuntimeError("gloo: Connection closed by peer\n and more")


def test_a_worker_leaves_its_group_enters_the_next_view_with_its_steps_and_heals_in_its_group():
    line, healed = Line(view(2, PEER, ME)), []
    found = group_of(line)
    regroup(found, heal=lambda: healed.append((found.generation, found.rank, found.size, list(found.plan.steps))))
    assert (line.waits, line.entered) == ([(1, -1)], [(2, 5, 3.0)])
    assert (found.process_group.closed, found.process_group.formed) == (1, [(2, 1, 2, "here:1")])
    assert healed == [(2, 1, 2, [5, 4])]
    assert (line.leads, line.phases) == (False, ["regrouping", "healing"])
    assert regroup(group_of(Line(view(2)))).link.leads


def test_after_a_step_that_failed_the_next_view_has_to_cut_the_group_and_the_one_after_that_need_not():
    line = Line(view(2, cut_below=2), view(3, cut_below=2))
    found = group_of(line)
    found.failed = True
    regroup(regroup(found))
    assert line.waits == [(1, 1), (2, -1)]


def test_without_a_view_a_worker_says_that_it_cannot_use_the_newest_one_and_waits_on():
    line = Line(None, None, view(4))
    found = group_of(line)
    found.failure, line.view = "reset by peer", view(3)
    regroup(found)
    assert line.complaints == [(3, "reset by peer")] * 2
    assert line.entered == [(4, 5, 3.0)]


def test_a_newcomer_that_no_view_has_held_yet_complains_of_nothing_and_waits_for_one_that_does():
    line = Line(None, view(3, PEER), None, view(4))
    regroup(group_of(line, generation=-1), steps=-1, rate=0.0)
    assert line.complaints == []
    assert [after for after, _ in line.waits] == [-1, -1, 3, 3]
    assert line.entered == [(4, -1, 0.0)]


def test_a_worker_that_a_view_does_not_hold_any_more_ends_well_and_enters_nothing():
    line = Line(view(2, PEER))
    with pytest.raises(SystemExit) as ended:
        regroup(group_of(line))
    assert (ended.value.code, line.entered) == (0, [])


def test_a_view_that_was_superseded_while_its_members_entered_forms_no_group():
    line = Line(view(2), view(3), plans=[pb.Plan(superseded=True)])
    found = regroup(group_of(line))
    assert [generation for generation, *_ in found.process_group.formed] == [3]
    assert line.waits == [(1, -1), (2, -1)]


@pytest.mark.parametrize("where", ["forming", "healing"])
def test_a_group_that_does_not_work_leaves_the_worker_where_it_was_until_the_next_view(where):
    line, kept = Line(view(2, PEER, ME), None, view(3, PEER, ME)), []
    group = Group(GLOO) if where == "forming" else Group()
    found = group_of(line, group)
    before = found.view, found.plan, found.rank

    def heal():
        if where == "healing" and found.generation == 2:
            raise GLOO

    def broken(generation, what):
        kept.append((found.view is before[0], found.plan is before[1], found.rank == before[2], generation, what))

    line.report_broken_group = broken
    regroup(found, heal=heal)
    assert kept == [(True, True, True, 2, "gloo: Connection closed by peer")]
    assert (found.generation, found.rank, found.process_group.closed) == (3, 1, 2)
    assert [after for after, _ in line.waits] == [1, 2, 2]


def test_an_error_that_is_not_of_the_network_ends_the_worker():
    for error in (RuntimeError("shape mismatch"), ValueError("odd")):
        with pytest.raises(type(error), match=str(error)):
            regroup(group_of(Line(view(2)), Group(error)))


@pytest.mark.parametrize(
    ("newest", "overtaken", "wishes"),
    [
        (None, False, False),
        (view(3, cut_below=3), False, False),
        (view(4, cut_below=3), False, True),
        (view(4, cut_below=4), True, True),
        (view(9, cut_below=4), True, True),
        (view(2, cut_below=2), False, False),
    ],
    ids=["none", "the same", "planned", "forced", "much newer", "older"],
)
def test_a_forced_view_overtakes_the_group_and_a_planned_one_is_wished_for(newest, overtaken, wishes):
    found = group_of(Line(), generation=3)
    found.link.view = newest
    assert (found.is_overtaken(), found.wants_regroup()) == (overtaken, wishes)


def started(rates, *, rotation=0, behind=None, rank=0):
    found = group_of(Line(), rank=rank)
    found.view = view(1, *(f"worker-{slot}.0" for slot in range(len(rates))), rotation=rotation)
    found.plan = pb.Plan(rates=rates)
    found.start_shares(behind or [False] * len(rates))
    return found


def test_parts_are_dealt_in_the_order_of_the_ranks_turned_by_the_rotation():
    found = started([1.0, 1.0, 1.0], rotation=1, rank=2)
    assert (found.order, found.position) == ([2, 0, 1], 0)
    assert found.by_rank([10, 20, 30]) == [20, 30, 10]
    assert started([1.0, 1.0, 1.0], rank=2).position == 2


def test_weights_are_dealt_to_their_ranks_and_are_even_where_records_changed_hands():
    found = started([10.0, 20.0, 40.0])
    assert (found.weights, found.ordered_weights) == ((10.0, 20.0, 40.0), (10.0, 20.0, 40.0))
    turned = started([10.0, 20.0, 40.0], rotation=1)
    assert len(set(turned.weights)) == 1
    turned.update_rates([10.0, 20.0, 40.0], 1000)
    assert (turned.weights, turned.ordered_weights) == ((10.0, 20.0, 40.0), (40.0, 10.0, 20.0))


def test_who_is_behind_has_no_part_and_tells_the_usual_speed_until_it_has_measured_its_own():
    found = started([10.0, 30.0, 0.0], behind=[False, False, True], rank=2)
    assert found.weights == (10.0, 30.0, 0.0)
    assert (found.rate_to_report(0.0), found.rate_to_report(7.0)) == (20.0, 7.0)
    assert started([10.0, 30.0], rank=1).rate_to_report(0.0) == 30.0


def test_the_forward_of_a_step_that_a_newer_view_cuts_stops_at_its_next_module_and_any_other_runs():
    line, group = Line(), Group()
    member = WorkerGroup(line, group, Faults((), ME), view=view(3))
    model, calls = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)), []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    for newest in (None, member.view, view(4, cut_below=3)):
        line.view = newest
        with member.watch_forward():
            model(torch.ones(1, 1))
    line.view = view(4, cut_below=4)
    model(torch.ones(1, 1))  # nobody watches
    with pytest.raises(Overtaken), member.watch_forward():
        model[0](torch.ones(1, 1))
    assert len(calls) == 4
    model(torch.ones(1, 1))
