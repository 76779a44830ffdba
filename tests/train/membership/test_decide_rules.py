"""Promises of scaling, hangs, quarantine, votes and care: pure decisions, time is a number that the test moves."""

import dataclasses

import pytest

from trueline.train.membership import decide as m
from trueline.train.membership import events as h
from trueline.train.membership import state
from worlds.membership import POLICY, A, B, C, World, logged, running


def test_more_workers_are_started_and_join_by_a_planned_view():
    world = running().happen(h.Scale(4, "asked for"))
    assert (world.of(h.Start), logged(world, "SCALE")[0]["workers"]) == ([h.Start(3, 0)], 4)
    world.happen(h.Ready("worker-3.0", "d:1"))
    assert (world.state.view, world.state.cut_below) == ((A, B, C, "worker-3.0"), 1)


def test_fewer_workers_let_the_highest_slots_leave_by_a_planned_view_and_are_not_replaced():
    world = running().happen(h.Scale(2, "asked for"))
    assert (world.state.view, world.state.cut_below, world.of(h.Kill)) == ((A, B), 1, [])
    world.enter(a=6, b=6).happen(h.Death(C, "exit code 0"))
    assert world.of(h.Start) == []
    assert world.happen(h.Scale(3, "again")).of(h.Start) == [h.Start(2, 1)]


def test_workers_that_never_joined_end_at_once_when_they_are_not_needed():
    world = World().happen(h.Begin(), h.Ready(A, "a:1"), h.Ready(C, "c:1"), h.Scale(2, "asked for"))
    assert world.of(h.Kill) == [h.Kill(C, "not needed: the job has 2 workers now")]
    assert world.happen(h.Ready(B, "b:1")).state.view == (A, B)


def test_who_left_and_does_not_end_is_killed_when_the_others_have_long_gone_on():
    world = running().happen(h.Scale(2, "asked for")).wait(90, A, B, C)
    assert C in world.state.members  # the step that it completes may be a long one
    world.enter(a=6, b=6).wait(60.5, A, B, C)
    assert C not in world.state.members


def test_fewer_workers_than_the_minimum_are_refused_in_words():
    assert "minimum of 2" in m.scale_fault(1, POLICY)
    assert m.scale_fault(2, POLICY) == ""


def test_joins_while_a_view_forms_cost_one_more_view():
    world = running().happen(h.Scale(9, "asked for"))
    newcomers = [f"worker-{slot}.0" for slot in range(3, 9)]
    world.happen(*(h.Ready(ref, "n:1") for ref in newcomers))
    assert len(world.state.view) == 4
    world.enter(a=6, b=6, c=6).happen(h.Entered(newcomers[0], 2, -1))
    assert (world.state.generation, len(world.state.view)) == (3, 9)
    assert world.of(h.Publish)[0].reason == f"{', '.join(newcomers[1:4])} and 2 more join"


def test_deaths_that_are_noticed_together_cost_one_view():
    world = running().happen(h.Deaths((h.Death(A, "killed"), h.Death(B, "killed"))))
    assert (world.state.generation, world.state.view, len(world.of(h.Start))) == (2, (C,), 2)


def test_a_master_that_stood_still_takes_nobody_for_dead():
    world = running().wait(1.0, A, B, C)
    world.now += 3600.0
    assert world.happen(h.Tick()).of(h.Kill) == []
    assert world.wait(10.0, A, B).of(h.Kill) == [h.Kill(C, "silent for 10.2 s")]


def test_a_heartbeat_that_overtakes_the_hello_fences_nobody():
    world = World().happen(h.Begin(), h.Heartbeat(A, -1))
    assert world.actions == ()
    assert world.happen(h.Ready(A, "a:1")).state.members.keys() == {A}
    assert world.happen(h.Heartbeat("worker-0.7", -1)).of(h.Fence) == [h.Fence("worker-0.7")]


def test_a_slot_that_waits_before_it_is_tried_again_is_not_waited_for():
    world = World(state.MembershipPolicy(workers=2, lease_s=10.0, refill_s=0.0)).happen(h.Begin())
    world.happen(h.Death(A, "exit code 1"), h.Death("worker-0.1", "exit code 1"))
    assert not world.state.view
    world.happen(h.Ready(B, "b:1"))
    assert (world.state.view, world.of(h.Publish)[0].reason) == ((B,), "1 of 2 are ready, no other is starting")
    assert world.wait(1.0, B).state.pending.keys() == {"worker-0.2"}


