"""Decides who is in the job, in which generation: (state, event, now) ─▶ actions with reasons.

A planned view (a join, an announced departure) takes effect between two steps and fails none. A forced view follows a
death: groups of older generations cannot complete a step any more and are cut (`cut_below`). Members *enter* a view
with their number of applied steps; when all have, the one that is furthest ahead becomes the source of the state. No
gRPC, processes, files or clocks: `master/master.py` is the shell. Model: torchft's `quorum_compute`; protocol:
docs/concepts/generation.md. The state changes in place.
"""

from trueline.engine.contract import parse_ref
from trueline.train.membership import events as h
from trueline.train.membership.events import Action
from trueline.train.membership.health import break_group, count_stranded, find_overdue, forgive, lose_workers, retry
from trueline.train.membership.poison import suspect
from trueline.train.membership.state import Member, MembershipPolicy, State, fill, form, settle

SMOOTH = 0.1


def decide(state: State, event: h.Event, now: float, policy: MembershipPolicy) -> list[Action]:
    """Applies `event` at time `now` (seconds, monotonic) to `state` and returns the actions to carry out."""
    if state.phase in ("finished", "failed"):
        return []
    match event:
        case h.Begin():
            return _begin(state, event, now, policy)
        case h.Tick():
            return _tick(state, now, policy)
        case h.Death():
            return lose_workers(state, [event], now, policy)
        case h.Deaths():
            return lose_workers(state, event.deaths, now, policy)
        case h.Scale():
            return _scale(state, event, now, policy)
        case h.Halt():
            state.halting = event.why
            return [h.Log("HALT", {"why": event.why}), *_release(state, now, policy)]
        case h.EngineRoom():
            state.room = event.workers
            return fill(state, now) if state.begun and not state.finishing else []
    member = state.members.get(event.ref)
    if member is not None:
        state.silence_s = max(state.silence_s, now - member.seen_at)
        member.seen_at = now
        return _apply_worker_event(state, member, event, now, policy)
    if isinstance(event, h.Ready) and event.ref in state.pending:
        return _join(state, event, now, policy)
    if isinstance(event, h.Heartbeat) and event.ref in state.pending:
        return []  # it has overtaken the hello, which goes another way
    return [h.Fence(event.ref)]


def _apply_worker_event(
    state: State, member: Member, event: h.WorkerEvent, now: float, policy: MembershipPolicy
) -> list[Action]:
    match event:
        case h.Heartbeat():
            return _apply_heartbeat(state, member, event, now, policy)
        case h.Ready():
            member.store, member.state = event.store, event.state
            return _release(state, now, policy)
        case h.Entered():
            return _apply_entry(state, member, event, now, policy)
        case h.Finished():
            return _apply_finish(state, member, event)
        case h.Leaving():
            member.leaving = True
            return settle(state, policy)
        case h.Trial():
            member.trying, member.trying_where = event.record, event.where
            return []
        case h.Suspect():
            return suspect(state, event, policy)
        case h.Saved():
            if event.step < state.checkpoint_step <= state.committed:
                return []  # a former rank 0 writes late: the newest checkpoint stays
            state.checkpoint, state.checkpoint_step = event.path, event.step
            return [h.Log("CKPT", {"step": event.step, "path": event.path, "digest": event.digest})]
        case h.GroupBroken():  # also unreleased: a master that came back may not know that the group was released
            if event.generation != state.generation:
                return []
            return break_group(state, event, now, policy)


def scale_fault(workers: int, policy: MembershipPolicy) -> str:
    """Why the job cannot have this number of workers; empty: it can."""
    if workers >= policy.min_workers:
        return ""
    return f"{workers} workers are fewer than the job's minimum of {policy.min_workers}; ask for at least as many"


def _begin(state: State, event: h.Begin, now: float, policy: MembershipPolicy) -> list[Action]:
    """Adopts the running workers; if none runs, fills all slots."""
    state.begun = True
    if event.launch:
        state.workers, state.halting = policy.workers, ""
        state.lift_quarantines()
    if not event.alive:
        state.members, state.pending, state.failures = {}, {}, {}
        state.phase, state.view, state.awaited, state.unfinished = "gathering", (), set(), set()
        rows: list[Action] = [h.Log("LAUNCH", {"workers": state.workers})] if event.launch else []
        return [*rows, *fill(state, now)]
    state.pending = dict.fromkeys(event.alive - state.members.keys(), now)
    dead = [h.Death(ref, "died while the master was away") for ref in state.members if ref not in event.alive]
    return lose_workers(state, dead, now, policy)


def _join(state: State, event: h.Ready, now: float, policy: MembershipPolicy) -> list[Action]:
    del state.pending[event.ref]
    slot = parse_ref(event.ref)[1]
    state.members[event.ref] = Member(ref=event.ref, slot=slot, store=event.store, state=event.state, seen_at=now)
    if state.phase == "gathering":
        state.gathering_since = now if state.gathering_since is None else state.gathering_since
        return _gather(state, now, policy)
    return settle(state, policy)


def _gather(state: State, now: float, policy: MembershipPolicy) -> list[Action]:
    """Forms the first view, or one after all had died, with all workers that start within `gather_s`.

    A slot that died and has to wait before it is filled again is not waited for; its worker joins later.
    """
    target = state.target_workers
    if state.room is not None:  # hosts that join later bring their workers into a group that trains
        target = min(target, max(state.room, policy.min_workers))
    waited = state.gathering_since is not None and now - state.gathering_since >= policy.gather_s
    if len(state.members) < target and state.pending and not waited:
        return []
    ready = sum(member.left_at is None and not state.is_leaving(member) for member in state.members.values())
    if not ready or ready < min(target, policy.min_workers):
        return []
    if ready >= target:
        return form(state, "all are ready", forced=True)
    if waited:
        return form(state, f"{ready} of {target} are ready after {policy.gather_s:g} s", forced=True)
    if not state.pending:
        return form(state, f"{ready} of {target} are ready, no other is starting", forced=True)
    return []


