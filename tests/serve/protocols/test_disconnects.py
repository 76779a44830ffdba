"""A gRPC client that cancels withdraws what it has waiting; how urgent it is comes with the call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueline.errors import RequestError
from trueline.serve.protocols.oip.grpc import OipService
from trueline.wire import inference_pb2 as pb
from worlds.servers import TinyApp


class Call:
    """What a method sees of its call."""

    def __init__(self, **metadata: str) -> None:
        self._metadata = tuple((name.replace("_", "-"), value) for name, value in metadata.items())

    def invocation_metadata(self) -> Any:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None


@pytest.fixture
def queued(tmp_path: Path) -> Iterator[TinyApp]:
    with TinyApp(tmp_path, inline=False) as made:
        yield made


def asked(rows: int, priority: int | None = None) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="tiny")
    request.inputs.add(name="x", datatype="FP32", shape=[rows, 3])
    request.raw_input_contents.append(np.ones((rows, 3), np.float32).tobytes())
    if priority is not None:
        request.parameters["priority"].uint64_param = priority
    return request


def test_a_cancelled_call_takes_its_request_out_of_the_queue(queued: TinyApp) -> None:
    face = OipService(queued.routes, None)
    gate = threading.Event()
    queued.pool.submit(gate.wait)

    async def scene() -> None:
        running = asyncio.ensure_future(face._infer(asked(1), Call()))
        await turns()
        waiting = asyncio.ensure_future(face._infer(asked(1), Call()))
        await turns()
        assert queued.tiny.num_waiting == 1
        waiting.cancel()
        await turns()
        assert queued.tiny.num_waiting == 0
        gate.set()
        assert (await running).model_name == "tiny"

    queued.loop.run_until_complete(scene())
    assert queued.tiny.stats.rows == 1


def test_how_urgent_a_call_is_comes_as_parameter_or_as_metadata(queued: TinyApp) -> None:
    face = OipService(queued.routes, None)
    gate = threading.Event()
    queued.pool.submit(gate.wait)
    order: list[str] = []

    async def ask(name: str, request: pb.ModelInferRequest, call: Call) -> None:
        await face._infer(request, call)
        order.append(name)

    async def scene() -> None:
        tasks = [asyncio.ensure_future(ask("first", asked(8), Call()))]
        await turns()
        tasks += [
            asyncio.ensure_future(ask(name, request, call))
            for name, request, call in (
                ("later", asked(8, 5), Call(x_trueline_priority="1")),
                ("usual", asked(8), Call()),
                ("urgent", asked(8), Call(x_trueline_priority="1")),
            )
        ]
        await turns()
        gate.set()
        await asyncio.gather(*tasks)
        with pytest.raises(RequestError, match="priority"):
            await face._infer(asked(1), Call(x_trueline_priority="very"))

    queued.loop.run_until_complete(scene())
    assert order == ["first", "urgent", "usual", "later"]


async def turns() -> None:
    """Lets the loop do what is due."""
    for _ in range(4):
        await asyncio.sleep(0)