def test_what_a_busy_machine_takes_from_the_master_it_does_not_take_from_a_members_lease():
    world = running()
    for _ in range(20):  # each second the master gets a core for one tick; C gets none
        world.now += 1.0
        assert world.happen(h.Heartbeat(A, 5), h.Heartbeat(B, 5), h.Tick()).of(h.Kill) == []
    assert world.wait(5.5, A, B).of(h.Kill) == [h.Kill(C, "silent for 10.2 s")]


def test_where_living_members_were_silent_for_long_silence_tells_less():
    world = running().wait(8.0, A, B).wait(0.25, A, B, C)
    assert [kill for kill in world.wait(13.0, A, B).all if isinstance(kill, h.Kill)] == []
    assert [kill.ref for kill in world.wait(5.0, A, B).all if isinstance(kill, h.Kill)] == [C]


def test_an_hour_in_which_the_master_was_frozen_is_forgotten_in_a_minute():
    world = running()
    world.now += 3600.0
    world.happen(h.Heartbeat(A, 5), h.Heartbeat(B, 5), h.Heartbeat(C, 5)).wait(60.0, A, B, C)
    assert world.wait(10.25, A, B).of(h.Kill) == [h.Kill(C, "silent for 10.2 s")]


def test_a_silence_that_lies_back_is_forgotten():
    world = running().wait(8.0, A, B).wait(60.0, A, B, C)
    assert world.wait(10.25, A, B).of(h.Kill) == [h.Kill(C, "silent for 10.2 s")]


def beat(world: World, seconds: float, busy: dict[str, tuple[str, float]], waited: float) -> World:
    """`seconds` of heartbeats: those in `busy` compute since so long, the others wait since `waited`."""
    until, began = world.now + seconds, world.now
    while world.now < until:
        world.now += 0.25
        for ref in (A, B, C):
            phase, before = busy.get(ref, ("waiting", waited))
            world.happen(h.Heartbeat(ref, 5, phase, before + world.now - began))
        world.happen(h.Tick())
        if world.of(h.Kill):
            break
    return world


def test_a_member_that_computes_while_all_others_wait_for_long_is_stuck():
    world = beat(running(), 9.0, {B: ("computing", 0.0)}, 0.0)
    assert world.of(h.Kill) == []
    beat(world, 9.0, {B: ("computing", 9.0)}, 9.0)
    assert [kill.ref for kill in world.of(h.Kill)] == [B]
    assert world.of(h.Kill)[0].why.startswith("stuck: computing for 10.2 s while all others wait")
    assert world.state.view == (A, C)


def test_nobody_is_stuck_in_a_step_that_is_slow_for_all_or_for_one_that_checkpoints():
    world = beat(running(), 60.0, {A: ("reading", 0.0), B: ("computing", 0.0), C: ("computing", 0.0)}, 0.0)
    assert world.of(h.Kill) == []
    assert beat(running(), 4.0, {B: ("computing", 20.0)}, 0.0).of(h.Kill) == []
    assert beat(running(), 60.0, {B: ("committing", 0.0)}, 0.0).of(h.Kill) == []


def test_nobody_is_stuck_before_a_step_of_its_own():
    world = running().happen(h.Death(B, "killed")).enter(a=5, c=5).happen(h.Ready("worker-1.1", "b:2"))
    world.enter(a=5, c=5).happen(h.Entered("worker-1.1", world.state.generation, -1))
    for _ in range(200):
        world.now += 0.25
        world.happen(h.Heartbeat(A, 5, "waiting", 60.0), h.Heartbeat(C, 5, "waiting", 60.0))
        world.happen(h.Heartbeat("worker-1.1", -1, "computing", 60.0), h.Tick())
    assert "worker-1.1" in world.state.members


