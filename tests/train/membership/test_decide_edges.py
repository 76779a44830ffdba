"""Promises of membership at its edges: exact bounds, what is reset when, what is ignored, what is written."""

import dataclasses

import pytest

from trueline.train.master.journal import apply_row
from trueline.train.membership import decide as members
from trueline.train.membership import events as h
from trueline.train.membership import health, poison
from trueline.train.membership.state import Failures, Member, MembershipPolicy, State
from worlds.membership import POLICY, A, B, C, World, logged, running

D = "worker-3.0"


def broken(world: World, generation: int | None = None, ref: str = A) -> World:
    generation = world.state.generation if generation is None else generation
    return world.happen(h.GroupBroken(ref, generation, "reset by peer"))


def ready(*refs: str) -> list[h.Ready]:
    return [h.Ready(ref, f"{ref}:1", f"{ref}:2") for ref in refs]


def entered(world: World, **steps: int) -> World:
    """Members enter the view at hand; their refs by slot: s0, s1, ..."""
    by_slot = {f"s{ref[7:].partition('.')[0]}": ref for ref in world.state.view}
    return world.happen(*(h.Entered(by_slot[name], world.state.generation, step) for name, step in steps.items()))


# The end of a job. ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["finished", "failed"])
def test_after_the_end_of_a_job_nothing_that_happens_means_anything(phase):
    world = running()
    world.state.phase = phase
    for event in (h.Death(A, "killed"), h.Tick(), h.Scale(5, "x"), h.Ready("worker-9.9", "x:1"), h.Finished(A, 1)):
        world.happen(event)
        assert (world.actions, world.rows) == ((), [])
    assert (world.state.generation, world.state.workers) == (1, 3)


def test_a_job_that_halts_lets_fewer_members_than_its_minimum_write_the_last_checkpoint():
    world = running().happen(h.Death(B, "killed"), h.Death(C, "killed")).enter(a=5)
    assert (world.state.view, world.releases()) == ((A,), []), "two are needed"
    world.happen(h.Halt("trueline halt"))
    assert (world.releases(), logged(world, "HALT")) == ([(0, (5,))], [{"why": "trueline halt"}])


def test_a_member_that_enters_alone_while_the_job_halts_waits_for_none():
    world = running().happen(h.Death(B, "killed"), h.Death(C, "killed"), h.Halt("trueline halt"))
    assert world.releases() == []
    assert world.enter(a=5).releases() == [(0, (5,))]


def break_for(world: World, minutes: float, times: int) -> World:
    """The group breaks `times` times, evenly over the time, with all members in each."""
    for _ in range(times):
        world.now += 60 * minutes / times
        world.happen(*(h.Entered(ref, world.state.generation, world.state.committed) for ref in world.state.view))
        broken(world)
    return world


def test_a_group_that_breaks_for_ten_minutes_while_all_live_ends_the_job_with_the_last_error():
    world = break_for(broken(running()), 9.9, 50)
    assert (world.state.phase, world.state.generation) == ("running", 52)
    world.now += 6.1
    [failed] = broken(world).of(h.FailJob)
    assert (failed.code, world.state.phase) == ("train", "failed")
    assert failed.why == (
        "the group of workers broke 52 times in 600 s, after step 5, while all of its members lived; "
        "last: worker-0.0 cannot use generation 52: reset by peer"
    )


def joined_by_newcomer(room: int | None) -> World:
    """Three workers that have applied steps, and one that is new in their group."""
    world = running()
    world.state.workers, world.state.room = 4, room
    for ref in (A, B, C):
        world.state.members[ref].base = 0
    world.state.pending[D] = world.now
    return entered(world.happen(*ready(D)), s0=5, s1=5, s2=5, s3=-1)


def test_a_newcomer_with_which_no_group_forms_is_left_out_with_its_host_and_the_others_train_on():
    world = joined_by_newcomer(room=4)
    for _ in range(POLICY.newcomer_breaks - 1):
        assert broken(world).of(h.AvoidHost) == []
    broken(world)
    (avoided,) = world.of(h.AvoidHost)
    assert (avoided.ref, avoided.why) == (D, "no group forms with it: reset by peer")
    assert [kill.ref for kill in world.of(h.Kill)] == [D]
    assert world.state.view == (A, B, C)
    assert world.state.failures == world.state.quarantined == {}, "its slot is not to blame"
    assert world.wait(60.0, A, B, C).of(h.Start) == [], "there is no room until the engine has some"
    assert [start.slot for start in world.happen(h.EngineRoom(4)).of(h.Start)] == [3]


def test_no_worker_is_left_out_where_all_are_new_or_have_trained_or_there_is_one_host():
    for world in (joined_by_newcomer(room=None), running()):
        for _ in range(POLICY.newcomer_breaks + 2):
            assert broken(world).of(h.AvoidHost) == []
    world = joined_by_newcomer(room=4)
    world.state.members[D].store = world.state.members[A].store  # its host has a member that has trained
    for _ in range(POLICY.newcomer_breaks + 2):
        assert broken(world).of(h.AvoidHost) == []
    world = joined_by_newcomer(room=4)
    world.state.members[D].base, world.state.members[D].steps = 5, 6
    for _ in range(POLICY.newcomer_breaks + 2):
        assert broken(world).of(h.AvoidHost) == []


def test_groups_that_break_seldom_end_no_job_however_long_no_step_is_applied():
    world = break_for(broken(running()), 60.0, 8)
    assert world.state.phase == "running"
    assert broken(world).of(h.FailJob)


@pytest.mark.parametrize("between", [h.Heartbeat(B, 6), h.Death(C, "killed")])
def test_a_step_or_a_death_begins_the_count_of_broken_groups_again(between):
    world = break_for(broken(running()), 9.9, 50).happen(between)
    assert break_for(broken(world), 9.9, 50).state.phase == "running"


