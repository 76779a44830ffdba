"""The master's side of one server: requests over one connection, which is made when it is needed."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from trueline.ps.dial import MAC, NONCE, ServerAddress, answer_challenge, make_greeting, short_path
from trueline.ps.messages import ModelSpec, Routing, Runs, ServerReport
from trueline.ps.wire import (
    HEAD,
    Array,
    BeginCut,
    Call,
    Configure,
    EndCut,
    ExportRequest,
    Failure,
    FrameError,
    Moved,
    ReceivedFrame,
    SaveRequest,
    decode,
    encode,
    measure,
    rebuild_failure,
)

TIMEOUT_S = 10.0
_LIMIT = 1 << 20


class ServerLink:
    """Requests may be made at the same time. They raise OSError (TimeoutError, ConnectionError) while the server is
    away, and the TruelineError with which it refuses. After the end of a connection the next request makes another."""

    def __init__(self, addresses: Callable[[str], ServerAddress | None], ref: str, secret: bytes) -> None:
        """`ref`: `server-SLOT`."""
        self.ref = ref
        self._addresses, self._secret = addresses, secret
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[ReceivedFrame]] = {}
        self._number = 0
        self._connecting = asyncio.Lock()

    async def stats(self, timeout_s: float = TIMEOUT_S) -> ServerReport:
        return (await self.request(Call.STATS, timeout_s=timeout_s)).read(ServerReport)

    async def configure(
        self,
        spec: ModelSpec,
        routing: Routing,
        restore: tuple[str, ...] = (),
        *,
        fresh: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        """May be repeated. `restore`: the files of all servers of a checkpoint, from which it takes its part; `fresh`:
        it forgets what it holds."""
        await self.request(Call.CONFIGURE, Configure(spec, routing, restore, fresh), timeout_s=timeout_s)

    async def begin_cut(self, id: int, keys: Mapping[int, Runs], timeout_s: float = 60.0) -> None:
        """Returns when the server has applied `keys`. The cut ends with `end_cut`, and when this connection does."""
        await self.request(Call.BEGIN_CUT, BeginCut(id, dict(keys)), timeout_s=timeout_s)

    async def end_cut(self, id: int, timeout_s: float = TIMEOUT_S) -> None:
        await self.request(Call.END_CUT, EndCut(id), timeout_s=timeout_s)

    async def save(self, path: str, timeout_s: float = TIMEOUT_S) -> None:
        """Has the state of this moment written; returns at once."""
        await self.request(Call.SAVE, SaveRequest(path), timeout_s=timeout_s)

    async def wait_saved(self, path: str, timeout_s: float = 600.0) -> None:
        """Returns when the file that `save` began is on the disk."""
        await self.request(Call.SAVED, SaveRequest(path), timeout_s=timeout_s)

    async def export(self, buckets: Sequence[int], timeout_s: float = 60.0) -> tuple[Any, list[Array]]:
        """The rows of buckets, for `take` of another server; they stay until a routing gives them to it."""
        frame = await self.request(Call.EXPORT, ExportRequest(tuple(buckets)), timeout_s=timeout_s)
        return msgspec.msgpack.decode(frame.read(Moved).header), frame.arrays

    async def take(self, header: Any, arrays: Sequence[Array], timeout_s: float = 60.0) -> None:
        body = Moved(msgspec.Raw(msgspec.msgpack.encode(header)))
        await self.request(Call.TAKE, body, arrays, timeout_s=timeout_s)

    async def route(self, routing: Routing, timeout_s: float = 60.0) -> None:
        await self.request(Call.ROUTE, routing, timeout_s=timeout_s)

    async def stop(self, timeout_s: float = TIMEOUT_S) -> None:
        await self.request(Call.STOP, timeout_s=timeout_s)

    async def request(
        self, kind: Call, body: object = None, arrays: Sequence[Array] = (), *, timeout_s: float
    ) -> ReceivedFrame:
        """The reply; its arrays are its own."""
        async with asyncio.timeout(timeout_s):
            async with self._connecting:
                if self._writer is None:
                    await self._connect()
            assert self._writer is not None
            self._number = (self._number + 1) & 0xFFFFFFFF
            number = self._number
            reply: asyncio.Future[ReceivedFrame] = asyncio.get_running_loop().create_future()
            self._waiting[number] = reply
            try:
                for piece in encode(kind, number, body, arrays):
                    self._writer.write(piece)
                await self._writer.drain()
                frame = await reply
            finally:
                self._waiting.pop(number, None)
        if frame.kind is Call.ERROR:
            raise rebuild_failure(frame.read(Failure))
        return frame

    async def _connect(self) -> None:
        address = self._addresses(self.ref)
        if address is None:
            raise ConnectionError(f"{self.ref} has not begun to listen")
        where = address.preferred
        if where.startswith("/"):
            name, folder = short_path(where)
            try:
                reader, writer = await asyncio.open_unix_connection(name, limit=_LIMIT)
            finally:
                os.close(folder)
        else:
            host, _, port = where.rpartition(":")
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=_LIMIT)
        try:
            greeting = make_greeting()
            writer.write(greeting)
            answer = await reader.readexactly(NONCE + MAC)
            writer.write(answer_challenge(self._secret, where, greeting, answer))
            await reader.readexactly(1)
        except asyncio.IncompleteReadError as error:
            writer.close()
            raise FrameError(f"{self.ref} closed the connection: it has another secret, or it is ending") from error
        except BaseException:
            writer.close()
            raise
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader, writer))

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readexactly(HEAD.size)
                data = bytearray(head + await reader.readexactly(measure(head) - HEAD.size))
                frame = decode(memoryview(data))
                reply = self._waiting.get(frame.number)
                if reply is not None and not reply.done():
                    reply.set_result(frame)
        except (OSError, asyncio.IncompleteReadError) as error:
            self._lose(writer, ConnectionError(f"{self.ref} is gone: {error}"))

    def _lose(self, writer: asyncio.StreamWriter, error: ConnectionError) -> None:
        writer.close()
        if self._writer is writer:
            self._writer = None
            for reply in self._waiting.values():
                if not reply.done():
                    reply.set_exception(error)

    async def close(self) -> None:
        """Ends the connection, and with it a cut."""
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
        if self._writer is not None:
            self._lose(self._writer, ConnectionError(f"the connection to {self.ref} was closed"))