def test_members_that_all_compute_are_not_stuck_since_a_newcomer_waits_and_would_take_the_state_with_them():
    world = running().happen(h.Death(B, "killed")).enter(a=5, c=5).happen(h.Ready("worker-1.1", "b:2"))
    world.enter(a=5, c=5).happen(h.Entered("worker-1.1", world.state.generation, -1))
    for since in range(230):
        world.now += 1.0
        world.happen(h.Heartbeat(A, 5, "computing", since), h.Heartbeat(C, 5, "computing", since))
        world.happen(h.Heartbeat("worker-1.1", -1, "waiting", since), h.Tick())
        if any(isinstance(action, h.Kill) for action in world.all):
            break
    assert since == 201, "a hang ends in the end"


def test_ten_usual_steps_are_waited_for_where_steps_are_slow():
    world = running()
    for step in range(6, 16):
        world.now += 4.0
        world.happen(*(h.Heartbeat(ref, step, "computing", 1.0) for ref in (A, B, C)))
    assert world.state.usual_s > 3.0
    assert beat(world, 25.0, {B: ("computing", 0.0)}, 0.0).of(h.Kill) == []


def quarantined_slot() -> World:
    world = running(steps=5).happen(h.Death(B, "killed"))
    for incarnation in range(1, 4):
        committed = world.state.committed
        world.enter(a=committed, c=committed).happen(h.Heartbeat(A, committed + 1))
        world.happen(h.Death(f"worker-1.{incarnation}", "exit code 139")).wait(9.0, A, C)
    return world


def test_a_slot_that_keeps_dying_while_the_job_gets_on_stays_empty_for_a_while_with_its_reason():
    world = quarantined_slot()
    assert world.state.quarantined == {
        1: "worker slot 1 died 3 times in a row before its first step; last: exit code 139"
    }
    assert world.wait(20.0, A, C).of(h.Start) == []
    assert (world.state.phase, world.state.target_workers) == ("running", 2)


def test_a_slot_in_quarantine_is_tried_again_and_each_time_that_it_dies_once_more_it_rests_for_twice_as_long():
    world = quarantined_slot()
    rested = []
    for incarnation in range(4, 10):
        began = world.now
        while not world.state.pending:
            world.wait(1.0, A, C)
        rested.append(round(world.now - began, -1))
        assert list(world.state.pending) == [f"worker-1.{incarnation}"]
        assert (logged(world, "RETRY")[-1]["slot"], world.state.target_workers) == (1, 3)
        world.happen(h.Death(f"worker-1.{incarnation}", "exit code 139"))
        assert world.state.phase == "running", "the job goes on, even without a step since the last try"
    assert rested == [20.0, 60.0, 120.0, 240.0, 480.0, 480.0]  # 9 s of the first 30 had passed


def test_a_slot_that_works_after_its_quarantine_has_a_clean_sheet_when_a_worker_of_it_is_killed():
    world = quarantined_slot().wait(40.0, A, C)
    committed = world.state.committed
    world.happen(h.Ready("worker-1.4", "x:1")).enter(a=committed, c=committed)
    world.happen(h.Entered("worker-1.4", world.state.generation, -1), h.Heartbeat("worker-1.4", committed + 2))
    assert (len(world.state.view), world.state.relapses) == (3, {1: 1}), "the job is at its full size"
    world.happen(h.Death("worker-1.4", "killed by SIGKILL"))
    assert (world.state.relapses, world.state.quarantined) == ({}, {})


def test_a_job_that_waits_for_workers_or_is_at_its_end_lifts_no_quarantine():
    world = quarantined_slot()
    world.state.finishing = True
    assert world.wait(60.0, A, C).of(h.Start) == []
    assert 1 in world.state.quarantined


def test_a_slot_in_quarantine_is_tried_again_when_too_few_are_left_without_it():
    world = quarantined_slot()
    world.policy = dataclasses.replace(world.policy, min_workers=2)
    world.happen(h.Scale(2, "asked for"))
    assert (world.state.quarantined, world.state.target_workers) == ({}, 2)
    assert [start.slot for start in world.of(h.Start)] == [1]
    assert logged(world, "SCALE")[0]["again"] is True


