"""A process that trains alone has no master to give it another view: its line does."""

import pytest

from conformance.link import *  # noqa: F403
from trueline.train.link.local_client import TRIES, LocalLink
from trueline.wire import train_pb2 as pb


@pytest.fixture
def make_link():
    return LocalLink


def ready() -> LocalLink:
    line = LocalLink()
    line.join(pb.Hello(store="here:1", num_records=4, total_steps=2))
    return line


def test_a_group_that_does_not_form_is_tried_in_the_next_generation_without_the_records_that_were_set_aside():
    line = ready()
    line.suspect(0, 3, "it fails", "")
    line.report_broken_group(2, "the store did not answer")
    view = line.wait_view(2, 0.0)
    assert (view.generation, list(view.members), view.cut_below, list(view.set_aside)) == (3, [line.ref], 3, [3])


def test_groups_that_fail_in_a_row_end_in_the_reason_and_a_step_between_them_forgives():
    line = ready()
    for generation in range(1, TRIES):
        line.report_broken_group(generation, "the store did not answer")
    with pytest.raises(RuntimeError, match="the store did not answer"):
        line.report_broken_group(TRIES, "the store did not answer")
    line.report_step(TRIES, 0, None, None)
    line.report_broken_group(TRIES, "again")
    assert line.view.generation == TRIES + 1
