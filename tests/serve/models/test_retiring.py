"""A version that leaves answers first what it was asked. Each run waits at a gate, and no clock is looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueline import events
from trueline.errors import NotReady, Overloaded, ServerFault, StorageError
from trueline.serve import host
from trueline.serve.batching.execution_plan import ExecutionPlan
from trueline.serve.batching.policy import Policy
from trueline.serve.batching.queue import Batcher
from trueline.serve.handlers.config import HandlerPlan
from trueline.serve.handlers.pool import Pool
from trueline.serve.handlers.version import HandlerVersion
from trueline.serve.handlers.worker import Launch
from trueline.serve.models.catalog import Models, UnknownModel
from trueline.serve.models.controller import Fleet
from trueline.serve.models.loader import ResolvedSource
from trueline.serve.models.servable import HandlerRequest, Loaded
from trueline.serve.models.sources import Store
from trueline.serve.models.split import Split
from trueline.serve.models.version import ProgramVersion
from trueline.serve.models.watchers import AliasFollower
from trueline.serve.process.signals import Stop
from trueline.serve.protocols.oip.rest import Repository
from trueline.serve.traffic.canary import CanaryRule
from trueline.serve.traffic.rollout import Traffic
from worlds.servables import FakeWorker, Gated, fake_workers, handler


class House:
    """A fleet whose bundles need no disk: what is loaded next is handed in."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.models = Models()
        self.fleet = Fleet(self.models, self.loop, self._in_thread)
        self.next: list[Gated] = []

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        if work is host.give_back:
            return None
        session = self.next.pop(0)
        plan = ExecutionPlan(batch=True, why="", max_batch=1, inline_values=0, latency_s={1: 1e-3})
        return Loaded(session=session, digest=f"{session.step}", platform="onnx", golden_cases=1, plan=plan)

    async def load(self, version: str, session: Gated) -> ProgramVersion:
        """Serves `session` as a version of `tiny`, in the place of one of the same name."""
        self.next.append(session)
        return await self.fleet.load(
            ResolvedSource(path=Path("tiny.bundle")), "tiny", version, source="", replace_it=True
        )

    async def begun(self, session: Gated) -> None:
        assert await asyncio.to_thread(session.entered.wait, 100)

    async def turns(self) -> None:
        """What can happen without an answer has happened."""
        for _ in range(20):
            await asyncio.sleep(0)


def ask(version: ProgramVersion, value: float) -> asyncio.Future[Any]:
    found = version.ask({"x": np.array([value], np.float32)})
    assert isinstance(found, asyncio.Future)
    return found


async def answers(asked: list[asyncio.Future[Any]]) -> list[float]:
    return [float(one["y"][0]) for one in await asyncio.wait_for(asyncio.gather(*asked), 100)]


def play(scene: Callable[[House], Awaitable[None]]) -> list[str]:
    """Plays the scene; the versions that have retired, in order."""
    retired: list[str] = []

    def hear(name: str, fields: dict[str, Any]) -> None:
        if name == "version.retired":
            retired.append(fields["version"])

    async def main() -> None:
        with events.listening(hear):
            await scene(House())

    asyncio.run(main())
    return retired


def test_a_version_that_is_replaced_answers_what_runs_and_what_waits_and_only_then_lets_go() -> None:
    async def scene(house: House) -> None:
        slow, fast = Gated(1), Gated(100)
        fast.gate.set()
        old = await house.load("1", slow)
        asked = [ask(old, value) for value in range(3)]
        await house.begun(slow)  # one runs, two wait
        new = await house.load("1", fast)
        await house.turns()
        assert house.models.find("tiny") is new
        assert await answers([ask(house.models.find("tiny"), 7)]) == [107.0]
        assert (old.state, old.digest) == ("ready", "1")
        assert not any(one.done() for one in asked)
        slow.gate.set()
        assert await answers(asked) == [1.0, 2.0, 3.0]
        await asyncio.gather(*house.fleet._retiring)
        assert old.state == "retiring"
        with pytest.raises(NotReady):
            old.ask({"x": np.zeros(1, np.float32)})

    assert play(scene) == ["1"]


