"""One version: what is refused before it waits, what runs together, and what a client may read of a failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from conformance.servable import *  # noqa: F403 - the shared tests
from conformance.servable import ServableWorld
from trueline.bundle import Dim, Signature, TensorSpec
from trueline.errors import NotReady, RequestError
from trueline.serve.batching.execution_plan import ExecutionPlan
from trueline.serve.batching.policy import Policy
from trueline.serve.models.loader import MAX_LANES
from trueline.serve.models.servable import Loaded, Servable, TooManyWorkers
from trueline.serve.models.version import ProgramVersion
from worlds.servables import Gated

X = TensorSpec(name="x", datatype="FP32", shape=("batch", "length"))
SIGNATURE = Signature(inputs=(X,), outputs=(X,), dims={"batch": Dim(max=8), "length": Dim(max=4)})


class Program:
    """It answers what it was asked, when its gate is open, and remembers the shapes."""

    format = "onnx"
    signature = SIGNATURE

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.shapes: list[tuple[int, ...]] = []
        self.error: Exception | None = None

    def run(self, inputs: Any) -> dict[str, Any]:
        self.shapes.append(inputs["x"].shape)
        self.entered.set()
        assert self.gate.wait(100)
        if self.error is not None:
            raise self.error
        return {"x": inputs["x"]}


class ProgramWorld:
    """Versions of a gated program."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool = pool
        self.program = Gated(1)

    def fresh(self) -> ProgramVersion:
        return ProgramVersion(model="tiny", version="1")

    async def load(self) -> ProgramVersion:
        made = self.fresh()
        plan = ExecutionPlan(batch=True, why="", max_batch=8, inline_values=0, latency_s={1: 1e-3})
        loaded = Loaded(session=self.program, digest="ab", platform="onnx", golden_cases=1, plan=plan)
        made.make_ready(loaded, Policy(max_batch=8, max_delay_s=0.0), self.pool, asyncio.get_running_loop())
        return made

    def request(self, servable: Servable) -> Awaitable[Any]:
        found = servable.ask({"x": np.zeros(1, np.float32)})
        assert isinstance(found, asyncio.Future)
        return found

    async def release(self, servable: Servable) -> None:
        self.program.gate.set()


@pytest.fixture
def world() -> Iterator[ServableWorld]:
    with ThreadPoolExecutor(1) as pool:
        yield ProgramWorld(pool)


def play(scene: Callable[[ProgramVersion, Program], Awaitable[None]]) -> Program:
    program = Program()

    async def main() -> None:
        version = ProgramVersion(model="tiny", version="1")
        plan = ExecutionPlan(batch=True, why="", max_batch=8, inline_values=0, latency_s={1: 1e-3})
        loaded = Loaded(session=program, digest="ab", platform="onnx", golden_cases=1, plan=plan)
        with ThreadPoolExecutor(1) as pool:
            version.make_ready(loaded, Policy(max_batch=8, max_delay_s=0.0), pool, asyncio.get_running_loop())
            await scene(version, program)
            program.gate.set()

    asyncio.run(main())
    return program


def ask(version: ProgramVersion, *shape: int) -> asyncio.Future[Any]:
    found = version.ask({"x": np.ones(shape, np.float32)})
    assert isinstance(found, asyncio.Future)
    return found


def test_what_lies_outside_of_the_range_is_refused_before_it_waits() -> None:
    async def scene(version: ProgramVersion, program: Program) -> None:
        for inputs in (
            {"x": np.ones((9, 1), np.float32)},
            {"x": np.ones((1, 5), np.float32)},
            {"x": np.ones((1, 1), np.float64)},
            {"x": np.ones((1, 1, 1), np.float32)},
        ):
            with pytest.raises(RequestError):
                version.ask(inputs)
        assert version.num_waiting == 0

    assert play(scene).shapes == []


def test_requests_of_one_shape_run_together_and_those_of_another_apart() -> None:
    async def scene(version: ProgramVersion, program: Program) -> None:
        asked = [ask(version, 1, 1)]
        assert await asyncio.to_thread(program.entered.wait, 100)
        asked += [ask(version, 1, 2), ask(version, 2, 3), ask(version, 3, 2), ask(version, 1, 3)]
        program.gate.set()
        found = await asyncio.gather(*asked)
        assert [one["x"].shape for one in found] == [(1, 1), (1, 2), (2, 3), (3, 2), (1, 3)]

    assert play(scene).shapes == [(1, 1), (4, 2), (3, 3)]


def test_more_lanes_than_the_bound_are_refused_with_both_numbers_and_none_is_cut() -> None:
    async def scene(version: ProgramVersion, program: Program) -> None:
        version.scale(MAX_LANES)
        with pytest.raises(TooManyWorkers, match=f"10000 workers of model 'tiny' are more than the {MAX_LANES} "):
            version.scale(10_000)
        assert version.policy.lanes == MAX_LANES

    play(scene)


def test_what_a_program_refuses_is_said_without_a_path_of_this_machine() -> None:
    async def scene(version: ProgramVersion, program: Program) -> None:
        program.error = RequestError("the program /srv/secret/store/model.onnx refuses these values")
        program.gate.set()
        with pytest.raises(RequestError) as refused:
            await ask(version, 1, 1)
        assert "/srv/secret" not in refused.value.message
        assert "refuses these values" in refused.value.message

    play(scene)


def test_a_failure_of_the_program_is_counted_and_a_refusal_is_not() -> None:
    async def scene(version: ProgramVersion, program: Program) -> None:
        program.gate.set()
        program.error = RequestError("not these")
        with pytest.raises(RequestError):
            await ask(version, 1, 1)
        assert version.stats.failed == 0
        program.error = RuntimeError("the kernel is gone")
        with pytest.raises(RuntimeError):
            await ask(version, 1, 1)
        assert version.stats.failed == 1

    play(scene)


@pytest.mark.parametrize("state", ["loading", "failed", "retiring"])
def test_a_version_answers_only_while_it_is_ready(state: Any) -> None:
    async def scene(version: ProgramVersion, program: Program) -> None:
        version.state = state
        with pytest.raises(NotReady, match=f"version '1' is {state}"):
            version.ask({"x": np.ones((1, 1), np.float32)})
        for ready in (lambda: version.loaded, lambda: version.digest, lambda: version.templates, version.check_ready):
            with pytest.raises(NotReady):
                ready()

    play(scene)
