"""What runs together, what waits, what is refused; and the shell that does it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline import events
from trueline.errors import DeadlineExceeded, Overloaded
from trueline.serve.batching.policy import LEVEL_S, PRIORITIES, Decision, Item, Policy, decide, refusal, run_batch
from trueline.serve.batching.queue import Batcher


def item(rows: int = 1, key: object = "k", since: float = 0.0, deadline: float | None = None) -> Item:
    return Item({}, rows, key, 0, since, deadline)


def test_an_idle_model_runs_what_comes_at_once() -> None:
    one = item()
    found = decide([one], busy=0, now=0.0, policy=Policy())
    assert (found.run, found.reason) == ((one,), "idle")


def test_requests_collect_while_a_run_is_under_way() -> None:
    found = decide([item(), item()], busy=1, now=0.0, policy=Policy())
    assert (found.run, found.wake_at, found.reason) == ((), None, "busy")


def test_what_has_collected_runs_together_up_to_the_bound() -> None:
    queue = [item(rows=2) for _ in range(5)]
    assert decide(queue, busy=0, now=0.0, policy=Policy(max_batch=7)).run == tuple(queue[:3])


def test_other_shapes_wait_for_the_next_run() -> None:
    queue = [item(key="a"), item(key="b"), item(key="a")]
    assert decide(queue, busy=0, now=0.0, policy=Policy()).run == (queue[0], queue[2])


def test_a_request_larger_than_a_batch_runs_alone() -> None:
    queue = [item(rows=100), item()]
    assert decide(queue, busy=0, now=0.0, policy=Policy(max_batch=64)).run == (queue[0],)


def test_a_program_without_a_batch_dimension_runs_requests_one_by_one() -> None:
    queue = [item(), item()]
    assert decide(queue, busy=0, now=0.0, policy=Policy(batch=False, max_delay_s=9.0)).run == (queue[0],)


def test_with_a_delay_an_idle_model_waits_for_company_until_then() -> None:
    policy, queue = Policy(max_delay_s=0.01, max_batch=2), [item(since=5.0)]
    waiting = decide(queue, busy=0, now=5.004, policy=policy)
    assert (waiting.run, waiting.wake_at, waiting.reason) == ((), 5.01, "filling")
    assert decide(queue, busy=0, now=5.01, policy=policy).run == tuple(queue)
    full = [item(since=5.0), item(since=5.001)]
    assert decide(full, busy=0, now=5.002, policy=policy).run == tuple(full)


def test_a_request_past_its_deadline_is_not_run() -> None:
    late, fine = item(deadline=1.0), item(deadline=3.0)
    found = decide([late, fine], busy=0, now=1.0, policy=Policy())
    assert (found.expired, found.run) == ((late,), (fine,))


ITEMS = st.lists(st.builds(item, rows=st.integers(1, 70), key=st.sampled_from("ab"), since=st.floats(0, 1)))


@given(
    queue=ITEMS, busy=st.integers(0, 2), now=st.floats(0, 2), lanes=st.integers(1, 2), delay=st.sampled_from([0, 0.5])
)
def test_the_oldest_request_is_never_passed_over_and_no_batch_exceeds_its_bound(
    queue: list[Item], busy: int, now: float, lanes: int, delay: float
) -> None:
    policy = Policy(lanes=lanes, max_delay_s=delay)
    found = decide(queue, busy=busy, now=now, policy=policy)
    if found.run:
        assert found.run[0] is queue[0]
        assert len({one.key for one in found.run}) == 1
        assert len(found.run) == 1 or sum(one.rows for one in found.run) <= policy.max_batch
        assert busy < lanes
    elif queue and busy < lanes:
        assert found.wake_at is not None
        assert found.wake_at > now


def test_the_queue_is_bounded_in_requests_and_bytes() -> None:
    policy = Policy(max_requests=2, max_bytes=100)
    assert refusal(1, 10, 90, 0.0, policy) is None
    assert "2 requests wait" in str(refusal(2, 10, 1, 0.0, policy))
    assert "bytes wait" in str(refusal(1, 10, 91, 0.0, policy))
    assert refusal(0, 0, 1000, 0.0, policy) is None


def test_a_bad_item_fails_alone() -> None:
    def run(inputs: Any) -> dict[str, Any]:
        if (inputs["x"] < 0).any():
            raise ValueError("negative")
        return {"y": inputs["x"] * 2}

    items = [{"x": np.array([value])} for value in (1, -1, 3)]
    first, second, third = run_batch(run, items, [1, 1, 1])
    assert isinstance(first, dict)
    assert isinstance(third, dict)
    assert (first["y"].tolist(), third["y"].tolist()) == ([2], [6])
    assert isinstance(second, ValueError)


def test_a_program_that_does_not_keep_rows_apart_is_run_one_by_one() -> None:
    results = run_batch(lambda inputs: {"y": inputs["x"].sum()}, [{"x": np.array([1])}, {"x": np.array([2])}], [1, 1])
    assert [int(one["y"]) for one in results if isinstance(one, dict)] == [1, 2]


class Gate:
    """A program that waits at a gate, and remembers the rows of its runs."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()
        self.rows: list[int] = []

    def run(self, inputs: Any) -> dict[str, Any]:
        self.rows.append(len(inputs["x"]))
        self.entered.set()
        assert self.opened.wait(100)
        return {"y": inputs["x"] + 1}