def test_what_waits_and_has_not_begun_is_answered_too_when_its_version_is_replaced() -> None:
    async def scene(house: House) -> None:
        slow, fast = Gated(1), Gated(100)
        slow.gate.set()
        old = await house.load("1", slow)
        house.next.append(fast)
        rollout = house.loop.create_task(
            house.fleet.load(ResolvedSource(path=Path("tiny.bundle")), "tiny", "1", source="", replace_it=True)
        )
        asked = [ask(old, value) for value in range(13)]  # nothing of it has reached a thread
        await rollout
        assert await answers(asked) == [value + 1.0 for value in range(13)]
        await asyncio.gather(*house.fleet._retiring)

    assert play(scene) == ["1"]


@pytest.mark.parametrize("version", [None, "1"])
def test_a_model_that_is_unregistered_is_gone_only_when_its_last_request_is_answered(version: str | None) -> None:
    async def scene(house: House) -> None:
        slow = Gated(1)
        old = await house.load("1", slow)
        asked = [ask(old, value) for value in range(3)]
        await house.begun(slow)
        gone = house.loop.create_task(house.fleet.retire("tiny", version))
        await house.turns()
        with pytest.raises(UnknownModel):
            house.models.find("tiny")
        assert (gone.done(), old.state) == (False, "ready")
        slow.gate.set()
        await gone
        assert [one.done() for one in asked] == [True, True, True]
        assert await answers(asked) == [1.0, 2.0, 3.0]

    assert play(scene) == ["1"]


def test_while_a_version_is_unregistered_another_act_on_its_model_waits() -> None:
    async def scene(house: House) -> None:
        slow, fast = Gated(1), Gated(100)
        fast.gate.set()
        old = await house.load("1", slow)
        asked = [ask(old, 0)]
        await house.begun(slow)
        gone = house.loop.create_task(house.fleet.retire("tiny"))
        await house.turns()
        assert house.fleet.busy("tiny")
        again = house.loop.create_task(house.load("1", fast))
        await house.turns()
        assert not again.done()
        slow.gate.set()
        await asyncio.gather(gone, again)
        assert await answers(asked) == [1.0]

    assert play(scene) == ["1"]


def test_the_version_that_an_alias_leaves_answers_what_it_was_asked() -> None:
    async def scene(house: House) -> None:
        slow, fast = Gated(1), Gated(100)
        fast.gate.set()
        old = await house.load("1", slow)
        follower = AliasFollower(house.fleet, "models:/tiny@champion", "tiny", "1")
        asked = [ask(old, value) for value in range(3)]
        await house.begun(slow)
        house.next.append(fast)
        moved = house.loop.create_task(
            follower.move_to(ResolvedSource(path=Path("tiny.bundle"), name="tiny", version="2"))
        )
        await house.turns()
        assert (house.models.default("tiny"), house.models.versions("tiny")) == ("2", ["2"])
        assert (old.state, moved.done()) == ("ready", False)
        slow.gate.set()
        await moved
        assert await answers(asked) == [1.0, 2.0, 3.0]

    assert play(scene) == ["1"]


def test_a_version_that_is_scaled_to_nothing_answers_what_waits_and_takes_nothing_new() -> None:
    async def scene(house: House) -> None:
        slow = Gated(1)
        version = await house.load("1", slow)
        asked = [ask(version, value) for value in range(3)]
        await house.begun(slow)
        assert house.fleet.scale("tiny", "1", 0) == 0
        with pytest.raises(NotReady, match="no worker"):
            version.ask({"x": np.zeros(1, np.float32)})
        slow.gate.set()
        assert await answers(asked) == [1.0, 2.0, 3.0]
        assert house.fleet.scale("tiny", "1", 1) == 1
        assert await answers([ask(version, 5)]) == [6.0]

    play(scene)


def test_lanes_that_are_taken_away_are_not_used_for_what_waits() -> None:
    async def scene(house: House) -> None:
        slow = Gated(1)
        version = await house.load("1", slow)
        house.fleet.scale("tiny", "1", 3)
        assert version._batcher is not None
        asked = [ask(version, value) for value in range(3)]
        await house.turns()
        assert version._batcher._busy == 3
        house.fleet.scale("tiny", "1", 1)
        asked += [ask(version, value) for value in range(3, 5)]
        await house.turns()
        assert (version._batcher._busy, version.num_waiting) == (3, 2)
        slow.gate.set()
        assert await answers(asked) == [1.0, 2.0, 3.0, 4.0, 5.0]

    play(scene)


