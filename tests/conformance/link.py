"""What every link promises. Import the tests and define the fixture `make_link()`: a link that has not joined yet,
in a job of one worker, two steps and eight records."""

import pytest

from trueline.errors import UsageError
from trueline.train.link.contract import StepReport
from trueline.wire import train_pb2 as pb
from worlds.masters import CERTIFICATE, RECORDS, STEPS

WAIT_S = 100
"""Nothing here ends by waiting; a machine may be slow."""


def joined(make_link):
    link = make_link()
    link.join(pb.Hello(store="here:1", state="here:2", num_records=RECORDS, total_steps=STEPS))
    return link, link.wait_view(-1, WAIT_S)


def entered(make_link):
    link, view = joined(make_link)
    return link, view, link.enter(view.generation, 0, 5.0)


def applied(step, generation):
    return StepReport(step, generation, 4, 7, 0.5, 1, 0.0, 1, (5.0,), (), 1.0, 2.0, 3.0, 4.0, 0)


def test_who_joins_gets_a_view_that_holds_it(make_link):
    link, view = joined(make_link)
    assert list(view.members) == [link.ref]
    assert (link.view.generation, view.generation > 0, view.cut_below <= view.generation) == (
        view.generation,
        True,
        True,
    )


def test_a_second_loop_is_refused_with_what_one_loop_takes(make_link):
    link, _ = joined(make_link)
    with pytest.raises(UsageError, match="a second loop over Elastic batches began in one process") as refused:
        link.join(pb.Hello(store="here:1", state="here:2", num_records=RECORDS, total_steps=STEPS))
    assert "epochs=N" in refused.value.hint
    assert "checkpoint" in refused.value.hint


def test_no_view_is_newer_than_the_newest(make_link):
    link, view = joined(make_link)
    assert link.wait_view(view.generation, 0.0) is None
    assert link.wait_view(view.generation - 1, 0.0).generation == view.generation


def test_who_enters_is_let_go_with_its_own_state_as_the_source_and_the_store_that_it_named(make_link):
    _, _, plan = entered(make_link)
    assert (plan.superseded, plan.finished) == (False, False)
    assert (plan.source, list(plan.steps), list(plan.rates), plan.store) == (0, [0], [5.0], "here:1")


def test_a_group_that_is_reported_broken_is_cut_by_a_newer_view(make_link):
    link, view, _ = entered(make_link)
    link.report_broken_group(view.generation, "reset by peer")
    later = link.wait_view(view.generation, WAIT_S, cuts=view.generation)
    assert (later.generation > view.generation, later.cut_below > view.generation) == (True, True)


def test_a_record_that_fails_again_and_again_is_set_aside_by_a_view_that_cuts_the_group(make_link):
    link, view, _ = entered(make_link)
    for _ in range(2):
        link.suspect(0, 3, "it fails", "record 3 of x")
        view = link.wait_view(view.generation, WAIT_S, cuts=view.generation)
        assert not link.enter(view.generation, 0, 5.0).superseded
    assert list(view.set_aside) == [3]


def test_a_worker_reports_two_steps_and_finishes(make_link):
    link, view, _ = entered(make_link)
    generation = view.generation
    link.announce_trial(0, 3, "record 3 of x")
    link.announce_trial(0, -1, "")
    for step in range(STEPS):
        link.report_phase("computing")
        link.report_step(generation, step + 1, applied(step, generation), None)
    link.report_evaluation(pb.Evaluation(step=STEPS, records=RECORDS, loss=0.5, metrics="{}"))
    link.report_checkpoint(STEPS, "/job/step-2", "digest")
    assert link.finish(generation, STEPS, [CERTIFICATE]).finished


def test_who_leaves_may_still_close_its_link(make_link):
    link, _, _ = entered(make_link)
    link.leave()
    link.close()
    link.close()