def test_a_job_is_finished_once_all_members_of_its_newest_view_are_done():
    world = broken(running())
    world.happen(h.Finished(A, 1), h.Finished(B, 1), h.Finished(C, 1))
    assert (world.of(h.Finish), world.state.finishing, world.state.phase) == ([], False, "running")
    entered(world, s0=5, s1=5, s2=5).happen(h.Finished(A, 2), h.Finished(A, 2), h.Finished(B, 2))
    assert world.state.phase == "running"
    world.happen(h.Finished(C, 2))
    assert (world.of(h.Finish), world.state.phase) == ([h.Finish()], "finished")


def test_who_is_not_of_the_view_has_no_word_at_the_finish():
    world = running().happen(h.Leaving(C))
    world.happen(h.Finished(C, world.state.generation))
    assert not world.state.finishing


# Beginnings. ---------------------------------------------------------------------------------------------------------


def test_a_launch_writes_its_number_of_workers_and_a_master_that_only_comes_back_does_not():
    world = World().happen(h.Begin())
    assert logged(world, "LAUNCH") == [{"workers": 3}]
    world.state.workers = 5
    assert logged(world.happen(h.Begin(launch=False)), "LAUNCH") == []
    assert world.state.workers == 5


def test_a_launch_forgets_how_often_slots_died_before():
    world = World().happen(h.Begin(), h.Death(A, "exit code 1"), h.Death("worker-0.1", "exit code 1"))
    assert "worker-0.2" not in world.state.pending, "it has to wait"
    world.happen(h.Begin())
    assert "worker-0.2" in world.state.pending


def test_a_master_that_comes_back_waits_for_who_runs_and_replaces_who_does_not():
    world = running().happen(h.Begin(frozenset({A, C, D}), launch=False))
    assert (world.state.view, world.state.cut_below, list(world.state.pending)) == ((A, C), 2, [D, "worker-1.1"])
    assert world.of(h.Start) == [h.Start(1, 1)]
    assert world.happen(*ready(D)).of(h.Fence) == [], "it is known"


def came_back(*members: str) -> World:
    """A master that finds a view in its log and its members alive."""
    world = World()
    apply_row(world.state, "VIEW", {"generation": 4, "members": list(members), "cut_below": 4}, 0.0)
    return world.happen(h.Begin(frozenset(members), launch=False))


def test_a_view_that_is_entered_again_after_the_masters_death_is_released_when_all_have_and_its_store_is_known():
    world = came_back(A, B, C)
    for ref in (A, B, C):
        assert world.happen(h.Entered(ref, 4, 5)).of(h.Release) == []
    assert not world.state.released
    (release,) = world.happen(h.Ready(A, "a:9", "a:8")).of(h.Release)
    assert (release.store, release.states[0], release.steps) == ("a:9", "a:8", (5, 5, 5))


# The first view. -----------------------------------------------------------------------------------------------------


def test_the_first_view_waits_from_the_first_worker_on_and_exactly_so_long():
    world = World().happen(h.Begin(), *ready(A))
    world.now = 4.0
    world.happen(*ready(B))
    for now, view in ((4.9, ()), (5.0, (A, B))):
        world.now = now
        assert world.happen(h.Tick()).state.view == view


def test_after_all_have_died_the_next_view_waits_anew():
    world = running()
    world.now = 100.0
    world.happen(h.Deaths(tuple(h.Death(ref, "killed") for ref in (A, B, C))))
    world.happen(*ready("worker-0.1", "worker-1.1"))
    assert world.state.view == ()
    assert world.wait(5.0, "worker-0.1", "worker-1.1").state.view == ("worker-0.1", "worker-1.1")


def test_fewer_than_the_minimum_begin_no_view_though_nobody_else_is_on_the_way():
    world = World(dataclasses.replace(POLICY, workers=2)).happen(h.Begin(), *ready(A))
    world.happen(h.Death(B, "exit code 1"), h.Death("worker-1.1", "exit code 1"))
    assert (list(world.state.pending), world.state.view) == ([], ())
    assert world.wait(0.25, A).state.view == ()


def test_a_worker_that_is_about_to_leave_is_not_counted_for_the_first_view():
    world = World().happen(h.Begin(), *ready(A, B), h.Leaving(B)).wait(4.75, A, B)
    assert world.wait(0.25, A).state.view == ()
    begun = World().happen(h.Begin(), *ready(A, B), h.Leaving(B), *ready(C))
    assert begun.of(h.Publish)[0].reason == "2 of 3 are ready, no other is starting"


# Views and groups. ---------------------------------------------------------------------------------------------------


def test_a_view_is_written_whole():
    world = running()
    world.state.rotation, world.state.careful, world.state.died_at = 3, True, 9
    broken(world)
    assert logged(world, "VIEW") == [
        {"generation": 2, "members": [A, B, C], "cut_below": 2, "rotation": 3, "careful": True,
         "reason": f"{A} cannot use generation 1: reset by peer"}
    ]  # fmt: skip
    assert world.state.cut_below == 2


def test_survivors_keep_their_order_and_newcomers_come_behind_them():
    world = running().happen(h.Death(A, "killed")).enter(b=5, c=5).happen(*ready("worker-0.1"))
    assert world.state.view == (B, C, "worker-0.1")
    assert broken(world, ref=B).state.view == (B, C, "worker-0.1")
    assert world.state.generation == 4


def test_an_entry_of_a_worker_that_the_view_does_not_hold_opens_no_group_again():
    world = running().happen(h.Leaving(C)).enter(a=5, b=5)
    assert world.of(h.Release)
    world.happen(h.Entered(C, 2, 6))
    assert (world.of(h.Release), world.state.released, world.state.members[C].entered) == ([], True, None)


def test_a_group_takes_its_store_from_rank_0_and_its_state_from_whoever_is_furthest():
    world = World().happen(h.Begin(), *ready(A, B, C)).enter(a=-1, b=0, c=-1)
    (release,) = world.of(h.Release)
    assert (release.source, release.steps, release.checkpoint) == (1, (-1, 0, -1), "")
    assert (release.store, release.states[1]) == (f"{A}:1", f"{B}:2")