def failing(world: World, slot: int, times: int, *, every_s: float = 9.0, failed: bool = True) -> World:
    """Workers of a slot step, fail, and are replaced, again and again, while the others live."""
    for _ in range(times):
        ref = next(ref for ref in world.state.view if int(ref[7:].partition(".")[0]) == slot)
        committed = world.state.committed + 3
        world.happen(*(h.Heartbeat(other, committed) for other in world.state.view))
        world.happen(h.Death(ref, "exit code 3", failed=failed)).wait(every_s, *world.state.view)
        world.happen(*(h.Entered(other, world.state.generation, committed) for other in world.state.view))
        for new in list(world.state.pending):
            world.happen(h.Ready(new, "x:1"))
            world.happen(*(h.Entered(other, world.state.generation, committed) for other in world.state.view))
    return world


def test_a_slot_whose_workers_fail_again_and_again_after_some_steps_stays_empty_with_its_reason():
    world = failing(running(), 1, 5)
    assert world.state.quarantined == {}
    failing(world, 1, 1)
    why = "worker slot 1 failed 6 times in 45 s, all others 0 times; last: exit code 3"
    assert world.state.quarantined == {1: why}
    assert world.wait(20.0, *world.state.view).of(h.Start) == []
    assert world.state.phase == "running"
    assert [action.slot for action in world.happen(h.Scale(3, "mended")).of(h.Start)] == [1]


def test_what_is_killed_from_outside_fails_seldom_or_fails_everywhere_keeps_its_place():
    assert failing(running(), 1, 20, failed=False).state.quarantined == {}
    assert failing(running(), 1, 20, every_s=150.0).state.quarantined == {}
    world = running()
    for _ in range(6):
        for slot in range(3):
            failing(world, slot, 1)
    assert world.state.quarantined == {}


def test_a_slot_that_the_job_cannot_do_without_is_filled_again_however_often_its_workers_fail():
    world = World(state.MembershipPolicy(workers=2, min_workers=2, refill_s=0.0)).happen(h.Begin())
    world.happen(h.Ready(A, "a:1"), h.Ready(B, "b:1")).enter(a=-1, b=-1)
    assert failing(world, 1, 20).state.quarantined == {}
    assert world.state.phase == "running"


def test_scaling_lifts_the_quarantine():
    world = quarantined_slot().happen(h.Scale(3, "the node was mended"))
    assert world.of(h.Start) == [h.Start(1, 4)]


def test_too_many_slots_in_quarantine_end_the_job_with_their_reasons():
    world = quarantined_slot()
    world.happen(h.Death(C, "killed"))
    for incarnation in range(1, 4):
        world.state.committed += 1
        world.happen(h.Death(f"worker-2.{incarnation}", "exit code 1")).wait(9.0, A)
    (failure,) = [action for action in world.all if isinstance(action, h.FailJob)]
    assert failure.why.startswith("1 of 3 slots are left, at least 2 are needed: worker slot 1 died")


def test_a_vote_moves_the_records_on_and_a_second_workers_vote_sets_them_aside():
    where = "record 5 of b.parquet#1, part 2 of 2"
    world = running().happen(h.Suspect(A, (17,), "ValueError: odd", where))
    assert (world.state.rotation, world.state.cut_below, world.state.view) == (1, 2, (A, B, C))
    assert logged(world, "SUSPECT") == [{"record": 17, "worker": A, "why": "ValueError: odd", "where": where}]
    world.enter(a=5, b=5, c=5).happen(h.Suspect(B, (17,), "ValueError: odd"))
    why = f"{A} and {B}: ValueError: odd"
    assert logged(world, "POISON") == [{"record": 17, "why": why, "where": where}]
    assert world.state.list_set_aside() == [{"record": 17, "where": where, "why": why}]
    assert (list(world.state.set_aside), world.state.generation, world.state.rotation) == ([17], 3, 2)


def test_the_same_workers_second_vote_counts_only_where_it_is_alone():
    world = running().happen(h.Suspect(A, (17,), "odd")).enter(a=5, b=5, c=5).happen(h.Suspect(A, (17,), "odd"))
    assert (world.state.set_aside, world.state.rotation) == ({}, 2)
    alone = World(state.MembershipPolicy(workers=1)).happen(h.Begin(), h.Ready(A, "a:1")).enter(a=-1)
    alone.happen(h.Suspect(A, (17,), "odd"), h.Suspect(A, (17,), "odd"))
    assert alone.state.set_aside == {}  # the same call, made twice
    alone.enter(a=0).happen(h.Suspect(A, (17,), "odd"))
    assert list(alone.state.set_aside) == [17]


