"""How many hosts a job asks for, what a failure changes, and that nothing is asked for twice."""

from hypothesis import given
from hypothesis import strategies as st

from trueline.engine.cluster.contract import SubmissionReport, SubmissionState
from trueline.engine.cluster.decide import (
    JOIN_S,
    LAST_S,
    MOST_JOIN_S,
    SETTLE_S,
    YIELD_S,
    CancelHost,
    HostEnded,
    HostEntry,
    HostPlan,
    SubmitHost,
    adopt,
    decide,
    fail,
    gives_way,
)

QUEUED, RUNNING, ENDED = SubmissionState.QUEUED, SubmissionState.RUNNING, SubmissionState.ENDED


def listed(**states) -> dict[str, SubmissionReport]:
    return {
        (role := name.replace("_", "-")): SubmissionReport(name=f"a.1.{role}", state=state, reason="why")
        for name, state in states.items()
    }


def roles(actions, kind) -> list[str]:
    return [action.role for action in actions if isinstance(action, kind)]


def begin(hosts: int, now: float = 0.0) -> HostPlan:
    plan = HostPlan()
    assert len(decide(plan, hosts, {}, None, now)) == hosts
    return plan


def test_missing_hosts_are_submitted_once():
    plan = begin(2)
    assert roles(plan.hosts and [SubmitHost(role, "") for role in plan.hosts], SubmitHost) == ["host-1", "host-2"]
    assert decide(plan, 2, {}, None, 1.0) == []  # a scheduler may list them late
    assert decide(plan, 2, listed(host_1=QUEUED, host_2=RUNNING), (), 2.0) == []


def test_a_host_that_the_master_has_lost_is_cancelled_and_replaced_before_the_scheduler_knows():
    plan = begin(1)
    decide(plan, 1, listed(host_1=RUNNING), ("host-1",), 1.0)
    actions = decide(plan, 1, listed(host_1=RUNNING), (), 2.0)
    assert actions[0] == CancelHost("host-1", "the job has lost it", grace=False)
    assert roles(actions, SubmitHost) == ["host-2"]


def test_a_master_that_does_not_answer_has_lost_no_host():
    plan = begin(1)
    decide(plan, 1, listed(host_1=RUNNING), ("host-1",), 1.0)
    assert decide(plan, 1, listed(host_1=RUNNING), None, 2.0) == []


def test_a_host_that_ended_after_it_had_joined_is_replaced_at_once_by_a_new_name():
    plan = begin(1)
    decide(plan, 1, listed(host_1=RUNNING), ("host-1",), 1.0)
    actions = decide(plan, 1, listed(host_1=ENDED), (), 9.0)
    assert actions == [HostEnded("host-1", "why"), SubmitHost("host-2", actions[1].why)]


def test_hosts_that_end_before_they_join_are_tried_again_later_each_time():
    plan, now, waits = begin(1), 0.0, []
    for number in range(1, 9):
        now += 1.0
        decide(plan, 1, listed(**{f"host_{number}": ENDED}), (), now)
        waits.append(plan.retry_at - now)
        assert not plan.hosts
        assert decide(plan, 1, {}, (), plan.retry_at - 0.1) == []
        now = plan.retry_at
        assert roles(decide(plan, 1, {}, (), now), SubmitHost) == [f"host-{number + 1}"]
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LAST_S, LAST_S]
    decide(plan, 1, listed(host_9=RUNNING), ("host-9",), now + 1)
    assert (plan.failures, plan.retry_at) == (0, 0.0)


def test_a_host_that_runs_and_does_not_join_is_given_up():
    plan = begin(1)
    decide(plan, 1, listed(host_1=RUNNING), (), 1.0)
    assert decide(plan, 1, listed(host_1=RUNNING), (), JOIN_S) == []
    actions = decide(plan, 1, listed(host_1=RUNNING), (), 2.0 + JOIN_S)
    assert actions == [CancelHost("host-1", f"it did not join within {1 + JOIN_S:.0f} s", grace=False)]
    assert plan.failures == 1