def test_a_state_of_no_step_is_a_state_and_no_checkpoint_takes_its_place():
    world = World().happen(h.Begin(), *ready(A, B, C))
    world.state.checkpoint, world.state.checkpoint_step = "/job/step-8", 8
    (release,) = world.enter(a=-1, b=0, c=-1).of(h.Release)
    assert (release.source, release.checkpoint) == (1, "")


def test_speeds_that_were_said_once_are_kept_by_who_has_measured_nothing_since():
    world = broken(running()).happen(h.Entered(A, 2, 5, 10.0), h.Entered(B, 2, 5, 20.0), h.Entered(C, 2, 5, 30.0))
    assert world.of(h.Release)[0].rates == (10.0, 20.0, 30.0)
    broken(world).happen(h.Entered(A, 3, 5, 0.0), h.Entered(B, 3, 5, 40.0), h.Entered(C, 3, 5, 0.0))
    assert world.of(h.Release)[0].rates == (10.0, 40.0, 30.0)


def test_what_the_survivors_had_not_applied_is_taken_back_in_the_log_before_they_go_on():
    world = broken(running(steps=7)).enter(a=6, b=4, c=5)
    assert logged(world, "TRUNCATE") == [{"steps": 6}]
    assert [type(action) for action in world.actions] == [h.Truncate, h.Release]
    assert broken(world).enter(a=6, b=6, c=6).rows == []


def test_a_group_that_cannot_be_used_is_cut_and_said_of_no_older_or_newer_one():
    world = running()
    for generation in (0, 2):
        assert broken(world, generation).state.generation == 1
    assert (broken(world).state.generation, world.state.cut_below) == (2, 2)


def test_while_a_view_of_just_enough_forms_newcomers_wait_for_it():
    world = running().happen(h.Death(C, "killed"), *ready("worker-2.1"))
    assert world.state.view == (A, B)
    world.enter(a=5, b=5)
    assert world.state.view == (A, B, "worker-2.1")


def test_who_has_left_for_good_is_not_called_back_when_the_others_die():
    world = running().happen(h.Scale(2, "asked for")).enter(a=6, b=6)
    assert world.state.members[C].left_at is not None
    world.happen(h.Deaths((h.Death(A, "killed"), h.Death(B, "killed"))))
    assert C not in world.state.view


def test_a_worker_that_wants_to_go_before_any_view_holds_it_is_not_needed():
    world = broken(running()).happen(h.Scale(4, "asked for"), *ready(D), h.Leaving(D), h.Tick())
    assert world.of(h.Kill) == [h.Kill(D, "not needed any more")]


def test_what_a_member_tried_in_one_group_is_no_vote_in_the_next():
    world = broken(running().happen(h.Trial(B, 17))).happen(h.Death(B, "killed by SIGSEGV"))
    assert world.state.suspects == {}


# Steps, pace and checkpoints. ----------------------------------------------------------------------------------------


def test_the_usual_step_is_timed_by_its_steps_and_not_by_reports_nor_by_regroups():
    world = running(steps=0)
    for step in (10, 20):
        world.now += 10.0
        world.happen(h.Heartbeat(A, step))
    assert world.state.usual_s == pytest.approx(1.0)
    broken(world)
    world.now += 600.0
    world.enter(a=20, b=20, c=20)
    world.now += 5.0
    world.happen(h.Heartbeat(A, 21))
    assert world.state.usual_s == pytest.approx(1.0), "nobody knows when the first step began"
    assert world.happen(h.Heartbeat(B, 15)).state.committed == 21, "a late report takes nothing back"


def saved(world: World, *checkpoints: tuple[int, str]) -> list[dict]:
    """The rows of these checkpoints."""
    rows = []
    for step, path in checkpoints:
        rows += logged(world.happen(h.Saved(A, step, path, "d")), "CKPT")
    return rows


def test_each_newest_checkpoint_is_written_and_the_same_step_may_be_saved_again():
    world = running(steps=30)
    assert saved(world, (20, "/a"), (20, "/b"), (19, "/c")) == [
        {"step": 20, "path": "/a", "digest": "d"},
        {"step": 20, "path": "/b", "digest": "d"},
    ]
    assert (world.state.checkpoint, world.state.checkpoint_step) == ("/b", 20)


def test_a_checkpoint_from_beyond_the_surviving_state_gives_way_to_an_older_step():
    world = running(steps=30)
    saved(world, (30, "/a"))
    broken(world).enter(a=20, b=20, c=20)
    assert saved(world, (25, "/b")) == [{"step": 25, "path": "/b", "digest": "d"}]


# Deaths and slots. ---------------------------------------------------------------------------------------------------


def early_deaths(world: World, slot: int, *incarnations: int) -> World:
    """Workers that die before a step of their own, far enough apart to be started again."""
    for incarnation in incarnations:
        world.happen(h.Death(f"worker-{slot}.{incarnation}", "exit code 1"))
        world.now += 31.0
        world.happen(*(h.Heartbeat(ref, world.state.committed) for ref in world.state.members), h.Tick())
    return world


def test_the_death_of_a_stranger_counts_for_nothing():
    world = running().happen(h.Death("worker-1.7", "exit code 1", failed=True))
    assert (world.actions, world.state.failures, world.state.crashes) == ((), {}, {})


def test_a_worker_that_has_applied_no_step_since_it_took_the_state_has_not_begun():
    world = broken(running(steps=5)).enter(a=5, b=5, c=5).happen(h.Death(B, "exit code 1"))
    assert world.state.failures == {}, "it had applied steps in an earlier group"
    world.happen(*ready("worker-1.1")).enter(a=5, c=5)
    entered(world, s0=5, s2=5, s1=-1).happen(h.Heartbeat("worker-1.1", 5), h.Death("worker-1.1", "exit code 1"))
    assert world.state.failures[1].count == 1


def test_a_worker_that_began_stays_one_that_has_when_its_group_goes_back():
    world = broken(running(steps=9)).enter(a=3, b=3, c=3).happen(h.Heartbeat(B, 4), h.Death(B, "exit code 1"))
    assert world.state.failures == {}


