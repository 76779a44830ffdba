"""An HTTP/1.1 server of one App: keep-alive, pipelining, backpressure, time limits.

`parser` makes requests of bytes; an App answers each, at once or by a future; responses are sent in order. A client
that closes its side counts as gone, and its request is cancelled. Why not a ready-made server:
docs/decisions/0004-http-stack.md. Sources: RFC 9110, RFC 9112.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice

from trueline.web.admission import Shared
from trueline.web.connection import Connection
from trueline.web.messages import App, date_line
from trueline.web.origin import PageRule
from trueline.web.parser import HttpLimits

SWEPT_IN_A_TURN = 128


class HttpServer(Shared[Connection]):
    """The connections of one App; as a callable, the protocol factory of `loop.create_server`."""

    def __init__(
        self,
        app: App,
        limits: HttpLimits,
        loop: asyncio.AbstractEventLoop,
        *,
        is_vital: Callable[[str], bool] = lambda path: False,
        pages: PageRule | None = None,
    ) -> None:
        """Requests to the paths that `is_vital`, such as health checks, are answered with all connections in use.

        `pages`: which web pages may send requests; None: all, since clients need a token.
        """
        super().__init__(app, limits, loop, is_vital, pages)

    def __call__(self) -> Connection:
        return Connection(self)

    @property
    def num_connections(self) -> int:
        return len(self.connections)

    def sweep(self) -> None:
        """Ends every connection that is over a time limit; to be called about once a second.

        Requests have their turn between some connections and the next: all at once took 12 ms for 2,000.
        """
        self.date = date_line()
        self._sweep_some(iter(tuple(self.connections)))

    def _sweep_some(self, connections: Iterator[Connection]) -> None:
        now, some = self.loop.time(), tuple(islice(connections, SWEPT_IN_A_TURN))
        for connection in some:
            connection.sweep(now)
        if len(some) == SWEPT_IN_A_TURN:
            self.loop.call_soon(self._sweep_some, connections)

    async def drain(self) -> None:
        """Returns when every request that had begun is answered and every connection is closed."""
        self.draining = True
        for connection in tuple(self.connections):
            connection.drain()
        await self.empty.wait()
