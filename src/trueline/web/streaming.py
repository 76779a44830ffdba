"""An answer that comes in pieces: written by who answers, read by one connection or call. Both live on the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

MAX_AHEAD_BYTES = 64 * 2**20
"""What may wait for a client that reads slowly. A handler cannot be paused, so its answer is given up beyond that."""


class StreamBroken(Exception):
    """The answer ended in the middle: its handler failed, or the client read too slowly."""


class StreamedBody:
    """What follows the head of an answer."""

    def __init__(self, stop: Callable[[], None], *, max_ahead_bytes: int = MAX_AHEAD_BYTES) -> None:
        """`stop` is called when nobody reads on before the end."""
        self._stop = stop
        self._max_ahead = max_ahead_bytes
        self._ready: list[bytes | bytearray] = []
        self._ahead = 0
        self._wake: Callable[[], None] | None = None
        self.over = False
        """Whether all has been written; `take` may have some of it still."""
        self.torn = False

    # who writes

    def add(self, piece: bytes | bytearray) -> None:
        """One more piece; nothing after the end."""
        if self.over or not piece:
            return
        self._ready.append(piece)
        self._ahead += len(piece)
        if self._ahead > self._max_ahead:
            self.end(torn=True)
            self._stop()
        elif self._wake is not None:
            self._wake()

    def end(self, *, torn: bool = False) -> None:
        """That was all; `torn`: and it was not whole."""
        if self.over:
            return
        self.over, self.torn = True, torn
        if self._wake is not None:
            self._wake()

    # who reads

    def listen(self, wake: Callable[[], None]) -> None:
        """`wake` is called when there is more to take, or the end."""
        self._wake = wake

    def take(self) -> list[bytes | bytearray]:
        """What came since the last time."""
        found, self._ready, self._ahead = self._ready, [], 0
        return found

    def drop(self) -> None:
        """The reader has gone."""
        self._wake = None
        if not self.over:
            self.end(torn=True)
            self._stop()

    async def each(self) -> AsyncIterator[bytes | bytearray]:
        """The pieces one after the other. Raises Torn."""
        more = asyncio.Event()
        self.listen(more.set)
        try:
            while True:
                more.clear()
                over = self.over  # as of what is taken now: more may come, and the end, while a piece is on its way
                for piece in self.take():
                    yield piece
                if over and self.torn:
                    raise StreamBroken
                if over:
                    return
                await more.wait()
        finally:
            self.drop()

    async def whole(self) -> bytes:
        """All pieces as one. Raises Torn."""
        return b"".join([piece async for piece in self.each()])
