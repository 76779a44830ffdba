"""Promises of membership at its edges: exact bounds, what is reset when, what is ignored, what is written."""

import dataclasses

import pytest

from trueline.train import happenings as h
from trueline.train import health
from trueline.train.journal import apply
from trueline.train.roster import Member, Policy, State
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
    for event in (h.Gone(A, "killed"), h.Tick(), h.Scale(5, "x"), h.Ready("worker-9.9", "x:1"), h.Done(A, 1)):
        world.happen(event)
        assert (world.actions, world.rows) == ((), [])
    assert (world.state.generation, world.state.workers) == (1, 3)


def test_a_job_is_finished_once_all_members_of_its_newest_view_are_done():
    world = broken(running())
    world.happen(h.Done(A, 1), h.Done(B, 1), h.Done(C, 1))
    assert (world.of(h.Finish), world.state.finishing, world.state.phase) == ([], False, "running")
    entered(world, s0=5, s1=5, s2=5).happen(h.Done(A, 2), h.Done(A, 2), h.Done(B, 2))
    assert world.state.phase == "running"
    world.happen(h.Done(C, 2))
    assert (world.of(h.Finish), world.state.phase) == ([h.Finish()], "finished")


def test_who_is_not_of_the_view_has_no_word_at_the_finish():
    world = running().happen(h.Leaving(C))
    world.happen(h.Done(C, world.state.generation))
    assert not world.state.finishing


# Beginnings. ---------------------------------------------------------------------------------------------------------


def test_a_launch_writes_its_number_of_workers_and_a_master_that_only_comes_back_does_not():
    world = World().happen(h.Begin())
    assert logged(world, "LAUNCH") == [{"workers": 3}]
    world.state.workers = 5
    assert logged(world.happen(h.Begin(launch=False)), "LAUNCH") == []
    assert world.state.workers == 5


def test_a_launch_forgets_how_often_slots_died_before():
    world = World().happen(h.Begin(), h.Gone(A, "exit code 1"), h.Gone("worker-0.1", "exit code 1"))
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
    apply(world.state, "VIEW", {"generation": 4, "members": list(members), "cut_below": 4}, 0.0)
    return world.happen(h.Begin(frozenset(members), launch=False))


def test_a_view_that_is_entered_again_after_the_masters_death_is_released_when_all_have_and_its_store_is_known():
    world = came_back(A, B, C)
    for ref in (A, B, C):
        assert world.happen(h.Entered(ref, 4, 5)).of(h.Release) == []
    assert not world.state.released
    (release,) = world.happen(h.Ready(A, "a:9", "a:8")).of(h.Release)
    assert (release.store, release.state, release.steps) == ("a:9", "a:8", (5, 5, 5))


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
    world.happen(h.Lost(tuple(h.Gone(ref, "killed") for ref in (A, B, C))))
    world.happen(*ready("worker-0.1", "worker-1.1"))
    assert world.state.view == ()
    assert world.wait(5.0, "worker-0.1", "worker-1.1").state.view == ("worker-0.1", "worker-1.1")


def test_fewer_than_the_minimum_begin_no_view_though_nobody_else_is_on_the_way():
    world = World(dataclasses.replace(POLICY, workers=2)).happen(h.Begin(), *ready(A))
    world.happen(h.Gone(B, "exit code 1"), h.Gone("worker-1.1", "exit code 1"))
    assert (list(world.state.pending), world.state.view) == ([], ())
    assert world.wait(0.25, A).state.view == ()


def test_a_worker_that_is_about_to_leave_is_not_counted_for_the_first_view():
    world = World().happen(h.Begin(), *ready(A, B), h.Leaving(B)).wait(4.75, A, B)
    assert world.wait(0.25, A).state.view == ()
    begun = World().happen(h.Begin(), *ready(A, B), h.Leaving(B), *ready(C))
    assert begun.of(h.Publish)[0].reason == "2 of 3 are ready, nobody else is on the way"


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
    world = running().happen(h.Gone(A, "killed")).enter(b=5, c=5).happen(*ready("worker-0.1"))
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
    assert (release.store, release.state) == (f"{A}:1", f"{B}:2")


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
    world = running().happen(h.Gone(C, "killed"), *ready("worker-2.1"))
    assert world.state.view == (A, B)
    world.enter(a=5, b=5)
    assert world.state.view == (A, B, "worker-2.1")