def test_a_step_of_its_own_makes_the_deaths_of_a_slot_begin_anew():
    world = World().happen(h.Begin(), *ready(A, C), h.Death(B, "exit code 1"))
    assert world.state.failures[1].count == 1
    world.happen(*ready("worker-1.1"))
    entered(world, s0=-1, s1=-1, s2=-1).happen(*(h.Heartbeat(ref, 3) for ref in world.state.view))
    world.happen(h.Death("worker-1.1", "killed"))
    assert world.state.failures == {}
    world.happen(h.Death("worker-1.2", "killed"))
    assert world.state.failures[1].count == 1


def test_the_death_of_a_worker_that_had_announced_its_departure_counts_against_no_slot():
    world = broken(running()).happen(h.Scale(4, "asked for"), *ready(D), h.Leaving(D), h.Death(D, "killed"))
    assert world.state.failures == {}


def test_a_slot_that_the_job_has_given_up_is_blamed_for_nothing():
    world = running().happen(h.Scale(2, "asked for"), h.Death(C, "exit code 3", failed=True))
    assert (world.state.failures, world.state.crashes) == ({}, {})


def crashing(world: World, ref: str, times: int) -> World:
    """The slot's workers step and fail, again and again."""
    slot, _, first = ref[7:].partition(".")
    for incarnation in range(int(first), int(first) + times):
        now = f"worker-{slot}.{incarnation}"
        world.state.members[now] = Member(ref=now, slot=int(slot), store="", seen_at=world.now, base=0, steps=1)
        world.happen(h.Death(now, "exit code 3", failed=True))
    return world


@pytest.mark.parametrize(("times", "shut"), [(5, False), (6, True)])
def test_twice_as_many_failures_as_a_slot_may_have_shut_it(times, shut):
    world = crashing(running(), B, times)
    assert (1 in world.state.quarantined) is shut
    assert [row["slot"] for row in logged(world, "QUARANTINE")] == [1] * shut


def test_a_slot_that_is_tried_again_after_its_quarantine_begins_with_a_clean_sheet():
    world = crashing(running(), B, 6).happen(h.Scale(3, "mended"))
    assert (world.state.quarantined, world.state.crashes.get(1)) == ({}, None)
    assert crashing(world, "worker-1.9", 5).state.quarantined == {}
    early = running(steps=5).happen(h.Death(B, "killed"))
    early.policy = dataclasses.replace(early.policy, quarantine_s=100.0)
    for incarnation in (1, 2, 3):
        early.enter(a=early.state.committed, c=early.state.committed).happen(h.Heartbeat(A, early.state.committed + 1))
        early_deaths(early, 1, incarnation)
    assert 1 in early.state.quarantined
    assert early.happen(h.Scale(3, "mended")).of(h.Start) == [h.Start(1, 4)]
    assert 1 not in early.state.failures


def test_slots_in_quarantine_beyond_those_that_the_job_has_are_not_missing():
    state = State(workers=2, quarantined={1: "died", 3: "died"})
    assert state.target_workers == 1


def test_a_slot_that_the_job_cannot_do_without_ends_it_when_it_is_shut():
    world = running()
    world.policy = dataclasses.replace(POLICY, min_workers=3)
    world.happen(h.Death(B, "killed"))
    for incarnation in (1, 2, 3):
        world.state.committed += 1
        early_deaths(world, 1, incarnation)
    assert world.state.phase == "failed"
    (failure,) = [action for action in world.all if isinstance(action, h.FailJob)]
    assert failure.code == "train"


def test_newcomers_that_are_not_ready_in_time_are_given_up():
    world = World().happen(h.Begin())
    for now, kills in ((180.0, []), (180.3, [A, B, C])):
        world.state.ticked_at, world.now = now - 0.25, now
        assert [kill.ref for kill in world.happen(h.Tick()).of(h.Kill)] == kills
    assert world.actions[0] == h.Kill(A, "not ready 180 s after its start")


def test_a_waiting_worker_of_a_slot_that_goes_is_killed_whether_it_was_ready_or_not():
    world = World().happen(h.Begin(), *ready(B), h.Scale(1, "asked for"))
    assert [kill.ref for kill in world.of(h.Kill)] == [C, B]
    assert world.state.pending.keys() | world.state.members.keys() == {A}
    assert World().happen(h.Begin(), h.Scale(2, "asked for")).of(h.Kill) == [
        h.Kill(C, "not needed: the job has 2 workers now")
    ]


def test_after_a_death_with_just_enough_left_replacements_wait_for_a_step_or_a_moment():
    def world_of(refill_s: float) -> World:
        world = World(MembershipPolicy(workers=3, min_workers=2, refill_s=refill_s)).happen(h.Begin(), *ready(A, B, C))
        return world.enter(a=-1, b=-1, c=-1).happen(h.Heartbeat(A, 5), h.Heartbeat(B, 5), h.Heartbeat(C, 5))

    world = world_of(0.5).happen(h.Death(C, "killed"))
    assert world.of(h.Start) == []
    assert world.happen(h.Heartbeat(A, 6)).of(h.Start) == [], "a step of the group before"
    world.now += 0.25
    assert world.happen(h.Tick()).of(h.Start) == []
    world.now += 0.25
    assert world.happen(h.Tick()).of(h.Start) == [h.Start(2, 1)]
    slow = world_of(0.5)
    slow.now += 1.0
    assert slow.happen(h.Heartbeat(A, 6), h.Death(C, "killed")).of(h.Start) == [h.Start(2, 1)], "a step has time for it"
    few = world_of(0.5).happen(h.Death(B, "killed"), h.Death(C, "killed"))
    assert few.of(h.Start) == [h.Start(1, 1), h.Start(2, 1)], "too few: the job stands until they are there"


# Stuck and stranded. -------------------------------------------------------------------------------------------------


