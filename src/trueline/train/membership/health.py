"""Decides which workers are given up: exits, silence, stuck workers, slots that keep failing. Pure.

Who sends or receives a state is judged by its progress, which both ends report: a member that is too busy to send a
heartbeat lives as long as bytes of its state move. A slot that keeps failing is left empty for a while and tried again.
"""

import math
from collections.abc import Sequence

from trueline.engine.contract import parse_ref
from trueline.train.membership.events import Action, AvoidHost, Death, FailJob, GroupBroken, Kill, Log
from trueline.train.membership.poison import accuse, note_deaths
from trueline.train.membership.state import Breaks, Failures, Member, MembershipPolicy, State, fill, form, join_refs

BUSY = ("reading", "computing")
ALL_BUSY = 20
"""Times as long as one member."""
FADE = 0.99  # factor of `State.silence_s` at each tick (0.25 s): half is left after 17 s


def lose_workers(state: State, deaths: Sequence[Death], now: float, policy: MembershipPolicy) -> list[Action]:
    """Handles deaths that were noticed together: one forced view without the dead, and replacements."""
    actions: list[Action] = []
    in_view: list[tuple[Member, str]] = []
    for death in deaths:
        if state.members.get(death.ref) is None and death.ref not in state.pending:
            continue
        member = state.members.pop(death.ref, None)
        state.pending.pop(death.ref, None)
        # A departing worker may have died in its last step with the others, which then have to be cut.
        if member is not None and (member.rank >= 0 or (member.left and member.left_at is None and not death.clean)):
            in_view.append((member, death.why))
        actions += _blame(state, death, member, now, policy)
        if state.phase == "failed":
            return actions
    note_deaths(state, [member for member, _ in in_view])
    if in_view:
        state.broken = None  # what they died of may have broken the groups before
        refs = [member.ref for member, _ in in_view]
        reason = f"{join_refs(refs)} {'is' if len(refs) == 1 else 'are'} gone: {in_view[0][1]}"
        actions += form(state, reason, forced=True)
    brief = state.usual_s < 2 * policy.refill_s  # a longer step has time for a start, and the dead left a core free
    if in_view and brief and len(state.view) >= policy.min_workers:
        state.fill_at = now + policy.refill_s
        return actions
    return actions + fill(state, now)


def _blame(state: State, death: Death, member: Member | None, now: float, policy: MembershipPolicy) -> list[Action]:
    """Counts a death against the record that was being tried, else against the slot."""
    if member is not None and member.trying >= 0:
        state.rotation += 1
        why = f"{death.why} while record {member.trying} was tried"
        return accuse(state, [member.trying], death.ref, why, policy, member.trying_where)
    if death.blameless:
        return []
    slot = parse_ref(death.ref)[1]
    if slot >= state.workers or (member is not None and (member.stepped or member.leaving)):
        state.failures.pop(slot, None)
        if not death.failed:
            state.relapses.pop(slot, None)
        return _count_crash(state, death, now, policy) if death.failed and slot < state.workers else []
    before = state.failures.get(slot, Failures(0, state.committed, now))
    count = before.count + 1
    since = before.since_step if count > 1 else state.committed
    state.failures[slot] = Failures(count, since, now + policy.delay_s(count))
    relapsed = slot in state.relapses  # it was tried once more, and that is enough
    if count < policy.max_failures and not relapsed:
        return []
    why = f"worker slot {slot} died {count} times in a row before its first step; last: {death.why}"
    if since == state.committed and not relapsed:
        state.phase = "failed"
        return [FailJob("train", why)]
    return _quarantine(state, death.ref, why, now, policy)


def break_group(state: State, event: GroupBroken, now: float, policy: MembershipPolicy) -> list[Action]:
    """Forms the group again, or ends a job whose living members can never use one: their backend is at fault, or no
    packet passes between their hosts, and each worker answers the master as if all were well."""
    why = f"{event.ref} cannot use generation {event.generation}: {event.why}"
    before = state.broken
    if before is None or before.since_step != state.committed:
        before = Breaks(0, state.committed, now)
    state.broken = Breaks(before.count + 1, before.since_step, before.since)
    lasted_s = now - before.since
    newcomers = _find_strangers(state) if state.room is not None else []
    if newcomers and state.broken.count >= policy.newcomer_breaks:
        return _leave_out(state, newcomers, event.why, now, policy)
    if state.broken.count < policy.breaks or lasted_s < policy.broken_s:
        return form(state, why, forced=True)
    state.phase = "failed"
    times = f"the group of workers broke {state.broken.count} times in {lasted_s:.0f} s, after step {state.committed}"
    return [FailJob("train", f"{times}, while all of its members lived; last: {why}")]