def test_a_version_that_was_retired_takes_no_more_work_for_its_threads() -> None:
    async def scene(house: House) -> None:
        fast = Gated(1)
        fast.gate.set()
        old = await house.load("1", fast)
        assert await answers([ask(old, 0)]) == [1.0]
        await house.fleet.retire("tiny")
        executor = old._executor
        assert executor is not None
        with pytest.raises(RuntimeError, match="shutdown"):
            executor.submit(print)

    play(scene)


def test_a_split_and_a_shadow_end_with_the_version_that_they_name_and_others_stay() -> None:
    async def scene(house: House) -> None:
        for version in ("1", "2", "3"):
            session = Gated(float(version))
            session.gate.set()
            await house.load(version, session)
        traffic = Traffic(house.fleet, house.loop)
        house.models.set_split("tiny", Split({"1": 1, "2": 1}))
        traffic.set_shadow("tiny", "2")
        await house.fleet.retire("tiny", "3")
        assert house.models.split("tiny") is not None
        assert set(house.models.shadows) == {"tiny"}
        await house.fleet.retire("tiny", "2")
        assert house.models.split("tiny") is None
        assert house.models.shadows == {}
        assert house.models.find("tiny").version == "1"

    assert play(scene) == ["3", "2"]


def test_a_canary_that_gives_its_traffic_back_answers_what_it_was_asked_and_stays_loaded() -> None:
    async def scene(house: House) -> None:
        first, slow = Gated(1), Gated(100)
        first.gate.set()
        await house.load("1", first)
        canary = await house.load("2", slow)
        traffic = Traffic(house.fleet, house.loop)
        traffic.begin_canary("tiny", "2", 0.5, CanaryRule())
        asked = [ask(canary, value) for value in range(2)]
        await house.begun(slow)
        traffic.end_canary("tiny")
        assert house.models.split("tiny") is None
        assert {house.models.find("tiny", key=f"user-{number}").version for number in range(50)} == {"1"}
        slow.gate.set()
        assert await answers(asked) == [100.0, 101.0]
        assert canary.state == "ready"

    assert play(scene) == []


def test_a_short_request_that_is_held_for_the_end_of_the_turn_keeps_its_version() -> None:
    async def scene(house: House) -> None:
        version = await house.load("1", Gated(1))
        assert version._batcher is not None
        version._batcher.hold()
        gone = house.loop.create_task(house.fleet.retire("tiny"))
        await house.turns()
        assert (gone.done(), version.state) == (False, "ready")
        version._batcher.release(1)
        await gone
        assert version.state == "retiring"

    assert play(scene) == ["1"]


# handlers


def request(name: str) -> HandlerRequest:
    return HandlerRequest(request_id=name, parts=[], headers={})


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def play_handler(monkeypatch: pytest.MonkeyPatch, scene: Callable[[list[FakeWorker]], Awaitable[None]]) -> None:
    async def main() -> None:
        with fake_workers(monkeypatch) as workers:
            await scene(workers)

    asyncio.run(main())


def test_a_handler_that_leaves_answers_what_runs_and_what_waits_before_its_process_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(workers: list[FakeWorker]) -> None:
        pool = handler()
        await pool.begin(1)
        version = HandlerVersion(model="noop", version="1.0", state="ready")
        version._pool = pool
        asked = [pool.submit(request(name)) for name in "abc"]
        gone = asyncio.get_running_loop().create_task(version.retire())
        for _ in range(3):
            await turns()
            assert (gone.done(), version.state, workers[0].ended.done()) == (False, "ready", False)
            workers[0].answer()
        await gone
        assert [one.result().body for one in asked] == [b"a", b"b", b"c"]
        assert (version.state, workers[0].ended.done(), len(workers)) == ("retiring", True, 1)

    play_handler(monkeypatch, scene)


