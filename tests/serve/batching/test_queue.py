"""What waits on deck, and the threads and the loop that agree about it."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from trueline.errors import DeadlineExceeded, Overloaded
from trueline.serve.batching.policy import Policy
from trueline.serve.batching.queue import Batcher

ONE_BY_ONE = Policy(max_batch=1, max_delay_s=0.0)


class Steps:
    """A program each of whose runs waits until it is let go; it remembers what it ran, and on which thread."""

    def __init__(self) -> None:
        self.ran: list[list[float]] = []
        self.threads: list[str] = []
        self._begun = threading.Semaphore(0)
        self._go = threading.Semaphore(0)

    def run(self, inputs: Any) -> dict[str, Any]:
        self.ran.append(inputs["x"].tolist())
        self.threads.append(threading.current_thread().name)
        self._begun.release()
        assert self._go.acquire(timeout=200)
        return {"y": inputs["x"] + 1}

    def begun(self) -> None:
        """Returns when one more run has begun; the loop stands still meanwhile."""
        assert self._begun.acquire(timeout=200)

    def let_go(self, runs: int = 1) -> None:
        self._go.release(runs)


Scene = Callable[[Batcher, Steps], Awaitable[None]]


def play(scene: Scene, policy: Policy = ONE_BY_ONE) -> Steps:
    async def main() -> Steps:
        steps = Steps()
        with ThreadPoolExecutor(policy.lanes) as pool:
            batcher = Batcher(steps.run, policy, pool, asyncio.get_running_loop())
            await scene(batcher, steps)
            steps.let_go(100)
            await batcher.wait_empty()
        return steps

    return asyncio.run(main())


def x(value: float) -> dict[str, Any]:
    return {"x": np.array([value])}


async def first_runs(batcher: Batcher, steps: Steps) -> asyncio.Future[Any]:
    """The future of a request, 0, whose run is under way."""
    asked = batcher.submit(x(0), 1, "k")
    await asyncio.sleep(0)
    steps.begun()
    return asked


def test_a_full_batch_that_waits_begins_on_the_thread_that_ends_a_run_while_the_loop_is_busy() -> None:
    async def scene(batcher: Batcher, steps: Steps) -> None:
        asked = [await first_runs(batcher, steps), *(batcher.submit(x(value), 1, "k") for value in (1, 2))]
        steps.let_go()
        steps.begun()  # and the loop has done nothing yet
        assert steps.ran == [[0], [1]]
        assert batcher.num_waiting == 1
        steps.let_go(2)
        answers = await asyncio.gather(*asked)
        assert [one["y"].tolist() for one in answers] == [[1], [2], [3]]

    steps = play(scene)
    assert steps.ran == [[0], [1], [2]]
    assert len(set(steps.threads)) == 1


def test_who_asks_in_another_thread_how_many_wait_is_told_and_takes_nothing_out_of_the_loops_hands() -> None:
    async def scene(batcher: Batcher, steps: Steps) -> None:
        asked = [await first_runs(batcher, steps), *(batcher.submit(x(value), 1, "k") for value in (1, 2))]
        steps.let_go()
        steps.begun()  # a thread has taken 1 from the deck, and the loop has done nothing yet
        with ThreadPoolExecutor(1) as scraping:
            assert scraping.submit(lambda: batcher.num_waiting).result() == 1
        assert len(batcher._queue) == 2
        steps.let_go(2)
        await asyncio.gather(*asked)
        assert batcher.num_waiting == 0

    play(scene)


def test_a_batch_that_may_still_grow_is_not_begun_behind_the_loops_back() -> None:
    async def scene(batcher: Batcher, steps: Steps) -> None:
        asked = [await first_runs(batcher, steps), batcher.submit(x(1), 1, "k"), batcher.submit(x(2), 1, "k")]
        steps.let_go(2)
        await asyncio.gather(*asked)

    assert play(scene, Policy(max_batch=8, max_delay_s=0.0)).ran == [[0], [1, 2]]


def test_rows_of_another_kind_make_no_batch_full() -> None:
    async def scene(batcher: Batcher, steps: Steps) -> None:
        asked = [await first_runs(batcher, steps), batcher.submit(x(1), 1, "a"), batcher.submit(x(2), 1, "b")]
        asked.append(batcher.submit(x(3), 1, "a"))
        steps.let_go(3)
        await asyncio.gather(*asked)

    assert play(scene, Policy(max_batch=2, max_delay_s=0.0)).ran == [[0], [1, 3], [2]]


def test_what_is_more_urgent_takes_the_place_on_deck() -> None:
    async def scene(batcher: Batcher, steps: Steps) -> None:
        asked = [await first_runs(batcher, steps), batcher.submit(x(1), 1, "k")]
        asked.append(batcher.submit(x(2), 1, "k", None, 1))
        steps.let_go(3)
        await asyncio.gather(*asked)

    assert play(scene).ran == [[0], [2], [1]]


def test_what_is_withdrawn_from_the_deck_is_not_run_and_the_next_lies_there() -> None:
    async def scene(batcher: Batcher, steps: Steps) -> None:
        asked = [await first_runs(batcher, steps), *(batcher.submit(x(value), 1, "k") for value in (1, 2))]
        asked[1].cancel()
        assert batcher.num_waiting == 1
        steps.let_go()
        steps.begun()
        steps.let_go()
        await asyncio.gather(asked[0], asked[2])

    assert play(scene).ran == [[0], [2]]


def test_a_deadline_passes_on_deck_as_in_the_queue() -> None:
    async def scene(batcher: Batcher, steps: Steps) -> None:
        asked = [await first_runs(batcher, steps), batcher.submit(x(1), 1, "k", 0.01), batcher.submit(x(2), 1, "k")]
        with pytest.raises(DeadlineExceeded):
            await asked[1]
        steps.let_go(2)
        await asyncio.gather(asked[0], asked[2])

    assert play(scene).ran == [[0], [2]]


def test_what_lies_on_deck_counts_for_the_queue_and_gives_its_place_to_the_urgent() -> None:
    async def scene(batcher: Batcher, steps: Steps) -> None:
        asked = [await first_runs(batcher, steps), batcher.submit(x(1), 1, "k", None, 5)]
        assert batcher.full
        with pytest.raises(Overloaded):
            batcher.submit(x(2), 1, "k", None, 5)
        asked.append(batcher.submit(x(3), 1, "k"))
        with pytest.raises(Overloaded):
            await asked[1]
        steps.let_go(2)
        await asyncio.gather(asked[0], asked[2])

    assert play(scene, Policy(max_batch=1, max_delay_s=0.0, max_requests=1)).ran == [[0], [3]]


def test_a_lane_that_is_too_many_takes_nothing_from_the_deck() -> None:
    async def scene(batcher: Batcher, steps: Steps) -> None:
        asked = [batcher.submit(x(value), 1, "k") for value in (0, 1)]
        await asyncio.sleep(0)
        steps.begun()
        steps.begun()
        asked += [batcher.submit(x(value), 1, "k") for value in (2, 3)]
        batcher.scale(1)
        steps.let_go()
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert len(steps.ran) == 2
        steps.let_go(3)
        await asyncio.gather(*asked)

    assert sorted(play(scene, Policy(max_batch=1, max_delay_s=0.0, lanes=2)).ran[2:]) == [[2], [3]]


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("policy", [ONE_BY_ONE, Policy(), Policy(batch=False), Policy(max_batch=3)])
def test_whatever_comes_goes_and_hurries_each_request_is_answered_once_and_runs_at_most_once(
    policy: Policy, lanes: int
) -> None:
    rng, ran, gate = random.Random(7), [], threading.Event()
    settings = Policy(batch=policy.batch, max_batch=policy.max_batch, max_delay_s=policy.max_delay_s, lanes=lanes,
                      max_requests=20)  # fmt: skip

    def run(inputs: Any) -> dict[str, Any]:
        gate.wait()
        ran.extend(inputs["x"].tolist())
        return {"y": inputs["x"] + 1}

    async def main() -> None:
        with ThreadPoolExecutor(4) as pool:
            batcher = Batcher(run, settings, pool, asyncio.get_running_loop())
            asked: dict[int, asyncio.Future[Any]] = {}
            fates = {"answered": 0, "refused": 0, "withdrawn": 0, "late": 0}
            for value in range(2000):
                # For 40 of every 100 requests the runtime is busy: the queue fills up, refuses, and holds what can be
                # withdrawn.
                (gate.clear if value % 100 < 40 else gate.set)()
                timeout_s = 0.0005 if rng.random() < 0.1 else None
                try:
                    asked[value] = batcher.submit(x(value), 1, rng.choice("ab"), timeout_s, rng.randint(1, 5))
                except Overloaded:
                    fates["refused"] += 1
                if rng.random() < 0.1:
                    asked[rng.choice(list(asked)[-20:])].cancel()
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
                if gate.is_set() and rng.random() < 0.02:
                    await asyncio.wait(asked.values())  # the threads, too, get their time
            gate.set()
            for value, one in asked.items():
                try:
                    assert (await one)["y"].tolist() == [value + 1]
                    fates["answered"] += 1
                except asyncio.CancelledError:
                    fates["withdrawn"] += 1
                except Overloaded:
                    fates["refused"] += 1
                except DeadlineExceeded:
                    fates["late"] += 1
            await batcher.wait_empty()
            assert batcher.num_waiting == 0
        assert sum(fates.values()) == 2000
        assert fates["answered"] > 100 < fates["refused"] + fates["withdrawn"]
        assert fates["answered"] <= len(ran)

    asyncio.run(main())
    assert len(ran) == len(set(ran))


class Counted:
    """A program that remembers the rows of its runs, and on which thread they were."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.threads: set[int] = set()

    def run(self, inputs: Any) -> dict[str, Any]:
        self.rows.append(len(inputs["x"]))
        self.threads.add(threading.get_ident())
        return {"y": inputs["x"] + 1}