def test_of_two_members_one_can_be_stuck_and_of_one_none():
    world = running()
    del world.state.members[C]
    for view, stuck in (((A, B), [B]), ((B,), [])):
        world.state.view = view
        world.happen(h.Heartbeat(A, 6, "waiting", 60.0), h.Heartbeat(B, 6, "computing", 60.0))
        assert [gone.ref for gone in health.find_overdue(world.state, world.now, POLICY)] == stuck


def test_who_has_not_been_let_go_into_a_group_is_not_stuck():
    world = broken(running().happen(*(h.Heartbeat(ref, 6) for ref in (A, B, C))))
    world.happen(
        h.Heartbeat(A, 6, "waiting", 60.0), h.Heartbeat(C, 6, "waiting", 60.0), h.Heartbeat(B, 6, "computing", 60.0)
    )
    assert world.happen(h.Tick()).of(h.Kill) == []


def test_a_view_that_has_cut_the_group_before_strands_nobody():
    world = broken(running().happen(h.Scale(4, "asked for"))).happen(h.Entered(A, 2, 5))
    world.wait(1.0, B, C, phase="waiting", phase_s=60.0)
    assert world.state.generation == 2


def test_silence_makes_a_lease_ten_times_as_long_at_most():
    assert health.lease(State(workers=2, silence_s=100.0), MembershipPolicy(workers=2, lease_s=3.0)) == 30.0


def test_what_a_master_that_stood_still_could_not_see_is_held_against_nobody():
    world = running().happen(h.Scale(2, "asked for")).enter(a=6, b=6)
    world.happen(h.Scale(3, "asked for"), h.Tick())
    assert "worker-2.1" not in world.state.pending, "its slot is taken"
    world.happen(h.Scale(4, "asked for"), h.Tick())
    world.now += 3600.0
    world.happen(h.Tick())
    assert world.of(h.Kill) == []
    assert world.state.members[C].left_at == world.state.pending[D] == world.now - 0.25


# Records. ------------------------------------------------------------------------------------------------------------


def test_a_record_that_is_set_aside_gets_no_further_votes():
    world = running()
    for ref in (A, B):
        world.happen(h.Suspect(ref, (17,), "odd")).enter(a=5, b=5, c=5)
    world.happen(h.Suspect(C, (17,), "odd"))
    assert logged(world, "POISON") == logged(world, "SUSPECT") == []
    assert list(world.state.suspects[17]) == [A, B]


def test_a_death_while_record_0_is_tried_is_a_vote_and_moves_the_records_on():
    world = running().happen(h.Trial(B, 0, "record 0 of x"), h.Death(B, "killed by SIGSEGV"))
    assert world.state.suspects == {0: {B: "killed by SIGSEGV while record 0 was tried"}}
    assert (world.state.rotation, world.state.failures) == (1, {})


def test_exactly_so_many_records_may_be_set_aside():
    world = World(MembershipPolicy(workers=3, set_aside=2, refill_s=0.0)).happen(h.Begin(), *ready(A, B, C))
    world.enter(a=-1, b=-1, c=-1)
    for ref in (A, B):
        world.happen(h.Suspect(ref, (1, 2), "odd")).enter(a=0, b=0, c=0)
    assert (sorted(world.state.set_aside), world.state.phase) == ([1, 2], "running")
    for ref in (A, B):
        world.happen(h.Suspect(ref, (3,), "odd"))
        world.enter(a=0, b=0, c=0)
    assert world.state.phase == "failed"


def test_care_lasts_until_a_step_is_applied():
    world = running()
    world.state.careful, world.state.died_at = True, world.state.committed
    assert world.wait(2.0, A, B, C).state.generation == 1
    world.happen(h.Heartbeat(A, 6), h.Tick())
    assert (world.state.generation, world.state.careful, world.state.cut_below) == (2, False, 1)
    assert world.of(h.Publish)[0].reason == "a step was applied: records are tried together again"


# Whole decisions: every action with its reason, and what the state is then. ------------------------------------------


def decided(world: World, event: h.Event) -> list[h.Action]:
    """The actions of `event` in their order, rows included."""
    return members.decide(world.state, event, world.now, world.policy)


def view_row(generation: int, members: list[str], cut_below: int, reason: str, **changes: object) -> h.Log:
    body = {"generation": generation, "members": members, "cut_below": cut_below, "rotation": 0, "careful": False}
    return h.Log("VIEW", {**body, "reason": reason, **changes})


def test_what_died_while_the_master_was_away_is_given_up_with_that_reason():
    world = running()
    world.now = 50.0
    why = f"{B} is gone: died while the master was away"
    assert decided(world, h.Begin(frozenset({A, C, D}), launch=False)) == [
        view_row(2, [A, C], 2, why), h.Publish(why), h.Log("START", {"ref": "worker-1.1"}), h.Start(1, 1),
    ]  # fmt: skip
    assert world.state.pending == {D: 50.0, "worker-1.1": 50.0}


def test_a_launch_over_an_old_state_begins_with_nothing_but_the_counted_incarnations():
    world = running().happen(h.Begin())
    world.state.quarantined = {1: "died"}
    world.now = 9.0
    started = [f"worker-{slot}.2" for slot in range(3)]
    assert decided(world, h.Begin()) == [
        h.Log("LAUNCH", {"workers": 3}), *(h.Log("START", {"ref": ref}) for ref in started),
        *(h.Start(slot, 2) for slot in range(3)),
    ]  # fmt: skip
    state = world.state
    assert (state.phase, state.view, state.members, state.failures, state.quarantined) == ("gathering", (), {}, {}, {})
    assert (state.awaited, state.unfinished, state.pending) == (set(), set(), dict.fromkeys(started, 9.0))


def test_a_newcomer_is_entered_whole_and_joins_by_a_planned_view():
    world = running().happen(h.Death(B, "killed")).enter(a=5, c=5)
    world.now = 42.0
    assert decided(world, h.Ready("worker-1.1", "b:2", "b:3")) == [
        view_row(3, [A, C, "worker-1.1"], 2, "worker-1.1 joins"), h.Publish("worker-1.1 joins"),
    ]  # fmt: skip
    assert world.state.members["worker-1.1"] == Member(
        ref="worker-1.1", slot=1, store="b:2", state="b:3", seen_at=42.0, rank=2, joined=True
    )
    assert "worker-1.1" not in world.state.pending


