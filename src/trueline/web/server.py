"""All connections of one App: their number, their time limits, their end."""

from __future__ import annotations

import asyncio

from trueline.web.connection import Connection
from trueline.web.header_cache import HeaderCache
from trueline.web.limits import HttpLimits
from trueline.web.messages import App, date_line


class HttpServer:
    """The connections of one App; as a callable, the protocol factory of `loop.create_server`."""

    def __init__(self, app: App, limits: HttpLimits, loop: asyncio.AbstractEventLoop) -> None:
        self.app = app
        self.limits = limits
        self.loop = loop
        self.draining = False
        self.header_cache = HeaderCache()
        self.date = date_line()
        self._connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def __call__(self) -> Connection:
        return Connection(self)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def admit(self, connection: Connection) -> bool:
        self._connections.add(connection)
        self._empty.clear()
        return len(self._connections) <= self.limits.connections

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def sweep(self) -> None:
        """Ends every connection that is over a time limit; to be called about once a second."""
        self.date = date_line()
        now = self.loop.time()
        for connection in tuple(self._connections):
            connection.sweep(now)

    async def drain(self) -> None:
        """Returns when every request that had begun is answered and every connection is closed."""
        self.draining = True
        for connection in tuple(self._connections):
            connection.drain()
        await self._empty.wait()
