"""Ranks of a process group: every numbering of FfDL's examples ends in 0 to N - 1, each once."""

from hypothesis import given
from hypothesis import strategies as st

from trueline.train.learners.ranks import UNRANKED, AskedRank, assign_ranks


def ask(*members: tuple[int, int]) -> list[AskedRank]:
    """Members of learners that ask for ranks, in the order in which they come."""
    orders: dict[int, int] = {}
    asked = []
    for learner, rank in members:
        asked.append(AskedRank(learner, orders.get(learner, 0), rank))
        orders[learner] = orders.get(learner, 0) + 1
    return asked


def test_a_numbering_that_fits_is_kept_in_whatever_order_members_come():
    assert assign_ranks(ask((3, 2), (1, 0), (2, 1))) == ([2, 0, 1], "")
    by_process = ask((2, 1), (1, 0), (1, 2), (2, 3))  # process * NUM_LEARNERS + LEARNER_ID - 1
    assert assign_ranks(by_process) == ([1, 0, 2, 3], "")


def test_rank_0_in_every_learner_is_corrected_by_learner_and_noted():
    ranks, note = assign_ranks(ask((2, 0), (1, 0), (3, 0)))
    assert ranks == [1, 0, 2]
    assert "asked for the ranks 0 (learner 1), 0 (learner 2), 0 (learner 3)" in note


def test_ranks_that_are_left_open_are_given_without_a_note():
    assert assign_ranks(ask((2, UNRANKED), (1, UNRANKED))) == ([1, 0], "")


def test_local_ranks_of_two_processes_a_learner_become_those_of_all():
    ranks, _ = assign_ranks(ask((1, 0), (2, 0), (2, 1), (1, 1)))
    assert ranks == [0, 1, 3, 2]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-1, 9)), min_size=1, max_size=8))
def test_every_rank_is_given_once(members):
    assert sorted(assign_ranks(ask(*members))[0]) == list(range(len(members)))