def _apply_entry(state: State, member: Member, event: h.Entered, now: float, policy: MembershipPolicy) -> list[Action]:
    if event.generation != state.generation or member.rank < 0:
        return []  # superseded, as the shell answers
    member.entered, member.steps = event.step, max(event.step, member.steps)
    member.rate = event.rate or member.rate
    state.awaited.discard(event.ref)
    state.released = False
    return _release(state, now, policy)


def _release(state: State, now: float, policy: MembershipPolicy) -> list[Action]:
    """Releases the group when every member of the view has entered and they are enough, or the job halts."""
    view = state.view
    if state.released or state.awaited or not view:
        return []
    for member in state.members.values():
        member.left_at = now if member.left and member.left_at is None else member.left_at
    if (len(view) < policy.min_workers and not state.halting) or not state.members[view[0]].store:
        return []
    group = [state.members[ref] for ref in view]
    steps = tuple(-1 if member.entered is None else member.entered for member in group)
    most = max(steps)
    source, checkpoint = (steps.index(most), "") if most >= 0 else (0, state.checkpoint)
    if most < 0 and not checkpoint and state.committed:
        why = f"every process that held the state of step {state.committed} is gone and there is no checkpoint"
        state.phase = "failed"
        return [h.FailJob("state_lost", why)]
    if most < 0:
        most = state.checkpoint_step if checkpoint else 0
    states, rates = tuple(member.state for member in group), tuple(member.rate for member in group)
    actions: list[Action] = [h.Release(source, steps, checkpoint, group[0].store, states, rates)]
    if most < state.committed:
        actions = [h.Log("TRUNCATE", {"steps": most}), h.Truncate(most), *actions]
    state.released, state.committed, state.stepped_at = True, most, None
    for member in group:
        member.base = most if member.base is None else min(member.base, most)
    return actions + settle(state, policy)


def _apply_heartbeat(
    state: State, member: Member, event: h.Heartbeat, now: float, policy: MembershipPolicy
) -> list[Action]:
    first = member.steps < 0 <= event.step
    if not event.to_move or event.moved != member.moved or not member.to_move:
        member.moved_at = now
    member.moved, member.to_move, member.sending = event.moved, event.to_move, event.sending
    member.phase, member.phase_s = event.phase, event.phase_s
    if event.step > member.steps:
        member.steps = event.step
        member.base = event.step if member.base is None else member.base
    if event.step > state.committed:
        if state.stepped_at is not None:
            took_s = (now - state.stepped_at) / (event.step - state.committed)
            state.usual_s = took_s if not state.usual_s else (1 - SMOOTH) * state.usual_s + SMOOTH * took_s
        state.stepped_at, state.committed = now, event.step
        if state.fill_at > now and state.released:
            state.fill_at = now
            return [*fill(state, now), *(settle(state, policy) if first else [])]
    return settle(state, policy) if first else []


def _apply_finish(state: State, member: Member, event: h.Finished) -> list[Action]:
    if event.generation != state.generation or member.rank < 0:
        return []
    state.finishing = True
    state.unfinished.discard(event.ref)
    if state.unfinished:
        return []
    state.phase = "finished"
    return [h.Finish()]


def _scale(state: State, event: h.Scale, now: float, policy: MembershipPolicy) -> list[Action]:
    """Fills new slots, or lets the highest ones leave; retries slots in quarantine if the job grows or needs them."""
    before, state.workers = state.workers, event.workers
    again = event.workers >= before or state.target_workers < policy.min_workers
    if again:
        state.lift_quarantines()
    waiting = [ref for ref in state.pending if parse_ref(ref)[1] >= event.workers]
    waiting += [m.ref for m in state.members.values() if m.rank < 0 and not m.left and m.slot >= event.workers]
    for ref in waiting:
        state.pending.pop(ref, None)
        state.members.pop(ref, None)
    row = {"workers": event.workers, "before": before, "again": again, "why": event.why}
    actions: list[Action] = [h.Log("SCALE", row)]
    actions += [h.Kill(ref, f"not needed: the job has {event.workers} workers now") for ref in waiting]
    actions += fill(state, now)
    return actions + (_gather(state, now, policy) if state.phase == "gathering" else settle(state, policy))


def _tick(state: State, now: float, policy: MembershipPolicy) -> list[Action]:
    forgive(state, now, policy)
    state.view_s += policy.tick_s
    deaths = find_overdue(state, now, policy)
    actions: list[Action] = [h.Kill(death.ref, death.why) for death in deaths]
    actions += lose_workers(state, deaths, now, policy) if deaths else []
    if state.phase == "failed":
        return actions
    if state.phase == "gathering" and state.members:
        actions += _gather(state, now, policy)
    actions += retry(state, now)
    if state.incarnations and now >= state.fill_at:
        actions += fill(state, now)
    if count := count_stranded(state, policy):
        return actions + form(state, f"{count} wait in a group that others have left", forced=True)
    if state.careful and state.committed > state.died_at and state.released and not state.finishing:
        return actions + form(state, "a step was applied: records are tried together again", forced=False)
    return actions + settle(state, policy)