def play(scene: Callable[[Batcher, Gate], Awaitable[None]], policy: Policy) -> Gate:
    async def main() -> Gate:
        gate = Gate()
        with ThreadPoolExecutor(policy.lanes) as pool:
            await scene(Batcher(gate.run, policy, pool, asyncio.get_running_loop()), gate)
            gate.opened.set()
        return gate

    return asyncio.run(main())


async def entered(gate: Gate) -> None:
    """Returns when a run is under way."""
    await asyncio.to_thread(gate.entered.wait, 100)


def rows(*values: float) -> dict[str, Any]:
    return {"x": np.array(values)}


def test_while_one_runs_the_others_are_joined_and_each_gets_its_own_rows() -> None:
    async def scene(batcher: Batcher, gate: Gate) -> None:
        futures = [batcher.submit(rows(1, 1), 2, "k")]
        await entered(gate)
        futures += [batcher.submit(rows(value, value), 2, "k") for value in (2, 3)]
        gate.opened.set()
        answers = await asyncio.gather(*futures)
        assert [one["y"].tolist() for one in answers] == [[2, 2], [3, 3], [4, 4]]

    assert play(scene, Policy()).rows == [2, 4]


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    async def scene(batcher: Batcher, gate: Gate) -> None:
        futures = [batcher.submit(rows(1), 1, "k")]
        await entered(gate)
        futures += [batcher.submit(rows(1), 1, "k") for _ in range(2)]
        with pytest.raises(Overloaded) as caught:
            batcher.submit(rows(1), 1, "k")
        assert caught.value.retry_after_s >= 1
        gate.opened.set()
        await asyncio.gather(*futures)
        await batcher.submit(rows(1), 1, "k")

    play(scene, Policy(max_requests=2))


def test_a_withdrawn_request_is_not_run() -> None:
    async def scene(batcher: Batcher, gate: Gate) -> None:
        running = batcher.submit(rows(1), 1, "k")
        await entered(gate)
        withdrawn, last = (batcher.submit(rows(value), 1, "k") for value in (2, 3))
        withdrawn.cancel()
        await asyncio.sleep(0)
        assert batcher.num_waiting == 1
        gate.opened.set()
        await asyncio.gather(running, last)

    assert play(scene, Policy()).rows == [1, 1]


def test_a_deadline_ends_the_waiting_whether_the_request_waits_or_runs() -> None:
    async def scene(batcher: Batcher, gate: Gate) -> None:
        running = batcher.submit(rows(1), 1, "k", timeout_s=1.0)  # which it has to be begun within
        await entered(gate)
        waiting = batcher.submit(rows(2), 1, "k", timeout_s=0.01)
        for one in (running, waiting):
            with pytest.raises(DeadlineExceeded):
                await one
        assert batcher.num_waiting == 0

    assert play(scene, Policy()).rows == [1]


def test_a_delay_joins_what_comes_within_it() -> None:
    async def scene(batcher: Batcher, gate: Gate) -> None:
        gate.opened.set()
        futures = [batcher.submit(rows(value), 1, "k") for value in (1, 2)]
        await asyncio.gather(*futures)

    assert play(scene, Policy(max_delay_s=0.05)).rows == [2]