def test_a_host_that_prepares_itself_on_a_busy_machine_is_given_more_time_but_not_for_ever():
    plan = begin(1)
    decide(plan, 1, listed(host_1=RUNNING), (), 1.0)
    for now in range(60, int(MOST_JOIN_S), 60):
        assert decide(plan, 1, listed(host_1=RUNNING), (), now, arriving=["host-1"]) == []
    actions = decide(plan, 1, listed(host_1=RUNNING), (), 2.0 + MOST_JOIN_S, arriving=["host-1"])
    assert roles(actions, CancelHost) == ["host-1"]
    plan = begin(1)
    decide(plan, 1, listed(host_1=RUNNING), (), 1.0, arriving=["host-1"])
    assert decide(plan, 1, listed(host_1=RUNNING), (), JOIN_S) == []
    actions = decide(plan, 1, listed(host_1=RUNNING), (), 2.0 + JOIN_S)
    assert roles(actions, CancelHost) == ["host-1"], "it prepares itself no more"


def test_a_host_that_the_scheduler_has_forgotten_is_gone_once_it_had_time_to_appear():
    plan = begin(1)
    assert decide(plan, 1, {}, (), SETTLE_S - 1) == []
    assert roles(decide(plan, 1, {}, (), SETTLE_S + 1), HostEnded) == ["host-1"]


def test_fewer_hosts_give_back_those_that_wait_then_the_newest():
    plan = begin(4)
    states = {"host_1": RUNNING, "host_2": RUNNING, "host_3": QUEUED, "host_4": RUNNING}
    decide(plan, 4, listed(**states), ("host-1", "host-2", "host-4"), 1.0)
    assert roles(decide(plan, 3, listed(**states), None, 2.0), CancelHost) == ["host-3"]
    assert roles(decide(plan, 1, listed(**states), None, 3.0), CancelHost) == ["host-4", "host-2"]
    assert decide(plan, 1, listed(**states), None, 4.0) == []  # they leave between two steps
    ended = roles(decide(plan, 1, listed(host_1=RUNNING), None, 9.0), HostEnded)
    assert ended == ["host-2", "host-3", "host-4"]
    assert plan.failures == 0


def test_the_next_leader_adopts_the_hosts_of_the_one_before_and_names_none_again():
    plan = HostPlan()
    adopt(plan, listed(head=ENDED, host_1=RUNNING, host_2=RUNNING, host_7=ENDED), "host-1", 0.0)
    assert list(plan.hosts) == ["host-2"]
    assert roles(decide(plan, 2, listed(host_1=RUNNING, host_2=RUNNING), ("host-2",), 1.0), SubmitHost) == ["host-8"]


def test_a_submission_that_the_scheduler_refused_waits_too():
    plan = begin(1)
    del plan.hosts["host-1"]
    assert fail(plan, 5.0) == 1.0
    assert decide(plan, 1, {}, (), 5.5) == []
    assert roles(decide(plan, 1, {}, (), 6.0), SubmitHost) == ["host-2"]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["run", "join", "end", "lose", "none"])), max_size=40))
def test_no_name_is_submitted_twice_and_the_plan_reaches_its_number(moves):
    plan, world, joined, named, now = HostPlan(), {}, set(), [], 0.0
    for hosts, move in [*moves, *[(2, "run"), (2, "join")] * 40]:
        now += 2.0
        for role in list(world)[:1] if move in ("end", "lose") else list(world):
            if move == "run":
                world[role] = RUNNING
            elif move == "join" and world[role] is RUNNING:
                joined.add(role)
            elif move == "end":
                world.pop(role)
                joined.discard(role)
            elif move == "lose":
                joined.discard(role)
        reports = listed(**{role.replace("-", "_"): state for role, state in world.items()})
        for action in decide(plan, hosts, reports, joined, now):
            if isinstance(action, SubmitHost):
                named.append(action.role)
                world[action.role] = QUEUED
            elif isinstance(action, CancelHost):
                world.pop(action.role, None)
                joined.discard(action.role)
    assert len(set(named)) == len(named)
    assert len(world) == len(joined) == 2


def test_of_two_launches_that_hold_half_each_one_gives_way_first_and_neither_while_its_hosts_run() -> None:
    waiting = HostPlan(
        hosts={"host-1": HostEntry(submitted_at=0.0), "host-2": HostEntry(submitted_at=0.0, running_at=1.0)}
    )

    def patience(name: str, number: int = 1) -> int:
        return next(s for s in range(2000) if gives_way(waiting, waited_s=s, name=name, number=number))

    first, second = patience("digits-1"), patience("digits-2")
    assert first != second
    assert all(YIELD_S < one <= 2 * YIELD_S + 1 for one in (first, second))
    assert patience("digits-1", 4) > 4 * YIELD_S
    for entry in waiting.hosts.values():
        entry.running_at = 1.0
    assert not gives_way(waiting, waited_s=1e9, name="digits-1", number=1)
