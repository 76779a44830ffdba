"""Ranks of a process group, from those that its members ask for. Pure.

FfDL's examples count in several ways: rank 0 in every learner (which hung), LEARNER_ID - 1, and
process * NUM_LEARNERS + LEARNER_ID - 1. A numbering that fits is kept. One that does not is replaced by the last way,
and the user gets a note.
"""

from collections.abc import Sequence
from typing import NamedTuple

UNRANKED = -1
"""A member that leaves its rank open."""


class AskedRank(NamedTuple):
    """What a member asks for; `order`: its place among the members of its learner, as they came."""

    learner: int
    order: int
    rank: int


def assign_ranks(asked: Sequence[AskedRank]) -> tuple[list[int], str]:
    """The rank of each member, and what the user should know if it is not what it asked for.

    >>> assign_ranks([AskedRank(2, 0, 1), AskedRank(1, 0, 0)])
    ([1, 0], '')
    >>> assign_ranks([AskedRank(2, 0, 0), AskedRank(1, 0, 0)])[0]
    [1, 0]
    """
    wanted = [one.rank for one in asked]
    if sorted(wanted) == list(range(len(asked))):
        return wanted, ""
    places: dict[int, list[AskedRank]] = {}
    for one in asked:
        places.setdefault(one.learner, []).append(one)
    ranked = []
    for members in places.values():
        members.sort(key=lambda one: (one.rank, one.order))
        ranked += [(place, one.learner, one) for place, one in enumerate(members)]
    ranked.sort(key=lambda entry: entry[:2])
    given = {(one.learner, one.order): rank for rank, (_, _, one) in enumerate(ranked)}
    ranks = [given[one.learner, one.order] for one in asked]
    if set(wanted) == {UNRANKED}:
        return ranks, ""
    shown = ", ".join(f"{one.rank} (learner {one.learner})" for one in sorted(asked))
    return ranks, f"the members asked for the ranks {shown}: they have 0 to {len(asked) - 1} by learner and process"