def test_what_comes_in_one_turn_of_the_loop_runs_together() -> None:
    async def scene(batcher: Batcher, gate: Gate) -> None:
        gate.opened.set()
        answers = await asyncio.gather(*(batcher.submit(rows(value), 1, "k") for value in (1, 2, 3)))
        assert [one["y"].tolist() for one in answers] == [[2], [3], [4]]

    assert play(scene, Policy()).rows == [3]


def order_of(*asked: tuple[float, int]) -> list[tuple[float, int]]:
    """The order in which items of (since, priority) run, one by one."""
    queue = sorted((Item({}, 1, "k", 0, since, None, priority=level) for since, level in asked), key=lambda i: i.rank)
    return [(item.since, item.priority) for item in queue]


def test_the_urgent_go_first_and_within_a_level_the_older() -> None:
    assert order_of((0.0, 3), (0.1, 3), (0.2, 1), (0.3, 2), (0.4, 1)) == [
        (0.2, 1),
        (0.4, 1),
        (0.3, 2),
        (0.0, 3),
        (0.1, 3),
    ]


def test_no_request_starves_however_many_urgent_ones_come() -> None:
    steady = [(at / 10, 1) for at in range(100)]
    order = order_of((0.0, PRIORITIES), *steady)
    assert order.index((0.0, PRIORITIES)) <= (PRIORITIES - 1) * LEVEL_S * 10 + 1


def test_urgent_requests_overtake_in_the_queue_and_take_a_place_when_it_is_full() -> None:
    async def scene(batcher: Batcher, gate: Gate) -> None:
        running = batcher.submit(rows(1), 1, "k")
        await entered(gate)
        order: list[str] = []
        asked = {name: batcher.submit(rows(1), 1, name, None, level) for name, level in (("late", 5), ("usual", 3))}
        asked["urgent"] = batcher.submit(rows(1), 1, "urgent", None, 1)
        for name, future in asked.items():
            future.add_done_callback(lambda _, name=name: order.append(name))
        with pytest.raises(Overloaded):
            await asked["late"]
        with pytest.raises(Overloaded):
            batcher.submit(rows(1), 1, "again", None, 3)
        gate.opened.set()
        await asyncio.gather(running, asked["usual"], asked["urgent"])
        assert order == ["late", "urgent", "usual"]

    play(scene, Policy(max_requests=2))


def test_a_request_that_does_not_fit_is_not_overtaken_by_a_smaller_one_behind_it() -> None:
    queue = [item(rows=40), item(rows=40), item(rows=10)]
    found = decide(queue, busy=0, now=0.0, policy=Policy())
    assert (found.run, found.full) == ((queue[0],), True)
    assert decide(queue[1:], busy=0, now=0.0, policy=Policy()).run == tuple(queue[1:])


def test_an_idle_model_does_not_wait_for_company_while_others_wait_for_it() -> None:
    policy = Policy(max_delay_s=0.5)
    mixed = [item(key="a"), item(key="b")]
    assert decide(mixed, busy=0, now=0.0, policy=policy).run == (mixed[0],)
    alike = [item(key="a"), item(key="a")]
    found = decide(alike, busy=0, now=0.0, policy=policy)
    assert (found.run, found.wake_at) == ((), 0.5)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4])
def test_a_program_that_answers_more_or_fewer_rows_than_it_was_asked_is_run_one_by_one(num_rows: int) -> None:
    def run(inputs: Any) -> dict[str, Any]:
        rows = len(inputs["x"])
        return {"y": inputs["x"] * 2} if rows == 1 else {"y": np.zeros(num_rows)}

    results = run_batch(run, [{"x": np.array([1])}, {"x": np.array([2])}], [1, 1])
    assert [one["y"].tolist() for one in results if isinstance(one, dict)] == [[2], [4]]


def test_every_output_has_to_count_the_rows() -> None:
    def run(inputs: Any) -> dict[str, Any]:
        return {"y": inputs["x"] * 2, "total": inputs["x"].sum()}

    results = run_batch(run, [{"x": np.array([1])}, {"x": np.array([2])}], [1, 1])
    assert [(one["y"].tolist(), int(one["total"])) for one in results if isinstance(one, dict)] == [([2], 1), ([4], 2)]


