"""An engine with room for few workers: none starts without room, and no slot is blamed for a host that is lost."""

from trueline.train.membership import events as h
from trueline.train.membership.decide import decide
from trueline.train.membership.state import MembershipPolicy, State

POLICY = MembershipPolicy(workers=4, min_workers=2)


def start(room: int | None) -> State:
    state = State(workers=4)
    if room is not None:
        decide(state, h.EngineRoom(room), 0.0, POLICY)
    decide(state, h.Begin(), 0.0, POLICY)
    return state


def join(state: State, *refs: str) -> list[h.Action]:
    return [action for ref in refs for action in decide(state, h.Ready(ref, "here:1"), 1.0, POLICY)]


def enter(state: State, *, steps: int) -> None:
    for ref in state.view:
        decide(state, h.Entered(ref, state.generation, steps), 1.0, POLICY)
        decide(state, h.Heartbeat(ref, max(steps, 0)), 1.0, POLICY)


def started(actions: list[h.Action]) -> list[str]:
    return [action.ref for action in actions if isinstance(action, h.Start)]


def test_no_worker_starts_without_room_and_each_gets_its_turn_with_the_hosts():
    state = start(1)
    assert list(state.pending) == ["worker-0.0"]
    assert started(decide(state, h.EngineRoom(3), 1.0, POLICY)) == ["worker-1.0", "worker-2.0"]
    assert started(decide(state, h.EngineRoom(9), 1.0, POLICY)) == ["worker-3.0"]


def test_room_that_is_known_before_the_job_begins_starts_nothing():
    state = State(workers=4)
    assert decide(state, h.EngineRoom(4), 0.0, POLICY) == []


def test_a_job_that_begins_without_room_starts_its_workers_when_the_first_host_joins():
    state = start(0)
    assert not state.pending
    assert started(decide(state, h.EngineRoom(2), 1.0, POLICY)) == ["worker-0.0", "worker-1.0"]


def test_a_next_master_that_knows_its_room_before_its_workers_starts_no_second_ones():
    state = State(workers=4, incarnations={0: 1, 1: 1})
    assert decide(state, h.EngineRoom(4), 0.0, POLICY) == []
    alive = frozenset({"worker-0.0", "worker-1.0"})
    began = decide(state, h.Begin(alive, launch=False), 0.0, POLICY)
    assert started([*began, *decide(state, h.EngineRoom(4), 1.0, POLICY)]) == ["worker-2.0", "worker-3.0"]


def test_the_first_group_waits_for_as_many_as_there_is_room_for_and_never_for_fewer_than_the_minimum():
    state = start(3)
    assert not [action for action in join(state, "worker-0.0", "worker-1.0") if isinstance(action, h.Publish)]
    assert [action for action in join(state, "worker-2.0") if isinstance(action, h.Publish)]
    short = start(1)
    assert not [action for action in join(short, "worker-0.0") if isinstance(action, h.Publish)]
    assert short.phase == "gathering"


def test_without_a_limit_all_slots_are_filled_as_before():
    assert len(start(None).pending) == 4


def test_workers_of_a_lost_host_are_replaced_as_far_as_there_is_room_and_their_slots_are_not_blamed():
    state = start(4)
    join(state, "worker-0.0", "worker-1.0", "worker-2.0", "worker-3.0")
    enter(state, steps=-1)
    enter(state, steps=5)
    decide(state, h.EngineRoom(3), 2.0, POLICY)
    lost = tuple(h.Death(f"worker-{slot}.0", "its host is lost", blameless=True) for slot in (2, 3))
    decide(state, h.Deaths(lost), 2.0, POLICY)
    assert not state.failures
    assert started(decide(state, h.Tick(), 3.0, POLICY)) == ["worker-2.1"]


def test_a_newcomer_whose_host_is_lost_three_times_puts_no_slot_into_quarantine():
    state = start(4)
    for incarnation in range(4):
        ref = f"worker-3.{incarnation}"
        assert ref in state.pending
        decide(state, h.Deaths((h.Death(ref, "its host is lost", blameless=True),)), 1.0, POLICY)
    assert not state.quarantined
    assert state.phase == "gathering"


def test_a_host_that_takes_its_cores_back_fails_no_step():
    state = start(4)
    join(state, "worker-0.0", "worker-1.0", "worker-2.0", "worker-3.0")
    enter(state, steps=-1)
    enter(state, steps=5)
    cut = state.cut_below
    decide(state, h.EngineRoom(2), 2.0, POLICY)
    actions = decide(state, h.Leaving("worker-3.0"), 2.0, POLICY)
    assert state.view == ("worker-0.0", "worker-1.0", "worker-2.0")
    assert state.cut_below == cut
    assert not started(actions)