def test_several_that_join_and_leave_at_once_are_named_in_the_reason():
    world = running().happen(h.Scale(5, "asked for"))
    world.state.released = False
    world.happen(*ready(D, "worker-4.0"))
    world.state.members[A].leaving = world.state.members[B].leaving = True
    world.state.released = True
    reason = f"{A} and {B} leave and {D} and worker-4.0 join"
    assert decided(world, h.Tick()) == [view_row(2, [C, D, "worker-4.0"], 1, reason), h.Publish(reason)]
    for ref in (A, B):
        left = world.state.members[ref]
        assert (left.rank, left.entered, left.trying, left.left, left.left_at) == (-1, None, -1, True, None)


@pytest.mark.parametrize(("steps", "leaves"), [(-1, False), (0, True), (1, True)])
def test_who_goes_waits_until_another_member_has_the_state_be_it_of_no_step(steps, leaves):
    world = running()
    world.state.members[B].steps = world.state.members[C].steps = -1
    world.state.members[A].steps = steps
    happened = decided(world, h.Leaving(C))
    assert bool(happened) is leaves
    assert world.state.view == ((A, B) if leaves else (A, B, C))


@pytest.mark.parametrize(("steps", "view"), [(-1, (A, B, C)), (0, (A, B))])
def test_in_a_forced_view_who_goes_stays_unless_another_has_the_state_be_it_of_no_step(steps, view):
    world = running()
    for ref in (A, B):
        world.state.members[ref].steps = steps
    world.state.members[C].leaving = True
    assert broken(world).state.view == view


@pytest.mark.parametrize(
    ("steps", "view"), [((0, 5, 5), (A,)), ((-1, 0, 5), (B,)), ((-1, -1, 1), (C,)), ((-1, -1, -1), (A, B, C))]
)
def test_when_all_go_the_first_that_has_the_state_stays_alone_be_it_of_no_step(steps, view):
    world = running()
    for ref, of in zip((A, B, C), steps, strict=True):
        world.state.members[ref].steps, world.state.members[ref].leaving = of, True
    assert world.happen(h.Tick()).state.view == view


def test_where_one_has_left_already_none_of_those_who_go_is_called_to_stay():
    world = running().happen(h.Leaving(A)).enter(b=6, c=6)
    assert world.state.members[A].left
    world.state.members[B].leaving = world.state.members[C].leaving = True
    world.state.pending.clear()
    assert decided(world, h.Tick()) == [], "the slot of A is filled when A has ended"
    assert world.state.view == (B, C)


def test_the_first_view_is_forced_and_says_why_it_forms_without_all():
    for refs, now, reason in (
        ((A, B, C), 0.0, "all are ready"), ((A, B), 5.0, "2 of 3 are ready after 5 s"),
    ):  # fmt: skip
        world = World().happen(h.Begin(), *ready(*refs[:-1]))
        happened = decided(world, *ready(refs[-1]))
        world.now = now
        assert (happened or decided(world, h.Tick())) == [view_row(1, list(refs), 1, reason), h.Publish(reason)]
        assert (world.state.phase, world.state.gathering_since) == ("running", None)
    world = World().happen(h.Begin(), *ready(A, B))
    world.happen(h.Death(C, "exit code 1"), h.Death("worker-2.1", "exit code 1"))
    reason = "2 of 3 are ready, no other is starting"
    assert decided(world, h.Tick()) == [view_row(1, [A, B], 1, reason), h.Publish(reason)]


def test_a_job_that_lost_its_state_fails_with_the_step_that_it_had():
    world = World().happen(h.Begin(), *ready(A, B, C))
    world.state.committed = 9
    world.enter(a=-1, b=-1)
    assert decided(world, h.Entered(C, 1, -1)) == [
        h.FailJob("state_lost", "every process that held the state of step 9 is gone and there is no checkpoint")
    ]
    assert (world.state.phase, world.state.released) == ("failed", False)


def test_a_group_is_let_go_with_all_that_its_members_need_and_the_log_goes_back_first():
    world = World().happen(h.Begin(), *ready(A, B, C))
    world.state.committed, world.state.checkpoint, world.state.checkpoint_step = 9, "/job/step-8", 8
    world.state.stepped_at = 3.0
    world.happen(h.Entered(A, 1, -1, 10.0), h.Entered(B, 1, -1))
    assert decided(world, h.Entered(C, 1, -1, 30.0)) == [
        h.Log("TRUNCATE", {"steps": 8}), h.Truncate(8),
        h.Release(0, (-1, -1, -1), "/job/step-8", f"{A}:1", (f"{A}:2", f"{B}:2", f"{C}:2"), (10.0, 0.0, 30.0)),
    ]  # fmt: skip
    assert (world.state.released, world.state.committed, world.state.stepped_at) == (True, 8, None)
    assert [member.base for member in world.state.members.values()] == [8, 8, 8]


def test_a_step_of_the_survivors_starts_replacements_up_to_the_moment_at_which_time_does():
    for now, started in ((99.0, [h.Start(2, 1)]), (100.0, [])):
        world = running()
        del world.state.members[C]
        world.state.view, world.state.fill_at, world.now = (A, B), 100.0, now
        assert [act for act in decided(world, h.Heartbeat(A, 6)) if isinstance(act, h.Start)] == started
        assert world.state.fill_at == (99.0 if started else 100.0)


def test_a_first_step_that_fills_slots_lets_those_leave_who_waited_for_the_state_as_well():
    world = World().happen(h.Begin(), *ready(A, B, C)).enter(a=-1, b=-1, c=-1).happen(h.Leaving(C))
    assert world.state.view == (A, B, C)
    world.state.fill_at = 100.0
    assert decided(world, h.Heartbeat(A, 1)) == [view_row(2, [A, B], 1, f"{C} leaves"), h.Publish(f"{C} leaves")]