def test_a_vote_that_comes_late_moves_the_records_on_though_the_others_have_formed_a_view_meanwhile():
    """A worker that tries its records for longer than the others wait for it; the view that they get leaves the record
    with that worker, whose second vote would not count."""
    world = running().happen(h.GroupBroken(B, 1, "the gradients are not finite"))
    assert (world.state.generation, world.state.rotation) == (2, 0)
    world.happen(h.Suspect(A, (17,), "odd"))
    assert (world.state.generation, world.state.rotation, world.state.view) == (3, 1, (A, B, C))


def test_votes_that_arrive_while_a_view_forms_already_are_kept_and_force_no_other():
    world = running().happen(h.Suspect(A, (17,), "odd"), h.Suspect(B, (18,), "odd"))
    assert (world.state.generation, sorted(world.state.suspects)) == (2, [17, 18])
    world.happen(h.Suspect(B, (17,), "odd"))
    assert (world.state.generation, list(world.state.set_aside)) == (3, [17])


def test_more_records_than_may_be_set_aside_end_the_job_and_are_named():
    world = World(state.MembershipPolicy(workers=3, set_aside=1, refill_s=0.0)).happen(h.Begin())
    world.happen(*(h.Ready(ref, "x:1") for ref in (A, B, C))).enter(a=-1, b=-1, c=-1)
    world.happen(h.Suspect(A, (1, 2), "odd")).enter(a=0, b=0, c=0).happen(h.Suspect(B, (1, 2), "even"))
    (failure,) = world.of(h.FailJob)
    assert failure.code == "poison"
    assert "2 records, the first is record 1: worker-0.0: odd; worker-1.0: even" in failure.why


def test_deaths_without_a_step_between_make_a_careful_view_and_a_death_while_trying_is_a_vote():
    world = running().happen(h.Death(A, "killed by SIGSEGV")).enter(b=5, c=5)
    assert not world.state.careful
    world.happen(h.Ready("worker-0.1", "a:2"))
    world.enter(b=5, c=5).happen(h.Entered("worker-0.1", world.state.generation, -1))
    world.happen(h.Death("worker-0.1", "killed by SIGSEGV"))
    assert world.state.careful
    assert logged(world, "VIEW")[0]["careful"]
    world.enter(b=5, c=5).happen(h.Trial(B, 3, "record 3 of a"), h.Trial(B, 17, "record 2 of b"), h.Trial(C, 17))
    world.happen(h.Death(B, "killed by SIGSEGV"))
    assert world.state.places == {17: "record 2 of b"}
    assert world.state.suspects == {17: {B: "killed by SIGSEGV while record 17 was tried"}}
    assert world.of(h.Start) == [h.Start(1, 1)]


def test_one_worker_alone_survives_a_record_that_kills_it_each_time():
    world = World(state.MembershipPolicy(workers=1)).happen(h.Begin(), h.Ready(A, "a:1")).enter(a=-1)
    world.happen(h.Saved(A, 0, "/job/step-0"))
    for incarnation in range(5):
        ref = f"worker-0.{incarnation}"
        if world.state.careful and 17 not in world.state.set_aside:
            world.happen(h.Trial(ref, 17))
        if 17 in world.state.set_aside:
            break
        world.happen(h.Death(ref, "killed by SIGSEGV")).wait(40.0)
        after = f"worker-0.{incarnation + 1}"
        world.happen(h.Ready(after, "a:1"), h.Tick()).wait(31.0, after)
        world.happen(h.Entered(after, world.state.generation, -1))
    assert (list(world.state.set_aside), world.state.phase) == ([17], "running")


def test_care_ends_with_the_first_step_that_is_applied():
    world = (
        running()
        .happen(h.Death(A, "killed"))
        .enter(b=5, c=5)
        .happen(h.Death(B, "killed"), h.Ready("worker-0.1", "a:2"))
    )
    assert world.state.careful
    world.happen(h.Entered(C, world.state.generation, 5), h.Entered("worker-0.1", world.state.generation, -1))
    world.happen(h.Heartbeat(C, 6), h.Tick())
    assert not world.state.careful
    assert world.state.cut_below < world.state.generation


