"""Who may start where the engine has no queue: no two jobs each hold a part of what both need."""

from hypothesis import given
from hypothesis import strategies as st

from trueline.engine.cluster.contract import job_of
from trueline.engine.cluster.line import Waiter, find_obstacle


def head(job: str, gang: int = 1, *, at: float = 0.0, running: bool = False, priority: int = 0) -> Waiter:
    return Waiter(
        name=f"{job}.1.head", slots=1, gang=gang, submitted_at=at, running=running, priority=priority
    )  # fmt: skip


def host(job: str, number: int = 1, *, running: bool = False) -> Waiter:
    return Waiter(name=f"{job}.1.host-{number}", slots=1, submitted_at=9.0, running=running)


def test_a_head_waits_for_all_that_its_job_needs():
    assert find_obstacle(head("b", 2), [head("a", running=True)], 2) == (
        "waits for 2 free slots: 1 of 2 are free, a.1 has the others"
    )
    assert find_obstacle(head("b", 2), [head("a", running=True)], 3) == ""


def test_what_a_running_head_needs_stays_reserved_for_its_hosts():
    a = head("a", 2, running=True)
    assert "1 of 3 are free" in find_obstacle(head("b", 2), [a], 3)
    assert find_obstacle(host("a"), [a, head("b", 1)], 2) == ""


def test_hosts_beyond_the_reservation_wait_behind_heads():
    a = head("a", 1, running=True)
    assert find_obstacle(host("a"), [a], 2) == ""
    assert find_obstacle(host("a"), [a, head("b", 2)], 2) == "waits behind b.1 (priority 0)"


def test_heads_go_by_priority_then_by_time():
    early, late, urgent = head("a", at=1.0), head("b", at=2.0), head("c", at=3.0, priority=1)
    assert find_obstacle(urgent, [early, late], 1) == ""
    assert find_obstacle(early, [late, urgent], 1) == "waits behind c.1 (priority 1)"
    assert find_obstacle(late, [early], 1) == "waits behind a.1 (priority 0)"


@given(
    gangs=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=6),
    choices=st.lists(st.integers(0, 20), max_size=60),
)
def test_jobs_that_start_by_this_rule_all_get_what_they_need(gangs, choices):
    """Heads start, then their hosts, in any order of polling; no slot is given twice and no two jobs deadlock."""
    capacity = 4
    waiting = {
        waiter.name: waiter
        for number, (gang, priority) in enumerate(gangs)
        for waiter in (head(f"j{number}", gang, at=float(number), priority=priority),)
    }
    needs, done = dict(enumerate(gang for gang, _ in gangs)), 0
    living: dict[str, Waiter] = dict(waiting)
    polls = iter([*choices, *range(1000)])
    while living:
        name = sorted(living)[next(polls) % len(living)]
        one = living[name]
        others = [other for other in living.values() if other.name != name]
        if one.running or find_obstacle(one, others, capacity):
            continue
        living[name] = Waiter(**{field: getattr(one, field) for field in one.__struct_fields__} | {"running": True})
        assert sum(other.slots for other in living.values() if other.running) <= capacity
        job = job_of(name)
        number = int(job[1:-2])
        if one.gang:
            living |= {f"{job}.host-{n}": host(job[:-2], n) for n in range(1, needs[number])}
        if sum(other.running for other in living.values() if job_of(other.name) == job) == needs[number]:
            done += 1
            living = {key: other for key, other in living.items() if job_of(key) != job}
    assert done == len(gangs)
