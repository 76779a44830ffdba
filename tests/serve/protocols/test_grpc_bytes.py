"""The bytes of all gRPC messages that a server holds at a time have one bound, as those of REST bodies have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from trueline.serve.protocols import grpc_base
from trueline.serve.protocols.dispatch import BytesInFlight

LONG = b"x" * 600


class Echo:
    """Answers when it is let go; each kind of method takes the same messages."""

    def __init__(self) -> None:
        self.begun, self.go = asyncio.Queue[int](), asyncio.Event()
        self.in_flight = BytesInFlight(1000)

    async def read(self, data: bytes) -> bytes:
        return data

    async def answer(self, request: bytes, context: Any) -> Any:
        self.begun.put_nowait(len(request))
        await self.go.wait()
        return self

    async def answers(self, request: bytes, context: Any) -> AsyncIterator[Any]:
        yield await self.answer(request, context)

    def SerializeToString(self) -> bytes:
        return b"done"

    def handlers(self) -> Any:
        calls = grpc_base.AuthInterceptor(service="s", check=lambda name, context: None, in_flight=self.in_flight)
        kinds = {
            "unary": calls.unary("unary", self.read, self.answer),
            "both": calls.bidirectional("both", self.read, self.answers, lambda *_: self),
        }
        return grpc.method_handlers_generic_handler("s", kinds)


def call(channel: grpc.aio.Channel, kind: str, data: bytes) -> Any:
    if kind == "unary":
        return channel.unary_unary("/s/unary")(data)

    async def sent() -> AsyncIterator[bytes]:
        yield data

    return channel.stream_stream("/s/both")(sent())


@pytest.mark.parametrize("kind", ["unary", "both"])
def test_messages_beyond_the_bytes_that_a_server_holds_are_refused_until_others_are_answered(kind: str) -> None:
    async def scene() -> None:
        echo = Echo()
        server, port = await grpc_base.serve([echo.handlers()], "127.0.0.1", 0, body_bytes=2**20, connections=9)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            first = call(channel, kind, LONG)
            reading = asyncio.ensure_future(first.read() if kind == "both" else first)
            assert await echo.begun.get() == len(LONG)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(channel, "unary", LONG)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "600 bytes, and the server holds 600 of at most 1000" in str(refused.value.details())
            assert dict(refused.value.trailing_metadata())["retry-after"] == "1"
            small = asyncio.ensure_future(call(channel, "unary", LONG[:400]))
            assert await echo.begun.get() == 400
            first.cancel()
            small.cancel()
            await asyncio.gather(reading, small, return_exceptions=True)
            echo.go.set()
            while echo.in_flight.held:  # the server learns of it
                await asyncio.sleep(0)
            assert await call(channel, "unary", 3 * LONG) == b"done", "one message alone is always taken"
        await server.stop(None)

    asyncio.run(scene())