def test_short_requests_of_one_turn_run_together_on_the_loop_once_that_was_seen_and_lone_ones_at_once() -> None:
    async def main() -> Counted:
        program = Counted()
        with ThreadPoolExecutor(1) as pool:
            batcher = Batcher(program.run, Policy(), pool, asyncio.get_running_loop(), short_values=8)

            async def turn(count: int) -> None:
                """`count` requests of one turn, each asked as a version asks."""
                waiting = {}
                for value in range(count):
                    if batcher.alone():
                        program.run(x(value))
                    else:
                        waiting[value] = batcher.submit(x(value), 1, "k")
                for value, one in waiting.items():
                    assert (await one)["y"].tolist() == [value + 1]
                await asyncio.sleep(0)

            for _ in range(40):
                await turn(1)
            assert set(program.rows) == {1}
            for _ in range(20):
                await turn(4)
            assert program.rows[-1] == 4
            assert program.rows.count(4) > 10
            for _ in range(8):
                assert not batcher.alone()
                await turn(1)
            assert batcher.alone()
            assert program.rows[-8:] == [1] * 8
        return program

    assert asyncio.run(main()).threads == {threading.get_ident()}


def test_a_short_request_does_not_wait_for_the_long_ones_that_a_thread_runs() -> None:
    long = {"x": np.zeros(9)}

    async def main() -> None:
        steps = Steps()
        with ThreadPoolExecutor(1) as pool:
            batcher = Batcher(steps.run, ONE_BY_ONE, pool, asyncio.get_running_loop(), short_values=8)
            running = batcher.submit(long, 1, "k")
            await asyncio.sleep(0)
            steps.begun()
            waiting = batcher.submit(long, 1, "k")
            assert batcher.run_mode() == "now"
            assert batcher.alone()
            short = batcher.submit(x(0), 1, "k")  # one that could not run at once
            assert batcher.run_mode() == "queue"
            assert not batcher.alone()
            assert short.cancel()
            assert batcher.alone()
            late = batcher.submit(x(1), 1, "k")
            steps.let_go(3)
            await asyncio.gather(running, waiting, late)
            assert batcher.alone()

    asyncio.run(main())


def test_what_was_answered_is_free_without_a_search_for_cycles() -> None:
    async def main() -> int:
        with ThreadPoolExecutor(1) as pool:
            batcher = Batcher(Counted().run, Policy(), pool, asyncio.get_running_loop())
            await batcher.submit(x(0), 1, "k", 100.0)
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                for value in range(100):
                    await batcher.submit(x(value), 1, "k", 100.0)
                gc.collect()
                return len([one for one in gc.garbage if type(one).__module__.startswith(("trueline", "_asyncio"))])
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()

    assert asyncio.run(main()) == 0  # what other threads of the process left is not counted


def test_a_batch_is_full_by_its_rows_and_not_by_its_requests() -> None:
    async def scene(batcher: Batcher, steps: Steps) -> None:
        asked = [await first_runs(batcher, steps), batcher.submit({"x": np.array([1.0, 2.0])}, 2, "k")]
        steps.let_go()
        steps.begun()  # on the thread that ended the first, and the loop has done nothing yet
        assert steps.ran == [[0], [1, 2]]
        steps.let_go(2)
        await asyncio.gather(*asked)

    play(scene, Policy(max_batch=2, max_delay_s=0.0))