def test_rows_go_back_to_the_request_that_asked_them_however_many_each_has() -> None:
    items = [{"x": np.arange(start, start + count)} for start, count in ((0, 1), (1, 3), (4, 2))]
    results = run_batch(lambda inputs: {"y": inputs["x"] + 10}, items, [1, 3, 2])
    assert [one["y"].tolist() for one in results if isinstance(one, dict)] == [[10], [11, 12, 13], [14, 15]]


def test_a_batch_takes_its_bound_and_not_a_row_more() -> None:
    for bound in (1, 2, 63, 64):
        queue = [item() for _ in range(100)]
        assert len(decide(queue, busy=0, now=0.0, policy=Policy(max_batch=bound)).run) == bound


def test_a_deadline_passes_at_its_moment_and_not_before() -> None:
    one = item(deadline=1.0)
    assert decide([one], busy=0, now=0.999, policy=Policy()).run == (one,)
    for now in (1.0, 1.001):
        found = decide([one], busy=0, now=now, policy=Policy())
        assert (found.run, found.expired) == ((), (one,))


def test_the_answer_of_a_withdrawn_request_goes_to_no_other() -> None:
    async def scene(batcher: Batcher, gate: Gate) -> None:
        running = batcher.submit(rows(1), 1, "k")
        await entered(gate)
        first, gone, last = (batcher.submit(rows(value), 1, "k") for value in (2, 3, 4))
        gone.cancel()
        also = batcher.submit(rows(5), 1, "k")
        gate.opened.set()
        answers = await asyncio.gather(running, first, last, also)
        assert [one["y"].tolist() for one in answers] == [[2], [3], [5], [6]]
        assert gone.cancelled()

    play(scene, Policy())


def test_a_request_that_is_gone_while_it_runs_hurts_none_that_runs_with_it() -> None:
    async def scene(batcher: Batcher, gate: Gate) -> None:
        gone, other = batcher.submit(rows(1), 1, "k"), batcher.submit(rows(2), 1, "k")
        await entered(gate)
        gone.cancel()
        gate.opened.set()
        assert (await other)["y"].tolist() == [3]
        assert (await batcher.submit(rows(4), 1, "k"))["y"].tolist() == [5]

    assert play(scene, Policy()).rows == [2, 1]


def test_only_a_request_more_urgent_than_the_last_of_a_full_queue_has_room() -> None:
    async def scene(batcher: Batcher, gate: Gate) -> None:
        asked = [batcher.submit(rows(1), 1, "k")]
        await entered(gate)
        asked.append(batcher.submit(rows(1), 1, "k", None, 3))
        assert batcher.no_room(5) is None, "there is room for one more"
        asked.append(batcher.submit(rows(1), 1, "k", None, 3))
        assert batcher.full
        assert [batcher.no_room(level) is None for level in (1, 2, 3, 4, 5)] == [True, True, False, False, False]
        gate.opened.set()
        await asyncio.gather(*asked)
        assert not batcher.full
        assert batcher.no_room(5) is None

    play(scene, Policy(max_requests=2))


def test_what_was_answered_or_withdrawn_counts_no_more_for_the_bytes_that_wait() -> None:
    async def scene(batcher: Batcher, gate: Gate) -> None:
        for _ in range(5):
            gate.opened.clear()
            gate.entered.clear()
            asked = [batcher.submit(rows(0), 1, "k")]
            await entered(gate)
            asked += [batcher.submit(rows(1), 1, "k"), batcher.submit(rows(2), 1, "k")]  # sixteen bytes
            with pytest.raises(Overloaded, match="16 bytes wait"):
                batcher.submit(rows(3), 1, "k")
            asked.pop().cancel()
            asked.append(batcher.submit(rows(4), 1, "k"))
            gate.opened.set()
            assert [one["y"].tolist() for one in await asyncio.gather(*asked)] == [[1], [2], [5]]

    play(scene, Policy(max_bytes=16))


def test_a_run_that_breaks_its_thread_fails_all_that_were_in_it_and_the_next_is_answered() -> None:
    async def main() -> None:
        broken = [True]

        def run(inputs: Any) -> dict[str, Any]:
            if broken:
                raise SystemExit
            return {"y": inputs["x"]}

        with ThreadPoolExecutor(1) as pool:
            batcher = Batcher(run, Policy(), pool, asyncio.get_running_loop())
            found = await asyncio.gather(*(batcher.submit(rows(n), 1, "k") for n in (1, 2)), return_exceptions=True)
            assert [str(one) for one in found] == ["the run was abandoned"] * 2
            broken.clear()
            assert (await batcher.submit(rows(3), 1, "k"))["y"].tolist() == [3]

    asyncio.run(main())


