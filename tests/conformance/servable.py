"""What every Servable promises. Import the tests and provide the fixture `world`: a ServableWorld."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import pytest

from trueline.errors import NotReady, RequestError
from trueline.serve.models.servable import Servable


class ServableWorld(Protocol):
    """Servables of one kind, whose runs wait until `release`."""

    def fresh(self) -> Servable:
        """One that is not loaded."""
        ...

    async def load(self) -> Servable:
        """One that is ready."""
        ...

    def request(self, servable: Servable) -> Awaitable[Any]:
        """Sends a request of the kind that it takes. Raises RequestError."""
        ...

    async def release(self, servable: Servable) -> None:
        """Ends all runs, those that follow too."""
        ...


def play(world: ServableWorld, scene: Callable[[Servable], Awaitable[None]]) -> None:
    async def main() -> None:
        servable = await world.load()
        await scene(servable)
        await world.release(servable)
        await servable.retire()

    asyncio.run(main())


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_what_is_not_ready_rejects_requests_with_its_state_and_reason(world: ServableWorld) -> None:
    async def scene() -> None:
        servable = world.fresh()
        assert (servable.state, servable.sick, servable.num_waiting, servable.full) == ("loading", False, 0, False)
        assert servable.load_times == {}
        for read in (lambda: servable.digest, lambda: servable.policy, lambda: servable.program.loaded):
            with pytest.raises(NotReady, match=f"'{servable.model}' version '{servable.version}' is loading"):
                read()
        servable.state, servable.reason = "failed", "it is torn"
        assert servable.sick
        for act in (servable.check_ready, lambda: world.request(servable), lambda: servable.scale(1)):
            with pytest.raises(NotReady, match="is failed: it is torn"):
                act()
        await servable.retire()
        assert servable.state == "retiring"

    asyncio.run(scene())


def test_it_takes_tensors_or_whole_requests_and_names_the_other_path(world: ServableWorld) -> None:
    async def scene(servable: Servable) -> None:
        servable.check_ready()
        if servable.handler is None:
            assert servable.program.signature.inputs
            return
        for act in (lambda: servable.program, lambda: servable.ask({})):
            with pytest.raises(RequestError, match=f"ask /predictions/{servable.model}"):
                act()

    play(world, scene)


def test_its_digest_policy_and_load_time_can_be_read_once_it_is_ready(world: ServableWorld) -> None:
    async def scene(servable: Servable) -> None:
        assert (servable.state, servable.sick) == ("ready", False)
        assert servable.digest
        assert servable.policy.lanes >= 1
        assert all(name.startswith("W-9") and seconds >= 0 for name, seconds in servable.load_times.items())
        assert servable.load_times
        assert servable.since > 0

    play(world, scene)


def test_an_answered_request_is_a_run_in_its_statistics(world: ServableWorld) -> None:
    async def scene(servable: Servable) -> None:
        waiting = world.request(servable)
        await turns()
        assert servable.stats.batch_s.count == 0
        await world.release(servable)
        await waiting
        await turns()
        assert (servable.stats.batch_s.count, servable.stats.rows, servable.stats.failed) == (1, 1, 0)

    play(world, scene)


def test_scaled_to_zero_it_answers_what_waits_and_rejects_what_is_new(world: ServableWorld) -> None:
    async def scene(servable: Servable) -> None:
        waiting = [world.request(servable) for _ in range(3)]
        await turns()
        servable.scale(0)
        assert servable.policy.lanes == 0
        with pytest.raises(NotReady, match="has no worker to serve inference request"):
            world.request(servable)
        await world.release(servable)
        await asyncio.gather(*waiting)

    play(world, scene)


def test_it_retires_after_the_last_accepted_answer_and_rejects_requests_from_then_on(world: ServableWorld) -> None:
    async def scene() -> None:
        servable = await world.load()
        waiting = [world.request(servable) for _ in range(3)]
        await turns()
        gone = asyncio.ensure_future(servable.retire())
        await turns()
        assert (gone.done(), servable.state) == (False, "ready")
        await world.release(servable)
        await gone
        await asyncio.gather(*waiting)
        assert servable.state == "retiring"
        with pytest.raises(NotReady, match="is retiring"):
            world.request(servable)

    asyncio.run(scene())