def test_who_has_left_for_good_is_not_called_back_when_the_others_die():
    world = running().happen(h.Scale(2, "asked for")).enter(a=6, b=6)
    assert world.state.members[C].left_at is not None
    world.happen(h.Lost((h.Gone(A, "killed"), h.Gone(B, "killed"))))
    assert C not in world.state.view


def test_a_worker_that_wants_to_go_before_any_view_holds_it_is_not_needed():
    world = broken(running()).happen(h.Scale(4, "asked for"), *ready(D), h.Leaving(D), h.Tick())
    assert world.of(h.Kill) == [h.Kill(D, "not needed any more")]


def test_what_a_member_tried_in_one_group_is_no_vote_in_the_next():
    world = broken(running().happen(h.Trying(B, 17))).happen(h.Gone(B, "killed by SIGSEGV"))
    assert world.state.suspects == {}


# Steps, pace and checkpoints. ----------------------------------------------------------------------------------------


def test_the_usual_step_is_timed_by_its_steps_and_not_by_reports_nor_by_regroups():
    world = running(steps=0)
    for step in (10, 20):
        world.now += 10.0
        world.happen(h.Heard(A, step))
    assert world.state.usual_s == pytest.approx(1.0)
    broken(world)
    world.now += 600.0
    world.enter(a=20, b=20, c=20)
    world.now += 5.0
    world.happen(h.Heard(A, 21))
    assert world.state.usual_s == pytest.approx(1.0), "nobody knows when the first step began"
    assert world.happen(h.Heard(B, 15)).state.committed == 21, "a late report takes nothing back"


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
        world.happen(h.Gone(f"worker-{slot}.{incarnation}", "exit code 1"))
        world.now += 31.0
        world.happen(*(h.Heard(ref, world.state.committed) for ref in world.state.members), h.Tick())
    return world


def test_the_death_of_a_stranger_counts_for_nothing():
    world = running().happen(h.Gone("worker-1.7", "exit code 1", failed=True))
    assert (world.actions, world.state.failures, world.state.crashes) == ((), {}, {})


def test_a_worker_that_has_applied_no_step_since_it_took_the_state_has_not_begun():
    world = broken(running(steps=5)).enter(a=5, b=5, c=5).happen(h.Gone(B, "exit code 1"))
    assert world.state.failures == {}, "it had applied steps in an earlier group"
    world.happen(*ready("worker-1.1")).enter(a=5, c=5)
    entered(world, s0=5, s2=5, s1=-1).happen(h.Heard("worker-1.1", 5), h.Gone("worker-1.1", "exit code 1"))
    assert world.state.failures[1].count == 1


def test_a_worker_that_began_stays_one_that_has_when_its_group_goes_back():
    world = broken(running(steps=9)).enter(a=3, b=3, c=3).happen(h.Heard(B, 4), h.Gone(B, "exit code 1"))
    assert world.state.failures == {}


def test_a_step_of_its_own_makes_the_deaths_of_a_slot_begin_anew():
    world = World().happen(h.Begin(), *ready(A, C), h.Gone(B, "exit code 1"))
    assert world.state.failures[1].count == 1
    world.happen(*ready("worker-1.1"))
    entered(world, s0=-1, s1=-1, s2=-1).happen(*(h.Heard(ref, 3) for ref in world.state.view))
    world.happen(h.Gone("worker-1.1", "killed"))
    assert world.state.failures == {}
    world.happen(h.Gone("worker-1.2", "killed"))
    assert world.state.failures[1].count == 1


def test_the_death_of_a_worker_that_had_announced_its_departure_counts_against_no_slot():
    world = broken(running()).happen(h.Scale(4, "asked for"), *ready(D), h.Leaving(D), h.Gone(D, "killed"))
    assert world.state.failures == {}


