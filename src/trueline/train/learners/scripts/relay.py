"""The socket of a learner by which its script's processes reach the master: each connection goes there over TLS."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from trueline.engine.hosts.messages import CERTIFICATE_NAME
from trueline.train.learners import messages


class MemberRelay:
    """`generation`: of the group that runs; connections of an earlier one are refused by the master."""

    def __init__(
        self, path: Path, master: tuple[str, int], context: ssl.SSLContext, hello: messages.LearnerHello
    ) -> None:
        self._path, self._master, self._context, self._hello = path, master, context, hello
        self._tasks: set[asyncio.Task[None]] = set()
        self.generation = 0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._accept, self._path)
        self._path.chmod(0o600)
        try:
            yield
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._tunnel(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tunnel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(
                *self._master, ssl=self._context, server_hostname=CERTIFICATE_NAME
            )
        except OSError:
            writer.close()
            return
        messages.send(back, msgspec.structs.replace(self._hello, tunnel=True, generation=self.generation))
        copies = [asyncio.ensure_future(_copy(reader, back)), asyncio.ensure_future(_copy(there, writer))]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)  # either end ends the other
        finally:
            for task in copies:
                task.cancel()
            for end in (writer, back):
                end.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, EOFError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
