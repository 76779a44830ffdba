"""The master's gRPC service for hosts that join: a stream of messages for each, and the job's files by their digest."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc

from trueline.engine.hosts.fleet import FleetEngine
from trueline.engine.hosts.host import Host
from trueline.engine.hosts.messages import (
    CHUNK,
    SERVICE,
    CoresOffer,
    Dismissal,
    FromHost,
    FromMaster,
    Greeting,
    ProcessOutput,
    ProcessReport,
    Pulse,
    UnreadableMessage,
    Welcome,
    Withdrawal,
    decode_from_host,
    encode,
)

Messages = AsyncIterator[FromHost | UnreadableMessage]
PARTING_S = 2.0
"""A host that was sent away ends the call itself; for so long it is waited for."""


class HostsService:
    """`greet` is the Welcome of this launch; `blobs`: its files, named by digest; `write` takes output of a
    process, `settle` what a worker found out for all, `agree` what a script decides for all."""

    def __init__(
        self, fleet: FleetEngine, greet: Welcome, blobs: Path, versions: dict[str, str],
        write: Callable[[str, bytes], None], settle: Callable[[bytes], bytes], agree: Callable[[bytes], bytes],
    ) -> None:  # fmt: skip
        self._fleet, self._greet, self._blobs, self._versions, self._write = fleet, greet, blobs, versions, write
        self._settle, self._agree = settle, agree
        self._files = {one.digest for one in greet.files}

    def make_handler(self) -> Any:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Join": grpc.stream_stream_rpc_method_handler(self._join, decode_from_host, encode),
                "Settle": grpc.unary_unary_rpc_method_handler(self._answer_settle, bytes, bytes),
                "Agree": grpc.unary_unary_rpc_method_handler(self._answer_agree, bytes, bytes),
                "Fetch": grpc.unary_stream_rpc_method_handler(self._fetch, bytes, bytes),
            },
        )

    async def _fetch(self, digest: bytes, context: Any) -> AsyncIterator[bytes]:
        name = digest.decode("ascii", "replace")
        if name not in self._files:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no file of this job has this digest")
        with (self._blobs / name).open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk

    async def _answer_settle(self, data: bytes, context: Any) -> bytes:
        return self._settle(data)

    async def _answer_agree(self, data: bytes, context: Any) -> bytes:
        return self._agree(data)

    async def _join(self, messages: Messages, context: Any) -> AsyncIterator[FromMaster]:
        greeting = await anext(messages, None)
        if isinstance(greeting, UnreadableMessage):
            fault = self._describe_unreadable(greeting)
            self._fleet.refuse(Greeting(id="", name=context.peer(), address=context.peer(), versions={}), fault)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, fault)
        if not isinstance(greeting, Greeting):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a host begins with its greeting")
            return
        if fault := find_version_fault(self._versions, greeting.versions):
            self._fleet.refuse(greeting, fault)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, fault)
        host = self._fleet.connect(greeting)
        orders = host.orders
        assert orders is not None
        reading = asyncio.ensure_future(self._read(host, messages, orders))
        try:
            yield self._greet
            while (order := await orders.get()) is not None:
                yield order
                if isinstance(order, Dismissal):
                    host.leaving = True
                    await asyncio.wait([reading], timeout=PARTING_S)  # grpc.aio drops what it reads after the end
                    return
        finally:
            reading.cancel()
            self._fleet.disconnect(host, orders)

    def _describe_unreadable(self, message: UnreadableMessage) -> str:
        ours = self._versions.get("trueline", "")
        return f"its messages are of another version of Trueline than {ours}, which the job runs on: {message.why}"

    async def _read(self, host: Host, messages: Messages, orders: asyncio.Queue[FromMaster | None]) -> None:
        with contextlib.suppress(grpc.aio.UsageError):  # the call has ended
            async for message in messages:
                if host.orders is not orders:
                    break
                if isinstance(message, UnreadableMessage):
                    host.send(Dismissal(self._describe_unreadable(message)))
                    break
                self._take(host, message)
        orders.put_nowait(None)

    def _take(self, host: Host, message: FromHost) -> None:
        fleet = self._fleet
        match message:
            case CoresOffer():
                fleet.hear(host)
                fleet.accept_offer(host, message)
            case Pulse() as pulse:
                fleet.hear(host, pulse.load)
                fleet.note_clock(host, pulse.off_s)
                host.send(Pulse(sent_at=pulse.sent_at, clock=time.time()))
            case ProcessReport(seen):
                fleet.report(host, seen)
            case ProcessOutput(ref, data):
                if ref in host.processes:
                    self._write(ref, data)
            case Withdrawal():
                fleet.withdraw(host)
            case Greeting():
                return


def find_version_fault(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """What keeps a host of these versions out; empty: nothing.

    >>> find_version_fault({"trueline": "1.2", "torch": "2.13"}, {"trueline": "1.1", "torch": "2.13"})
    'the host has trueline 1.1, and the job runs on trueline 1.2'
    """
    for name, version in ours.items():
        if theirs.get(name) != version:
            has = f"{name} {theirs[name]}" if theirs.get(name) else f"no {name}"
            return f"the host has {has}, and the job runs on {name} {version}"
    return ""
