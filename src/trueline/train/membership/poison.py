"""Poison records, which make each worker fail that trains on them: votes, and what is set aside. Pure.

One vote moves the records on to other workers (`rotation`); a second one, by another worker where there is one, sets a
record aside. Some records do not raise but kill (a crash in C): when members die one after the other without a step
between, the next views are **careful**: each worker announces the record that it tries alone, and a death is a vote.
See docs/concepts/membership.md.
"""

from collections.abc import Sequence

from trueline.train.membership.events import Action, FailJob, Log, Suspect
from trueline.train.membership.state import Member, MembershipPolicy, State, form, join_refs

WHY_CHARS = WHERE_CHARS = 300


def suspect(state: State, event: Suspect, policy: MembershipPolicy) -> list[Action]:
    """Enters a worker's votes and forms a view; one that already forms serves too, unless a record was set aside."""
    before = len(state.set_aside)
    actions = accuse(state, event.records, event.ref, event.why, policy, event.where)
    aside = list(state.set_aside)[before:]
    forming = not state.released and state.cut_below == state.generation
    if state.phase == "failed" or (forming and not aside):
        return actions
    state.rotation += 1
    failed = f"{_describe_records(event.records)} failed at {event.ref}"
    what = f"{_describe_records(aside)} set aside" if aside else failed
    return actions + form(state, what, forced=True)


def accuse(
    state: State, records: Sequence[int], ref: str, why: str, policy: MembershipPolicy, where: str = ""
) -> list[Action]:
    """Enters one vote against each of `records`; `where`: their part, file and record in it."""
    actions: list[Action] = []
    alone = len(state.view) == 1 and state.released
    for record in records:
        votes = state.suspects.get(record, {})
        if record in state.set_aside or (ref in votes and not alone):
            continue
        second = bool(votes)
        state.suspects[record] = votes
        votes[ref] = why[:WHY_CHARS]
        place = state.places.setdefault(record, where[:WHERE_CHARS])
        if not second:
            actions.append(Log("SUSPECT", {"record": record, "worker": ref, "why": votes[ref], "where": place}))
            continue
        state.set_aside[record] = "; ".join(f"{worker}: {words}" for worker, words in votes.items())
        actions.append(Log("POISON", {"record": record, "why": state.set_aside[record], "where": place}))
        if len(state.set_aside) > policy.set_aside:
            state.phase = "failed"
            return [*actions, FailJob("poison", _too_many(state, policy))]
    return actions


def note_deaths(state: State, died: Sequence[Member]) -> None:
    """Makes the next views careful when a group loses members twice without a step between."""
    if state.released and died:
        state.careful = state.careful or state.died_at == state.committed
        state.died_at = state.committed


def _too_many(state: State, policy: MembershipPolicy) -> str:
    places = {record: f", {where}" for record, where in state.places.items() if where}
    reasons = [f"record {record}{places.get(record, '')} ({why})" for record, why in state.set_aside.items()]
    failed = f"{len(reasons)} records failed wherever they went"
    return f"{failed}, {policy.set_aside} may be set aside: {join_refs(reasons)}"


def _describe_records(records: Sequence[int]) -> str:
    return f"record{'s' if len(records) > 1 else ''} {join_refs([str(record) for record in records])}"