def test_a_scale_is_written_whole_fills_slots_at_its_moment_and_gathers_with_those_it_has():
    world = running()
    world.now = 7.0
    assert decided(world, h.Scale(4, "asked for")) == [
        h.Log("SCALE", {"workers": 4, "before": 3, "again": True, "why": "asked for"}),
        h.Log("START", {"ref": D}), h.Start(3, 0),
    ]  # fmt: skip
    assert world.state.pending == {D: 7.0}
    world = World().happen(h.Begin(), *ready(A, B))
    assert decided(world, h.Scale(2, "enough")) == [
        h.Log("SCALE", {"workers": 2, "before": 3, "again": False, "why": "enough"}),
        h.Kill(C, "not needed: the job has 2 workers now"),
        view_row(1, [A, B], 1, "all are ready"), h.Publish("all are ready"),
    ]  # fmt: skip


def test_who_is_given_up_is_named_with_the_time_that_it_took():
    world = running()
    world.now = 1000.0
    found = world.state.members
    found[A].seen_at, found[B].seen_at, found[C].seen_at = 990.0, 989.9, 1000.0
    world.state.pending = {D: 820.0, "worker-4.0": 819.0}
    assert health.find_overdue(world.state, 1000.0, POLICY) == [
        h.Death(B, "silent for 10.1 s"), h.Death("worker-4.0", "not ready 181 s after its start"),
    ]  # fmt: skip
    found[B].seen_at, found[C].rank, found[C].left_at = 1000.0, -1, 940.0
    world.state.pending = {}
    assert health.find_overdue(world.state, 1000.0, POLICY) == []
    found[C].left_at = 939.0
    assert health.find_overdue(world.state, 1000.0, POLICY) == [
        h.Death(C, "still there 61 s after the others continued")
    ]