def _find_strangers(state: State) -> list[str]:
    """The newcomers from hosts of which no member has trained; none where no member has."""
    members = [state.members[ref] for ref in state.view]
    proven = {member.host for member in members if member.stepped}
    return [member.ref for member in members if proven and member.host not in proven]


def _leave_out(state: State, newcomers: list[str], why: str, now: float, policy: MembershipPolicy) -> list[Action]:
    """The members of before train on without the newcomers, whose hosts the others may not reach."""
    assert state.room is not None
    state.room = max(0, state.room - len(newcomers))  # until the engine has avoided their hosts, and says what is left
    deaths = [Death(ref, f"no group forms with it: {why}", blameless=True) for ref in newcomers]
    actions: list[Action] = [AvoidHost(death.ref, death.why) for death in deaths]
    actions += [Kill(death.ref, death.why) for death in deaths]
    return actions + lose_workers(state, deaths, now, policy)


def _count_crash(state: State, death: Death, now: float, policy: MembershipPolicy) -> list[Action]:
    """Counts a failure after steps of its own; a slot that stands out against the others goes into quarantine.

    Where all slots fail alike the code or the data is at fault, and each replacement still brings some steps.
    """
    slot, since = parse_ref(death.ref)[1], now - policy.spell_s
    recent = {other: [at for at in times if at > since] for other, times in state.crashes.items()}
    state.crashes = {other: times for other, times in recent.items() if times}
    mine = state.crashes.setdefault(slot, [])
    mine.append(now)
    others = sum(len(times) for other, times in state.crashes.items() if other != slot)
    enough = len(mine) >= 2 * policy.max_failures and len(mine) > 2 * others
    if not enough or state.target_workers - 1 < max(policy.min_workers, 1):
        return []
    del state.crashes[slot]
    why = f"worker slot {slot} failed {len(mine)} times in {now - mine[0]:.0f} s, all others {others} times; last: "
    return _quarantine(state, death.ref, why + death.why, now, policy)


def _quarantine(state: State, ref: str, why: str, now: float, policy: MembershipPolicy) -> list[Action]:
    """Leaves a slot empty for a while, and for longer each time that it has to be done again."""
    slot = parse_ref(ref)[1]
    times = state.relapses[slot] = state.relapses.get(slot, 0) + 1
    pause_s = policy.pause_s(times)
    state.quarantined[slot], state.retry_at[slot] = why, now + pause_s
    state.failures.pop(slot, None)
    body = {"slot": slot, "worker": ref, "why": why, "times": times, "retry_s": pause_s}
    actions: list[Action] = [Log("QUARANTINE", body)]
    if state.target_workers < policy.min_workers:
        state.phase = "failed"
        left = f"{state.target_workers} of {state.workers} slots are left, at least {policy.min_workers} are needed"
        actions.append(FailJob("train", f"{left}: {join_refs(list(state.quarantined.values()))}"))
    return actions


def retry(state: State, now: float) -> list[Action]:
    """Ends the quarantines whose time is over: their slots are filled again, and one death is enough to come back."""
    if state.phase != "running" or state.finishing:
        return []
    over = [slot for slot in state.quarantined if slot < state.workers and state.retry_at.get(slot, now) <= now]
    for slot in over:
        del state.quarantined[slot]
        state.retry_at.pop(slot, None)
    return [Log("RETRY", {"slot": slot, "times": state.relapses.get(slot, 0)}) for slot in over]


def find_overdue(state: State, now: float, policy: MembershipPolicy) -> list[Death]:
    """The workers to kill now, and why."""
    overdue = []
    lease_s = lease(state, policy)
    moved_at = max((member.moved_at for member in state.members.values() if member.to_move), default=-math.inf)
    for member in state.members.values():
        seen_at = max(member.seen_at, moved_at) if member.to_move else member.seen_at
        if now - seen_at > lease_s:
            overdue.append(Death(member.ref, f"silent for {now - seen_at:.1f} s{describe_transfer(member, ', ')}"))
        elif member.to_move and not member.sending and member.seen_at - member.moved_at > policy.still_s:
            still = f"no byte came for {member.seen_at - member.moved_at:.0f} s"
            overdue.append(Death(member.ref, f"{still}{describe_transfer(member, ', ')}"))
        elif member.left_at is not None and now - member.left_at > policy.leave_s:
            overdue.append(Death(member.ref, f"still there {now - member.left_at:.0f} s after the others continued"))
        elif member.rank < 0 and not member.left and state.is_leaving(member):
            overdue.append(Death(member.ref, "not needed any more"))
    for ref, at in state.pending.items():
        if now - at > policy.start_s:
            overdue.append(Death(ref, f"not ready {now - at:.0f} s after its start"))
    return overdue or _stuck(state, policy)