def test_a_worker_that_is_scaled_down_answers_first_and_the_idle_one_goes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(workers: list[FakeWorker]) -> None:
        pool = handler(workers=2)
        await pool.begin(2)
        asked = pool.submit(request("a"))
        await turns()
        busy, idle = sorted(workers, key=lambda one: -len(one.asked))
        pool.scale(1)
        await turns()
        assert (busy.ended.done(), idle.ended.done()) == (False, True)
        other = pool.submit(request("b"))
        pool.scale(0)
        await turns()
        assert not busy.ended.done()
        busy.answer()
        await turns()
        assert asked.result().body == b"a"
        assert not busy.ended.done(), "what waits is answered by the last worker"
        busy.answer()
        await turns()
        assert other.result().body == b"b"
        assert busy.ended.done()
        with pytest.raises(NotReady):
            pool.submit(request("c"))

    play_handler(monkeypatch, scene)


def test_a_pool_that_is_closed_refuses_what_waits_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(workers: list[FakeWorker]) -> None:
        pool = handler()
        await pool.begin(1)
        asked = [pool.submit(request(name)) for name in "ab"]
        await turns()
        await pool.close()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(one) for one in found] == [NotReady, NotReady]
        assert [one.ended.done() for one in workers] == [True]

    play_handler(monkeypatch, scene)


def planned(**plan: Any) -> Pool:
    """A pool whose plan says otherwise than the usual."""
    given = HandlerPlan(handler="noop.py", **plan)
    launch = Launch(model="noop", version="1.0", folder=Path(), config_file="", plan=given)
    return Pool(launch, asyncio.get_running_loop())


def test_a_handlers_queue_holds_what_its_plan_says_and_not_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(workers: list[FakeWorker]) -> None:
        pool = planned(queue_size=2)
        await pool.begin(1)
        asked = [pool.submit(request("runs"))]
        await turns()
        asked += [pool.submit(request("a")), pool.submit(request("b"))]
        with pytest.raises(Overloaded, match="2 requests"):
            pool.submit(request("c"))
        workers[0].answer()
        await turns()
        asked.append(pool.submit(request("d")))
        for _ in range(3):
            workers[0].answer()
            await turns()
        assert [one.result().body for one in asked] == [b"runs", b"a", b"b", b"d"]

    play_handler(monkeypatch, scene)


def test_a_handlers_request_that_is_withdrawn_is_not_run_and_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(workers: list[FakeWorker]) -> None:
        pool = planned(queue_size=1)
        await pool.begin(1)
        running = pool.submit(request("runs"))
        await turns()
        gone = pool.submit(request("gone"))
        gone.cancel()
        await turns()
        assert pool.num_waiting == 0
        last = pool.submit(request("last"))
        for _ in range(2):
            workers[0].answer()
            await turns()
        assert [one.request_id for asks in workers[0].asked for one in asks] == ["runs", "last"]
        assert (running.result().body, last.result().body) == (b"runs", b"last")
        await asyncio.wait_for(pool.wait_empty(), 100)

    play_handler(monkeypatch, scene)


def test_a_worker_that_dies_is_replaced_and_what_waits_is_answered_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(workers: list[FakeWorker]) -> None:
        pool = planned()
        await pool.begin(1)
        dying, waiting = pool.submit(request("dies")), pool.submit(request("waits"))
        await turns()
        workers[0].kill("it crashed")
        await turns()
        with pytest.raises(NotReady, match="ended"):
            await dying
        assert len(workers) == 2
        assert not pool.sick
        workers[1].answer()
        assert (await waiting).body == b"waits"

    play_handler(monkeypatch, scene)


def test_a_worker_that_only_dies_is_given_up_and_what_waits_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(workers: list[FakeWorker]) -> None:
        pool = planned(max_retry_s=0.0)
        await pool.begin(1)
        waiting = pool.submit(request("waits"))
        workers[0].kill("it crashed")
        await turns()
        assert not pool.sick
        workers[1].kill("it crashed again")
        await turns()
        assert (pool.sick, pool.num_workers, len(workers)) == (True, 0, 2)
        with pytest.raises(NotReady):
            await waiting
        pool.scale(1)
        await turns()
        assert (pool.sick, len(workers)) == (False, 3)

    play_handler(monkeypatch, scene)