def test_members_that_die_at_the_same_moment_call_for_no_care():
    world = running().happen(h.Death(A, "killed"), h.Death(B, "killed"))
    assert not world.state.careful


def test_a_group_that_was_let_go_before_the_master_died_is_believed_when_it_cannot_form():
    world = running()
    world.state.released = False  # somebody has entered the master that came back, the others were let go before
    world.happen(h.GroupBroken(A, 1, "timeout"))
    assert world.state.generation == 2


def test_an_older_checkpoint_that_is_written_late_does_not_take_the_newers_place():
    world = running(steps=30).happen(h.Saved(B, 20, "/job/step-20"), h.Saved(A, 10, "/job/step-10"))
    assert (world.state.checkpoint, world.rows) == ("/job/step-20", [])


def test_who_dies_in_its_last_step_before_a_departure_is_cut_off_and_who_ends_well_is_not():
    world = running().happen(h.Leaving(C))
    assert (world.state.view, world.state.cut_below) == ((A, B), 1)
    world.happen(h.Death(C, "exit code 0", clean=True))
    assert world.state.generation == 2
    world = running().happen(h.Leaving(C), h.Death(C, "killed by SIGKILL"))
    assert (world.state.generation, world.state.cut_below) == (3, 3)


def test_a_vote_cuts_the_group_even_while_a_planned_view_forms():
    world = running().happen(h.Scale(4, "asked for"), h.Ready("worker-3.0", "d:1"))
    assert (world.state.generation, world.state.cut_below) == (2, 1)
    world.happen(h.Suspect(A, (17,), "odd"))
    assert (world.state.generation, world.state.cut_below) == (3, 3)


def test_members_that_wait_for_one_that_went_on_to_a_planned_view_are_cut_off():
    world = running().happen(h.Scale(4, "asked for"), h.Ready("worker-3.0", "d:1"))
    world.happen(h.Entered("worker-3.0", 2, -1))
    world.wait(60.0, A, B, C, "worker-3.0", phase="waiting", phase_s=60.0)
    assert world.state.generation == 2  # a long step, for everybody
    world.happen(h.Entered(A, 2, 5)).wait(1.0, B, C, "worker-3.0", phase="waiting", phase_s=11.0)
    assert (world.state.generation, world.state.cut_below) == (3, 3)


def test_when_all_announce_their_departure_at_once_one_stays_until_the_slots_are_filled_again():
    world = World().happen(h.Begin(), h.Ready(A, "a:1"), h.Ready(B, "b:1"), h.Ready(C, "c:1")).enter(a=-1, b=-1, c=-1)
    world.happen(h.Leaving(A), h.Leaving(B), h.Leaving(C))
    assert world.state.view == (A, B, C)
    world.happen(h.Heartbeat(A, 1))
    assert world.state.view == (A,)
    world.enter(a=1).happen(h.Death(B, "exit code 0", clean=True))
    assert world.of(h.Start) == [h.Start(1, 1)]


def test_survivors_apply_a_step_before_the_replacement_takes_cores_from_them():
    world = World(state.MembershipPolicy(workers=3)).happen(
        h.Begin(), h.Ready(A, "a:1"), h.Ready(B, "b:1"), h.Ready(C, "c:1")
    )
    world.enter(a=-1, b=-1, c=-1).happen(h.Heartbeat(A, 5), h.Death(C, "killed by SIGKILL"))
    assert world.of(h.Start) == []
    assert world.enter(a=5, b=5).happen(h.Heartbeat(A, 6)).of(h.Start) == [h.Start(2, 1)]


def test_a_replacement_starts_after_a_moment_though_the_survivors_do_not_get_on():
    world = (
        World(state.MembershipPolicy(workers=2))
        .happen(h.Begin(), h.Ready(A, "a:1"), h.Ready(B, "b:1"))
        .enter(a=-1, b=-1)
    )
    world.happen(h.Heartbeat(A, 5), h.Death(B, "killed by SIGKILL")).wait(0.25, A)
    assert [action for action in world.all if isinstance(action, h.Start)][-1] == h.Start(1, 1)


