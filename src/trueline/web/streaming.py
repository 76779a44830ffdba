"""The body of a streamed response: a handler writes its pieces, one connection or call reads them, both on the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

MAX_AHEAD_BYTES = 64 * 2**20
"""Buffered for a slow client. A handler cannot be paused, so its response is given up beyond this."""


class StreamBroken(Exception):
    """The response ended early: its handler failed, or the client read too slowly."""


class StreamedBody:
    def __init__(self, stop: Callable[[], None], *, max_ahead_bytes: int = MAX_AHEAD_BYTES) -> None:
        """`stop` is called when the reader leaves before the end."""
        self._stop = stop
        self._max_ahead = max_ahead_bytes
        self._ready: list[bytes | bytearray] = []
        self._ahead = 0
        self._wake: Callable[[], None] | None = None
        self.over = False
        """Whether the writer has ended; `take` may still return pieces."""
        self.torn = False

    # the writer's side

    def add(self, piece: bytes | bytearray) -> None:
        """Adds a piece; does nothing after the end."""
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
        """Ends the body; `torn`: it is not complete."""
        if self.over:
            return
        self.over, self.torn = True, torn
        if self._wake is not None:
            self._wake()

    # the reader's side

    def listen(self, wake: Callable[[], None]) -> None:
        """Calls `wake` when there are pieces to take, and at the end."""
        self._wake = wake

    def take(self) -> list[bytes | bytearray]:
        """The pieces since the last call."""
        pieces, self._ready, self._ahead = self._ready, [], 0
        return pieces

    def drop(self) -> None:
        """The reader leaves."""
        self._wake = None
        if not self.over:
            self.end(torn=True)
            self._stop()

    async def each(self) -> AsyncIterator[bytes | bytearray]:
        """The pieces as they come. Raises StreamBroken."""
        more = asyncio.Event()
        self.listen(more.set)
        try:
            while True:
                more.clear()
                over = self.over  # read before `take`: more pieces and the end may come while one is sent
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
        """All pieces joined. Raises StreamBroken."""
        return b"".join([piece async for piece in self.each()])