def test_a_version_whose_taking_over_cannot_be_written_down_leaves_the_old_one_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(house: House) -> None:
        first, second = Gated(1), Gated(100)
        first.gate.set()
        second.gate.set()
        old = await house.load("1", first)
        before = house.fleet.desired_state()

        def full() -> None:
            raise StorageError("no space left on the device")

        with monkeypatch.context() as patched:
            patched.setattr(house.fleet, "_keep", full)
            with pytest.raises(ServerFault):
                await house.load("1", second)
        assert house.models.find("tiny") is old
        assert house.fleet.desired_state() == before
        assert await answers([ask(old, 1)]) == [2.0]
        with monkeypatch.context() as patched:
            patched.setattr(house.fleet, "_keep", full)
            with pytest.raises(ServerFault):
                await house.load("2", Gated(5))
        assert house.models.versions("tiny") == ["1"]

    assert play(scene) == []


def test_a_client_that_goes_away_does_not_undo_the_load_it_asked_for(tmp_path: Path) -> None:
    (tmp_path / "tiny.bundle").mkdir()
    (tmp_path / "tiny.bundle" / "bundle.json").write_text("{}")

    async def scene(house: House) -> None:
        fast = Gated(1)
        fast.gate.set()
        house.next.append(fast)
        asked = Repository(house.fleet, Store(tmp_path), house.loop).load("tiny", {})
        asked.cancel()
        await house.turns()
        assert await answers([ask(house.models.find("tiny"), 1)]) == [2.0]

    play(scene)


def test_a_load_finds_that_the_old_version_was_retired_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two processes the one follows the other's load, while the next load of the same model reaches it."""
    (tmp_path / "tiny.bundle").mkdir()
    (tmp_path / "tiny.bundle" / "bundle.json").write_text("{}")

    async def scene(house: House) -> None:
        old, new = Gated(100), Gated(1)
        old.gate.set()
        new.gate.set()
        await house.load("0", old)
        make_default = house.fleet.make_default

        async def follow(model: str, version: str) -> None:
            await make_default(model, version)
            await house.fleet.retire(model, "0")

        monkeypatch.setattr(house.fleet, "make_default", follow)
        house.next.append(new)
        answer = await Repository(house.fleet, Store(tmp_path), house.loop).load("tiny", {})
        assert (answer.status, house.models.versions("tiny")) == (200, ["1"])

    play(scene)


def test_a_first_word_lets_requests_end_and_a_second_one_hurries() -> None:
    async def main() -> None:
        stop = Stop()
        stop.ask("SIGTERM")
        assert (stop.asked.is_set(), stop.hurried.is_set()) == (True, False)
        stop.ask("SIGTERM")
        assert stop.hurried.is_set()

    asyncio.run(main())


def test_what_waits_for_company_still_waits_and_its_version_is_not_empty() -> None:
    async def main() -> None:
        session = Gated(1)
        session.gate.set()
        with ThreadPoolExecutor(1) as threads:
            policy = Policy(max_batch=2, max_delay_s=1000.0)
            batcher = Batcher(session.run, policy, threads, asyncio.get_running_loop())
            first = batcher.submit({"x": np.zeros(1, np.float32)}, 1, "k")
            empty = batcher.wait_empty()
            assert (empty.done(), batcher.idle) == (False, False)
            await turns()
            assert (empty.done(), batcher.num_waiting) == (False, 1)
            second = batcher.submit({"x": np.ones(1, np.float32)}, 1, "k")
            assert await answers([first, second]) == [1.0, 2.0]
            await asyncio.wait_for(empty, 100)

    asyncio.run(main())


def test_a_handlers_request_that_waits_for_company_is_answered_before_its_worker_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(workers: list[FakeWorker]) -> None:
        pool = planned(batch_size=2, max_batch_delay_s=1000.0)
        await pool.begin(1)
        first = pool.submit(request("a"))
        empty = pool.wait_empty()
        pool.scale(0)
        await turns()
        assert (empty.done(), workers[0].asked, workers[0].ended.done()) == (False, [], False)
        second = pool.submit(request("b"))
        await turns()
        workers[0].answer()
        assert [(await one).body for one in (first, second)] == [b"a", b"b"]
        await asyncio.wait_for(empty, 100)
        await turns()
        assert workers[0].ended.done()

    play_handler(monkeypatch, scene)