LEARNS = Policy(max_delay_s=0.25, max_batch=4)
ONE, TWO, LATE = item(since=5.0), item(rows=2, since=4.5), item(since=1.0, deadline=7.0)
OTHER = item(key="other", since=1.0)


@pytest.mark.parametrize(
    ("queue", "busy", "now", "policy", "decision"),
    [
        ([], 0, 0.0, Policy(), Decision((), (), None, "empty")),
        ([], 1, 0.0, Policy(), Decision((), (), None, "empty")),
        ([LATE], 0, 7.0, Policy(), Decision((), (LATE,), None, "empty")),
        ([LATE], 0, 6.9, Policy(), Decision((LATE,), (), None, "idle")),
        ([LATE, ONE], 1, 8.0, Policy(), Decision((), (LATE,), None, "busy")),
        ([LATE, ONE], 0, 8.0, Policy(), Decision((ONE,), (LATE,), None, "idle")),
        ([ONE], 1, 8.0, Policy(lanes=2), Decision((ONE,), (), None, "idle")),
        ([ONE], 2, 8.0, Policy(lanes=2), Decision((), (), None, "busy")),
        ([ONE, TWO], 0, 8.0, Policy(batch=False), Decision((ONE,), (), None, "idle", full=True)),
        ([LATE, ONE], 0, 8.0, Policy(batch=False), Decision((ONE,), (LATE,), None, "idle", full=True)),
        ([ONE, TWO], 0, 4.7, LEARNS, Decision((), (), 4.75, "filling")),
        ([LATE, ONE, TWO], 0, 4.7, LEARNS, Decision((LATE, ONE, TWO), (), None, "idle", full=True)),
        ([ONE, TWO], 0, 4.75, LEARNS, Decision((ONE, TWO), (), None, "idle")),
        ([TWO, TWO], 0, 4.7, LEARNS, Decision((TWO, TWO), (), None, "idle", full=True)),
        ([TWO, ONE, TWO], 0, 4.7, LEARNS, Decision((TWO, ONE), (), None, "idle", full=True)),
        ([ONE, OTHER], 0, 4.7, LEARNS, Decision((ONE,), (), None, "idle")),
        ([ONE, OTHER, TWO], 0, 4.7, LEARNS, Decision((ONE, TWO), (), None, "idle")),
    ],
)
def test_a_decision_says_what_runs_what_is_too_late_and_when_to_ask_again(
    queue: list[Item], busy: int, now: float, policy: Policy, decision: Decision
) -> None:
    assert decide(queue, busy=busy, now=now, policy=policy) == decision


@pytest.mark.parametrize(
    ("waiting", "held", "asked", "why"),
    [
        (1, 50, 50, None),
        (1, 50, 51, "requests of 50 bytes wait for this model already"),
        (0, 0, 1000, None),
        (0, 50, 51, None),
        (2, 0, 0, "2 requests wait for this model already, about 1.23 s of work"),
        (3, 99, 99, "3 requests wait for this model already, about 1.23 s of work"),
    ],
)
def test_a_request_is_refused_in_words_from_the_bound_on(waiting: int, held: int, asked: int, why: str | None) -> None:
    assert refusal(waiting, held, asked, 1.234, Policy(max_requests=2, max_bytes=100)) == why


def test_a_batch_that_fails_is_reported_with_its_size_and_what_failed() -> None:
    def run(inputs: Any) -> dict[str, Any]:
        if len(inputs["x"]) > 1:
            raise ZeroDivisionError("together")
        return {"y": inputs["x"]}

    heard: list[tuple[str, dict[str, Any]]] = []
    with events.listening(lambda name, fields: heard.append((name, fields))):
        run_batch(run, [{"x": np.array([value])} for value in (1, 2, 3)], [1, 1, 1])
        run_batch(run, [{"x": np.array([1])}], [1])
        run_batch(run, [{"x": np.array([1, 2])}], [2])
    assert heard == [("batch.failed", {"items": 3, "why": "ZeroDivisionError"})]
