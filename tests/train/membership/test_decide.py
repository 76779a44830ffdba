"""Promises of the pure membership decisions; time is a number that the test moves."""

from hypothesis import given
from hypothesis import strategies as st

from trueline.train.membership import events as h
from worlds.membership import POLICY, A, B, C, World, running


def test_a_job_starts_one_worker_for_each_slot():
    world = World().happen(h.Begin())
    assert world.actions == (h.Start(0, 0), h.Start(1, 0), h.Start(2, 0))
    assert world.happen(h.Begin(frozenset(world.state.pending), launch=False)).actions == ()


def test_the_first_view_waits_until_all_workers_are_ready():
    world = World().happen(h.Begin(), h.Ready(A, "a:1"), h.Ready(B, "b:1"))
    assert world.state.view == ()
    assert world.happen(h.Ready(C, "c:1")).state.view == (A, B, C)


def test_the_first_view_forms_with_enough_workers_when_the_others_are_too_slow():
    world = World().happen(h.Begin(), h.Ready(A, "a:1"), h.Ready(B, "b:1")).wait(5.0, A, B)
    assert world.state.view == (A, B)
    assert world.of(h.Publish)[0].reason == "2 of 3 are ready after 5 s"


def test_a_group_is_released_only_when_every_member_has_entered():
    world = World().happen(h.Begin(), h.Ready(A, "a:1"), h.Ready(B, "b:1"), h.Ready(C, "c:1"))
    assert world.enter(a=-1, b=-1).of(h.Release) == []
    assert world.enter(c=-1).releases() == [(0, (-1, -1, -1))]


def test_a_death_forces_a_view_of_the_survivors_and_starts_a_replacement():
    world = running().happen(h.Death(B, "killed by SIGKILL"))
    assert world.state.view == (A, C)
    assert world.state.cut_below == world.state.generation == 2
    assert world.actions == (h.Publish(f"{B} is gone: killed by SIGKILL"), h.Start(1, 1))


def test_the_member_that_is_furthest_ahead_is_the_source_of_the_state():
    world = running().happen(h.Death(B, "killed")).enter(a=5, c=6)
    assert world.releases() == [(1, (5, 6))]
    assert world.state.committed == 6


def test_the_log_follows_the_survivors_when_they_have_applied_less_than_it_says():
    world = running(steps=7).happen(h.Death(B, "killed")).enter(a=6, c=6)
    assert (world.of(h.Truncate), world.releases()) == ([h.Truncate(6)], [(0, (6, 6))])
    assert world.state.committed == 6


def test_a_join_is_planned_and_cuts_nobody():
    world = running().happen(h.Death(B, "killed")).enter(a=5, c=5)
    cut = world.state.cut_below
    world.happen(h.Ready("worker-1.1", "b:2"))
    assert world.state.view == (A, C, "worker-1.1")
    assert (world.state.generation, world.state.cut_below) == (3, cut)


def test_an_announced_departure_is_planned_cuts_nobody_and_is_replaced_when_it_is_complete():
    world = running().happen(h.Leaving(A))
    assert (world.state.view, world.state.cut_below) == ((B, C), 1)
    world.enter(b=6, c=6).happen(h.Death(A, "exit code 0"))
    assert world.state.view == (B, C)
    assert world.actions == (h.Start(0, 1),)


def test_when_all_announce_their_departure_the_state_waits_for_somebody_to_take_it():
    world = running().happen(h.Leaving(A), h.Leaving(B), h.Leaving(C))
    assert world.state.view == (B, C)  # A's departure was already agreed
    world.enter(b=6, c=6).happen(h.Death(A, "exit code 0"), h.Ready("worker-0.1", "n:1"))
    assert world.state.view == (B, C, "worker-0.1")
    newest = world.state.generation
    world.enter(b=6, c=6).happen(h.Entered("worker-0.1", newest, -1))
    assert world.releases() == [(0, (6, 6, -1))]
    world.happen(h.Heartbeat("worker-0.1", 7))
    assert world.state.view == ("worker-0.1",)
    assert world.of(h.Publish)[0].reason == f"{B} and {C} leave"


def test_fewer_members_than_the_minimum_wait_for_another():
    world = running().happen(h.Death(A, "killed"), h.Death(B, "killed")).enter(c=5)
    assert world.of(h.Release) == []
    world.happen(h.Ready("worker-1.1", "b:2"))
    newest = world.state.generation
    world.happen(h.Entered(C, newest, 5), h.Entered("worker-1.1", newest, -1))
    assert world.releases() == [(0, (5, -1))]


def all_dead(world: World) -> World:
    world.happen(*(h.Death(ref, "killed") for ref in (A, B, C)))
    again = ["worker-0.1", "worker-1.1", "worker-2.1"]
    world.happen(*(h.Ready(ref, "x:1") for ref in again))
    return world.happen(*(h.Entered(ref, world.state.generation, -1) for ref in again))


def test_a_job_whose_last_state_holder_died_goes_on_from_its_checkpoint():
    world = running(steps=9)
    world.happen(h.Saved(A, 8, "/job/step-8"))
    all_dead(world)
    assert (world.of(h.Truncate), world.releases()) == ([h.Truncate(8)], [(0, (-1, -1, -1))])
    assert world.of(h.Release)[0].checkpoint == "/job/step-8"