def test_a_slot_that_the_job_has_given_up_is_blamed_for_nothing():
    world = running().happen(h.Scale(2, "asked for"), h.Gone(C, "exit code 3", failed=True))
    assert (world.state.failures, world.state.crashes) == ({}, {})


def crashing(world: World, ref: str, times: int) -> World:
    """The slot's workers step and fail, again and again."""
    slot, _, first = ref[7:].partition(".")
    for incarnation in range(int(first), int(first) + times):
        now = f"worker-{slot}.{incarnation}"
        world.state.members[now] = Member(ref=now, slot=int(slot), store="", seen_at=world.now, base=0, steps=1)
        world.happen(h.Gone(now, "exit code 3", failed=True))
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
    early = running(steps=5).happen(h.Gone(B, "killed"))
    for incarnation in (1, 2, 3):
        early.enter(a=early.state.committed, c=early.state.committed).happen(h.Heard(A, early.state.committed + 1))
        early_deaths(early, 1, incarnation)
    assert 1 in early.state.quarantined
    assert early.happen(h.Scale(3, "mended")).of(h.Start) == [h.Start(1, 4)]
    assert 1 not in early.state.failures


def test_slots_in_quarantine_beyond_those_that_the_job_has_are_not_missing():
    state = State(workers=2, quarantined={1: "died", 3: "died"})
    assert state.wanted == 1


def test_a_slot_that_the_job_cannot_do_without_ends_it_when_it_is_shut():
    world = running()
    world.policy = dataclasses.replace(POLICY, min_workers=3)
    world.happen(h.Gone(B, "killed"))
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
        world = World(Policy(workers=3, min_workers=2, refill_s=refill_s)).happen(h.Begin(), *ready(A, B, C))
        return world.enter(a=-1, b=-1, c=-1).happen(h.Heard(A, 5), h.Heard(B, 5), h.Heard(C, 5))

    world = world_of(0.5).happen(h.Gone(C, "killed"))
    assert world.of(h.Start) == []
    assert world.happen(h.Heard(A, 6)).of(h.Start) == [], "a step of the group before"
    world.now += 0.25
    assert world.happen(h.Tick()).of(h.Start) == []
    world.now += 0.25
    assert world.happen(h.Tick()).of(h.Start) == [h.Start(2, 1)]
    few = world_of(0.5).happen(h.Gone(B, "killed"), h.Gone(C, "killed"))
    assert few.of(h.Start) == [h.Start(1, 1), h.Start(2, 1)], "too few: the job stands until they are there"


# Stuck and stranded. -------------------------------------------------------------------------------------------------


def test_who_has_not_been_let_go_into_a_group_is_not_stuck():
    world = broken(running().happen(*(h.Heard(ref, 6) for ref in (A, B, C))))
    world.happen(h.Heard(A, 6, "waiting", 60.0), h.Heard(C, 6, "waiting", 60.0), h.Heard(B, 6, "computing", 60.0))
    assert world.happen(h.Tick()).of(h.Kill) == []


def test_a_view_that_has_cut_the_group_before_strands_nobody():
    world = broken(running().happen(h.Scale(4, "asked for"))).happen(h.Entered(A, 2, 5))
    world.wait(1.0, B, C, phase="waiting", phase_s=60.0)
    assert world.state.generation == 2


def test_silence_makes_a_lease_ten_times_as_long_at_most():
    assert health.lease(State(workers=2, silence_s=100.0), Policy(workers=2, lease_s=3.0)) == 30.0


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
    world = running().happen(h.Trying(B, 0, "record 0 of x"), h.Gone(B, "killed by SIGSEGV"))
    assert world.state.suspects == {0: {B: "killed by SIGSEGV while record 0 was tried"}}
    assert (world.state.rotation, world.state.failures) == (1, {})


def test_exactly_so_many_records_may_be_set_aside():
    world = World(Policy(workers=3, set_aside=2, refill_s=0.0)).happen(h.Begin(), *ready(A, B, C))
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
    world.happen(h.Heard(A, 6), h.Tick())
    assert (world.state.generation, world.state.careful, world.state.cut_below) == (2, False, 1)
    assert world.of(h.Publish)[0].reason == "a step was applied: records are tried together again"
