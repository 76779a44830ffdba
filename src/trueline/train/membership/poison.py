"""Poison records, which make each worker fail that trains on them: votes, and what is set aside. Pure.

One vote moves the records on to other workers (`rotation`); a second one, by another worker where there is one, sets a
record aside. Some records do not raise but kill (a crash in C): when members die one after the other without a step
between, the next views are **careful**: each worker announces the record that it tries alone, and a death is a vote.
See docs/concepts/membership.md. Setting aside is for records that fail: many equal reasons in quick succession end the
job with that reason.
"""

from collections.abc import Sequence

from trueline.train.membership.events import Action, FailJob, Log, Suspect
from trueline.train.membership.state import Member, MembershipPolicy, State, form, join_refs
from trueline.train.reasons import describe_group, find_reason, group_by_reason

WHY_CHARS = WHERE_CHARS = 300
ALIKE, ALIKE_STEPS = 10, 100
"""This many records that are set aside for one reason within this many steps end the job; a tenth of `set_aside`, if
that is more."""


def suspect(state: State, event: Suspect, policy: MembershipPolicy) -> list[Action]:
    """Enters a worker's votes and forms a view. One that already forms for a vote serves too, unless a record was set
    aside; one that forms for another reason, such as members that waited too long, leaves the records where they were.
    """
    before = len(state.set_aside)
    actions = accuse(state, event.records, event.ref, event.why, policy, event.where)
    aside = list(state.set_aside)[before:]
    forming = not state.released and state.cut_below == state.generation
    if state.phase == "failed" or (forming and state.turned == state.generation and not aside):
        return actions
    state.rotation += 1
    state.turned = state.generation + 1
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
        words = list(dict.fromkeys(votes.values()))
        by = [join_refs(list(votes))] if len(words) == 1 else list(votes)
        set_aside(state, record, "; ".join(f"{who}: {why}" for who, why in zip(by, words, strict=True)))
        actions.append(Log("POISON", {"record": record, "why": state.set_aside[record], "where": place}))
        fault = _too_many(state, policy) or _alike(state, record, policy)
        if fault:
            state.phase = "failed"
            return [*actions, FailJob("poison", fault)]
    return actions


def set_aside(state: State, record: int, why: str) -> None:
    """Leaves `record` out from now on."""
    state.set_aside[record] = why
    state.reasons.setdefault(find_reason(why), []).append(state.committed)


def note_deaths(state: State, died: Sequence[Member]) -> None:
    """Makes the next views careful when a group loses members twice without a step between."""
    if state.released and died:
        state.careful = state.careful or state.died_at == state.committed
        state.died_at = state.committed


def _too_many(state: State, policy: MembershipPolicy) -> str:
    """Why the job ends when more records are set aside than may be; empty: it continues."""
    if len(state.set_aside) <= policy.set_aside:
        return ""
    groups = group_by_reason(state.list_set_aside())
    return (
        f"{len(state.set_aside)} records failed wherever they went, {policy.set_aside} may be set aside: "
        f"{'; '.join(map(describe_group, groups))}"
    )


def _alike(state: State, record: int, policy: MembershipPolicy) -> str:
    """Why the job ends when many records fail for one reason within a few steps; empty: it continues."""
    reason = find_reason(state.set_aside[record])
    steps, many = state.reasons[reason], max(ALIKE, policy.set_aside // ALIKE)
    if len(steps) < many or steps[-1] - steps[-many] > ALIKE_STEPS:
        return ""
    alike = [aside for aside in state.list_set_aside() if find_reason(aside["why"]) == reason]
    return (
        f"{many} records failed for one reason within {steps[-1] - steps[-many] + 1} steps, so that the reason is the "
        f"data or the code, and no single record: {describe_group(alike)}"
    )


def _describe_records(records: Sequence[int]) -> str:
    return f"record{'s' if len(records) > 1 else ''} {join_refs([str(record) for record in records])}"