def lost_c() -> World:
    """C has died, A has entered the view without it, and B has not."""
    return running().happen(h.Death(C, "killed")).enter(a=5)


@pytest.mark.parametrize("phase", ["computing", "waiting", "regrouping"])
def test_a_member_that_does_not_leave_a_cut_group_is_given_up_when_the_others_have_waited(phase):
    world = lost_c()
    for seconds in range(60):
        world.now += 0.25
        since = seconds * 0.25
        world.happen(h.Heartbeat(A, 5, "regrouping", since), h.Heartbeat(B, 6, phase, since), h.Tick())
        if world.of(h.Kill):
            break
    assert [kill.ref for kill in world.of(h.Kill)] == [B]
    assert 10.0 < since < 11.0
    assert world.of(h.Kill)[0].why.startswith(f"stuck: {phase} for ")
    assert world.state.view == (A,)


def test_all_that_wait_in_a_cut_group_are_given_up_though_no_other_waits_for_them():
    world = running().happen(h.Death(C, "killed")).wait(9.0, A, B, phase="waiting", phase_s=60.0)
    assert world.of(h.Kill) == []
    world.wait(1.25, A, B, phase="waiting", phase_s=60.0)
    assert [kill.ref for kill in world.of(h.Kill)] == [A, B]


def test_a_member_that_evaluates_or_saves_may_take_its_time_to_leave_a_cut_group():
    for phase in ("evaluating", "committing", "finishing", "healing"):
        world = lost_c()
        for _ in range(200):
            world.now += 0.25
            world.happen(h.Heartbeat(A, 5, "regrouping", 60.0), h.Heartbeat(B, 5, phase, 60.0), h.Tick())
        assert B in world.state.members


def test_a_member_that_computes_without_end_is_found_though_a_join_is_planned():
    world = running().happen(h.Scale(4, "asked for"), h.Ready("worker-3.0", "d:1"))
    world.happen(h.Entered("worker-3.0", world.state.generation, -1))
    assert not world.state.released
    for _ in range(50):
        world.now += 0.25
        world.happen(h.Heartbeat("worker-3.0", -1, "regrouping", 60.0), h.Tick())
        for ref, phase in ((A, "waiting"), (B, "computing"), (C, "waiting")):
            world.happen(h.Heartbeat(ref, 6, phase, 60.0))
    assert B not in world.state.members


def test_a_master_that_came_back_gives_the_members_time_to_enter():
    world = lost_c()
    world.state.view_s = 0.0  # another master has read the journal
    world.wait(9.0, A, B, phase="waiting", phase_s=60.0)
    assert world.of(h.Kill) == []


def moving(world: World, ref: str, moved: int, *, sending: bool = False) -> World:
    return world.happen(h.Heartbeat(ref, 5, "waiting", moved=moved, to_move=3_600_000_000, sending=sending))


def killed(world: World) -> list[h.Kill]:
    return [action for action in world.all if isinstance(action, h.Kill)]


def test_a_member_that_is_silent_lives_as_long_as_the_other_end_says_that_its_state_moves():
    world = moving(running(), C, 0)
    for moved in range(1, 13):
        moving(world, A, moved, sending=True).wait(4.0, B)
    assert killed(world) == []
    world.wait(20.0, B)
    assert {kill.ref for kill in killed(world)} == {A, C}


def test_a_silent_member_without_a_transfer_is_not_covered_by_that_of_others():
    world = running()
    for moved in range(1, 60):
        moving(moving(world, A, moved, sending=True), C, moved).wait(0.25)
    assert [kill.ref for kill in killed(world)] == [B]


def test_a_transfer_that_stands_still_is_given_up_though_its_receiver_sends_heartbeats():
    world, second = running(), 0
    while not killed(world):
        second += 1
        for ref, sending in ((A, True), (C, False)):
            moving(world, ref, 1_210_000_000 + min(second, 10), sending=sending)
        world.wait(1.0, B)
    assert killed(world) == [h.Kill(C, "no byte came for 31 s, receiving state: 1.2 of 3.6 GB")]
    assert second == 41, "its last byte came in the tenth"