def test_strangers_among_the_dead_do_not_hide_the_others():
    world = running()
    why = f"{B} and {C} are gone: killed"
    world.policy = dataclasses.replace(POLICY, min_workers=1)
    happened = decided(world, h.Deaths((h.Death("worker-9.9", "x"), h.Death(B, "killed"), h.Death(C, "exit code 1"))))
    assert happened == [
        view_row(2, [A], 2, why), h.Publish(why), h.Log("START", {"ref": "worker-1.1"}),
        h.Log("START", {"ref": "worker-2.1"}), h.Start(1, 1), h.Start(2, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(("died", "waits"), [((C,), True), ((B, C), False)])
def test_replacements_wait_where_just_the_minimum_is_left_and_not_below_it(died, waits):
    world = running()
    world.policy, world.now = dataclasses.replace(POLICY, refill_s=0.5), 20.0
    happened = decided(world, h.Deaths(tuple(h.Death(ref, "killed") for ref in died)))
    assert any(isinstance(action, h.Start) for action in happened) is not waits
    assert world.state.fill_at == (20.5 if waits else 0.0)


def test_a_death_before_a_step_delays_the_slot_from_the_second_on():
    world = World().happen(h.Begin())
    world.now, world.state.committed = 100.0, 4
    found = []
    for incarnation in (0, 1):
        world.happen(h.Death(f"worker-1.{incarnation}", "exit code 1"))
        found.append(world.state.failures[1])
        world.state.committed += 1
    assert found == [Failures(1, 4, 100.0), Failures(2, 4, 100.5)]
    assert [MembershipPolicy(workers=1).delay_s(count) for count in range(11)] == [
        0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0,
    ]  # fmt: skip


def test_a_slot_whose_workers_never_step_ends_a_job_that_stands_with_its_reason():
    world = World().happen(h.Begin())
    for incarnation in (0, 1):
        world.happen(h.Death(f"worker-1.{incarnation}", "exit code 1"))
        world.now += 10.0
        world.happen(h.Tick())
    why = "worker slot 1 died 3 times in a row before its first step; last: exit code 7"
    assert decided(world, h.Death("worker-1.2", "exit code 7")) == [h.FailJob("train", why)]
    assert world.state.phase == "failed"


@pytest.mark.parametrize(("others", "shut"), [(2, True), (3, False)])
def test_a_slot_is_shut_when_it_fails_more_than_twice_as_often_as_all_others(others, shut):
    world = running()
    world.now = 700.0
    world.state.crashes = {0: [650.0] * others, 1: [640.0, 650.0, 660.0, 670.0, 680.0], 2: [100.0]}
    world.state.members[B].base = 0
    happened = decided(world, h.Death(B, "exit code 3", failed=True))
    why = f"worker slot 1 failed 6 times in 60 s, all others {others} times; last: exit code 3"
    row = h.Log("QUARANTINE", {"slot": 1, "worker": B, "why": why, "times": 1, "retry_s": 30.0})
    assert [action for action in happened if action == row] == [row] * shut
    assert world.state.crashes.keys() == ({0} if shut else {0, 1})
    assert world.state.quarantined == ({1: why} if shut else {})


@pytest.mark.parametrize(("workers", "least", "shut"), [(1, 0, False), (2, 0, True), (2, 1, True), (2, 2, False)])
def test_a_slot_that_crashes_is_shut_where_the_minimum_and_at_least_one_is_left(workers, least, shut):
    world = World(MembershipPolicy(workers=workers, min_workers=least)).happen(h.Begin())
    world.state.phase = "running"
    world.state.crashes = {0: [0.0] * 5}
    world.state.members[A] = Member(ref=A, slot=0, store="", seen_at=0.0, base=0, steps=1)
    world.happen(h.Death(A, "exit code 3", failed=True))
    assert bool(world.state.quarantined) is shut


@pytest.mark.parametrize(("usual_s", "patience_s"), [(0.0, 10.0), (1.0, 10.0), (1.05, 10.5), (4.0, 40.0)])
def test_a_member_is_stuck_after_ten_usual_steps_or_ten_seconds(usual_s, patience_s):
    for over_s, stuck in ((0.0, []), (0.1, [B])):
        world = running()
        world.state.usual_s = usual_s
        world.happen(h.Heartbeat(A, 6, "waiting", patience_s / 2), h.Heartbeat(C, 6, "waiting", 99.0))
        world.happen(h.Heartbeat(B, 6, "computing", patience_s + over_s))
        world.state.usual_s = usual_s
        assert [gone.ref for gone in health.find_overdue(world.state, world.now, POLICY)] == stuck
    usual = f"the usual step takes {usual_s:.3g} s"
    why = f"stuck: computing for {patience_s + 0.1:.1f} s while all others wait; {usual}"
    assert health.find_overdue(world.state, world.now, POLICY) == [h.Death(B, why)]


@pytest.mark.parametrize(
    ("before", "expected"), [(0.0, 0.0), (1.0, 0.99), (10.0, 9.9), (100 / 3, 33.0), (34.0, 33.0), (3600.0, 33.0)]
)
def test_a_tick_makes_the_longest_silence_a_little_shorter_and_never_leaves_more_than_its_use(before, expected):
    state = State(workers=2, silence_s=before)
    health.forgive(state, 1.0, POLICY)
    assert (state.silence_s, state.ticked_at) == (pytest.approx(expected), 1.0)


@pytest.mark.parametrize(("now", "late"), [(10.25, 0.0), (10.5, 0.0), (11.25, 1.0), (60.0, 49.75)])
def test_a_late_tick_puts_off_all_deadlines_by_what_it_was_late_but_not_beyond_the_moment(now, late):
    state = State(workers=2, ticked_at=10.0, pending={D: 3.0, "worker-4.0": 59.0})
    for ref, left_at in ((A, None), (B, 2.0), (C, 59.5)):
        state.members[ref] = Member(ref=ref, slot=0, store="", seen_at=5.0, left_at=left_at)
    health.forgive(state, now, POLICY)
    assert [member.seen_at for member in state.members.values()] == [min(now, 5.0 + late)] * 3
    later = [None, min(now, 2.0 + late), min(now, 59.5 + late) if late else 59.5]
    assert [member.left_at for member in state.members.values()] == later
    assert state.pending == {D: min(now, 3.0 + late), "worker-4.0": min(now, 59.0 + late) if late else 59.0}


def test_votes_are_written_whole_cut_to_their_length_and_the_last_one_too_many_ends_the_job():
    world = World(MembershipPolicy(workers=3, set_aside=1)).happen(h.Begin(), *ready(A, B, C)).enter(a=-1, b=-1, c=-1)
    state, policy = world.state, world.policy
    assert poison.accuse(state, [1, 2, 3], A, "x" * 301, policy, "y" * 301) == [
        h.Log("SUSPECT", {"record": record, "worker": A, "why": "x" * 300, "where": "y" * 300}) for record in (1, 2, 3)
    ]
    state.places[2] = ""
    assert poison.accuse(state, [1], A, "again", policy) == []
    first, second = (f"{A}: {'x' * 300}; {B}: {why}" for why in ("odd", "even"))
    assert poison.accuse(state, [1], B, "odd", policy) == [
        h.Log("POISON", {"record": 1, "why": first, "where": "y" * 300})
    ]
    too_many = "2 records failed wherever they went, 1 may be set aside"
    alike = f"2 records, the first is record 1 ({'y' * 300}): {first}"
    assert poison.accuse(state, [1, 2, 3], B, "even", policy) == [
        h.Log("POISON", {"record": 2, "why": second, "where": ""}),
        h.FailJob("poison", f"{too_many}: {alike}"),
    ]
    assert (state.phase, list(state.set_aside), list(state.suspects[3])) == ("failed", [1, 2], [A])


def test_a_vote_without_a_place_is_written_with_an_empty_one():
    state = State(workers=2)
    assert poison.accuse(state, [4], A, "odd", POLICY) == [
        h.Log("SUSPECT", {"record": 4, "worker": A, "why": "odd", "where": ""})
    ]
    assert state.places == {4: ""}


def test_a_vote_says_in_the_view_which_records_failed_or_were_set_aside():
    world = running()
    for event, reason in (
        (h.Suspect(A, (3, 17), "odd"), f"records 3 and 17 failed at {A}"),
        (h.Suspect(A, (5,), "odd"), f"record 5 failed at {A}"),
        (h.Suspect(B, (3, 5), "odd"), "records 3 and 5 set aside"),
        (h.Suspect(B, (17, 18), "odd"), "record 17 set aside"),
    ):
        happened = decided(world, event)
        generation = world.state.generation
        assert happened[-2:] == [
            view_row(generation, [A, B, C], generation, reason, rotation=generation - 1), h.Publish(reason),
        ]  # fmt: skip
        world.enter(a=5, b=5, c=5)


def test_what_is_set_aside_is_reported_in_order_with_an_empty_place_where_none_is_known():
    state = State(workers=2, set_aside={9: "odd", 4: "even"}, places={4: "record 4 of x"})
    assert state.list_set_aside() == [
        {"record": 4, "where": "record 4 of x", "why": "even"}, {"record": 9, "where": "", "why": "odd"},
    ]  # fmt: skip


def test_many_records_that_fail_for_one_reason_within_a_few_steps_end_the_job_with_that_reason_once():
    world = World(MembershipPolicy(workers=3)).happen(h.Begin(), *ready(A, B, C)).enter(a=-1, b=-1, c=-1)
    state, policy = world.state, world.policy

    def fail(record, why="DataError: column 'x' has {} records without a value"):
        actions = poison.accuse(state, [record], A, why.format(record), policy)
        return actions + poison.accuse(state, [record], B, why.format(record), policy)

    for record in range(9):
        assert not any(isinstance(action, h.FailJob) for action in fail(record))
    assert not any(isinstance(action, h.FailJob) for action in fail(50, "OSError: torn")), "another reason"
    state.committed += 200
    assert not any(isinstance(action, h.FailJob) for action in fail(51)), "the others are long ago"
    state.committed -= 100
    end = fail(52)[-1]
    assert isinstance(end, h.FailJob)
    assert "10 records failed for one reason within" in end.why
    assert end.why.count("without a value") == 1