def describe_transfer(member: Member, before: str = "") -> str:
    """
    >>> describe_transfer(Member(ref="worker-0.1", slot=0, store="", seen_at=0.0, moved=12 * 10**8, to_move=36 * 10**8))
    'receiving state: 1.2 of 3.6 GB'
    """
    if not member.to_move:
        return ""
    unit, name = (1e9, "GB") if member.to_move >= 1e9 else (1e6, "MB")
    verb = "sending" if member.sending else "receiving"
    return f"{before}{verb} state: {member.moved / unit:.1f} of {member.to_move / unit:.1f} {name}"


def _stuck(state: State, policy: MembershipPolicy) -> list[Death]:
    """Members that hold the job up for longer than its usual steps allow.

    A member that computes while all others wait for it is stuck: not before a step of its own (compilers, caches), nor
    while the others have waited only for a moment, since a step may be slow for all. Where newcomers alone wait, all
    that have trained compute, as when each compiles for its new share, and the state would be lost with them: they get
    ALL_BUSY times as long. A member that still waits in a group that was cut is stuck whatever the others do: a
    collective inside torch has not noticed the cut.
    """
    patience = _patience(state, policy)
    cut = not state.released and state.cut_below == state.generation
    late = cut and state.view_s > patience
    waiting = {ref for ref in state.view if _waits(state.members[ref], state, cut=cut)}
    limit = patience if any(state.members[ref].stepped for ref in waiting) else ALL_BUSY * patience
    busy, held, moving = [], [], False
    for ref in state.view:
        member = state.members[ref]
        if ref in waiting:
            moving = moving or member.phase_s < patience / 2
        elif late and member.phase in ("waiting", "regrouping") and member.phase_s > patience:
            held.append(Death(ref, f"stuck: {member.phase} for {member.phase_s:.1f} s in a group that was cut"))
        elif member.phase in BUSY and member.stepped and member.phase_s > limit:
            what = f"stuck: {member.phase} for {member.phase_s:.1f} s while all others wait"
            busy.append(Death(ref, f"{what}; the usual step takes {state.usual_s:.3g} s"))
        else:
            moving = True
    return held + (busy if waiting and not moving else [])


def _waits(member: Member, state: State, *, cut: bool) -> bool:
    return (not state.released and member.entered is not None) or (member.phase == "waiting" and not cut)


def count_stranded(state: State, policy: MembershipPolicy) -> int:
    """How many members wait in a group that others have left for a planned view and that is not cut."""
    if state.released or state.cut_below == state.generation:
        return 0
    view = [state.members[ref] for ref in state.view]
    others_left = any(member.entered is not None and member.base is not None for member in view)
    rest = [member for member in view if member.entered is None]
    patience = _patience(state, policy)
    waiting = all(member.phase == "waiting" and member.phase_s > patience for member in rest)
    return len(rest) if others_left and waiting else 0


def _patience(state: State, policy: MembershipPolicy) -> float:
    return max(policy.stuck_s, 10.0 * state.usual_s)


def lease(state: State, policy: MembershipPolicy) -> float:
    """How many seconds a member may be silent now.

    On a starved machine living members are silent for longer too. The lease is three times the longest recent silence
    of a living member, between one and ten times the usual lease.
    Source: accrual failure detection, which judges a silence by those before it (Hayashibara et al., SRDS 2004).

    >>> policy = MembershipPolicy(workers=2, lease_s=3.0)
    >>> [lease(State(workers=2, silence_s=s), policy) for s in (0.6, 2.0, 60.0)]
    [3.0, 6.0, 30.0]
    """
    return max(policy.lease_s, min(3.0 * state.silence_s, 10.0 * policy.lease_s))


def forgive(state: State, now: float, policy: MembershipPolicy) -> None:
    """Extends all leases when a tick comes late: the master itself was stopped and received nothing."""
    late = math.inf if state.ticked_at is None else now - state.ticked_at - policy.tick_s
    state.ticked_at = now
    state.silence_s = FADE * min(state.silence_s, 10.0 / 3.0 * policy.lease_s)  # a longer one would only last longer
    if late > policy.tick_s:
        for member in state.members.values():
            member.seen_at = min(now, member.seen_at + late)
            member.left_at = None if member.left_at is None else min(now, member.left_at + late)
        state.pending.update({ref: min(now, at + late) for ref, at in state.pending.items()})
