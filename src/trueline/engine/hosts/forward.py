"""The door of a joined host to the job's master: a port on the loopback that passes bytes on to whichever host leads.

Workers of the host dial it for as long as they live, so a new master needs no new workers. TLS stays between the worker
and the master, whose certificate names no address.
"""

import asyncio
import contextlib

from trueline.engine.hosts.route import split_address

_PIECE = 1 << 16
_CONNECT_S = 2.0


class MasterDoor:
    """`target`: the master's HOST:PORT."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = ""
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def turn(self, target: str) -> None:
        """Leads to `target` from now on. Connections to the master of before end, and those who dialled dial again."""
        if target != self.target:
            self.target = target
            for passing in self._open:
                passing.cancel()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for passing in self._open:
            passing.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
                await self._pass_on(reader, writer)
        finally:
            self._open.discard(task)
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = split_address(self.target)
        there, back = await asyncio.wait_for(asyncio.open_connection(host, port), _CONNECT_S)
        try:
            ways = [asyncio.ensure_future(_copy(reader, back)), asyncio.ensure_future(_copy(there, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            back.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()