def test_a_job_that_lost_its_state_and_has_no_checkpoint_stops_instead_of_beginning_again():
    world = all_dead(running(steps=9))
    assert [action.code for action in world.of(h.FailJob)] == ["state_lost"]
    assert world.state.phase == "failed"


def test_a_silent_worker_is_killed_and_given_up():
    world = running().wait(10.5, A, C)
    assert world.of(h.Kill) == [h.Kill(B, "silent for 10.2 s")]
    assert world.state.view == (A, C)


def test_whoever_was_given_up_is_fenced_at_every_door():
    world = running().happen(h.Death(B, "silent"))
    for event in (h.Heartbeat(B, 6), h.Entered(B, 2, 6), h.Finished(B, 2), h.Ready(B, "b:1"), h.Leaving(B)):
        assert world.happen(event).actions == (h.Fence(B),)


def test_entering_an_old_generation_changes_nothing():
    world = running().happen(h.Death(B, "killed"))
    before = world.state.members[A].entered
    world.happen(h.Entered(A, 1, 5))
    assert world.state.members[A].entered == before


def test_a_broken_group_gets_a_new_generation_once():
    world = running().happen(h.GroupBroken(A, 1, "timeout"), h.GroupBroken(B, 1, "timeout"))
    assert world.state.generation == 2
    assert world.state.view == (A, B, C)


def test_the_job_is_finished_when_every_member_has_applied_the_last_step():
    world = running().happen(h.Finished(A, 1), h.Finished(B, 1))
    assert world.of(h.Finish) == []
    assert world.happen(h.Finished(C, 1)).of(h.Finish) == [h.Finish()]


def test_a_death_at_the_finish_takes_the_finished_back_into_a_group():
    world = running().happen(h.Finished(A, 1), h.Finished(B, 1), h.Death(C, "killed"))
    assert world.state.view == (A, B)
    assert not world.state.finishing
    assert world.enter(a=6, b=5).releases() == [(0, (6, 5))]


def test_a_newcomer_does_not_disturb_those_who_are_at_the_finish():
    world = running().happen(h.Death(B, "killed")).enter(a=5, c=5).happen(h.Finished(A, 2))
    world.happen(h.Ready("worker-1.1", "b:2"))
    assert world.state.view == (A, C)


def test_a_slot_that_keeps_dying_before_any_step_ends_the_job_with_its_reason():
    world = World().happen(h.Begin())
    for incarnation in range(3):
        world.happen(h.Death(f"worker-1.{incarnation}", "exit code 139"))
        world.now += 40.0
        world.happen(h.Tick())
    (failure,) = [action for action in world.all if isinstance(action, h.FailJob)]
    assert failure.why == "worker slot 1 died 3 times in a row before its first step; last: exit code 139"


def test_a_slot_that_keeps_dying_waits_longer_each_time_while_the_job_goes_on():
    world = running(steps=5).happen(h.Death(B, "killed"))
    starts = []
    for incarnation in range(1, 4):
        world.enter(a=world.state.committed, c=world.state.committed).happen(h.Heartbeat(A, world.state.committed + 1))
        world.happen(h.Death(f"worker-1.{incarnation}", "killed"))
        starts.append(bool(world.of(h.Start)))
        world.now += 9.0
        world.happen(h.Heartbeat(A, 0), h.Heartbeat(C, 0), h.Tick())
    assert starts == [True, False, False]
    assert world.state.phase == "running"


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ready", "gone", "enter", "heard", "leave", "broken", "done", "tick"]),
        st.integers(0, 2),
        st.integers(0, 3),
        st.integers(-1, 9),
    ),
    max_size=60,
)


@given(EVENTS)
def test_whatever_happens_generations_only_grow_and_no_group_forms_without_all_its_members(script):
    world = World().happen(h.Begin())
    for what, slot, incarnation, step in script:
        ref, generation = f"worker-{slot}.{incarnation}", world.state.generation
        entered = {name: member.entered for name, member in world.state.members.items()}
        event = {
            "ready": h.Ready(ref, "x:1"), "gone": h.Death(ref, "killed"), "enter": h.Entered(ref, generation, step),
            "heard": h.Heartbeat(ref, step), "leave": h.Leaving(ref), "broken": h.GroupBroken(ref, generation, "x"),
            "done": h.Finished(ref, generation), "tick": h.Tick(),
        }[what]  # fmt: skip
        world.now += 0.5
        world.happen(event)
        assert world.state.generation >= generation
        assert world.state.cut_below <= world.state.generation
        assert set(world.state.view) <= set(world.state.members)
        assert len(world.of(h.Publish)) == world.state.generation - generation
        if releases := world.of(h.Release):
            entered[ref] = step if what == "enter" else entered.get(ref)
            assert all(entered[name] is not None for name in world.state.view)
            assert len(world.state.view) >= POLICY.min_workers
            assert releases[0].steps[releases[0].source] == max(releases[0].steps)
