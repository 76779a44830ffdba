"""When a server process is stopped: signals, and the lifeline to its parent."""

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable
from typing import Any, TypeVar

from trueline import events

T = TypeVar("T")


class Stop:
    """The first signal asks the server to drain, the second to hurry."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()

    def ask(self, why: str) -> None:
        if self.asked.is_set():
            self.hurried.set()
        else:
            events.emit("server.draining", why=why)
            self.asked.set()

    def listen(self, loop: asyncio.AbstractEventLoop, *, lifeline: bool) -> None:
        if threading.current_thread() is threading.main_thread():
            for one in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(one, self.ask, one.name)
        if lifeline:
            loop.add_reader(0, self._read_lifeline, loop)

    def _read_lifeline(self, loop: asyncio.AbstractEventLoop) -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            if not self.asked.is_set():  # a signal may have reached parent and process: only a second one hurries
                self.ask("the parent process stops, or is gone")

    async def unless(self, work: Awaitable[T]) -> T | None:
        """The result of `work`; it is cancelled and None returned when the server is stopped before."""
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self.asked.wait())
        both: set[asyncio.Future[Any]] = {task, asked}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if task.done():
            return task.result()
        task.cancel()
        return None

    async def wait_unless_hurried(self, work: asyncio.Future[Any], timeout_s: float) -> None:
        hurried = asyncio.ensure_future(self.hurried.wait())
        both: set[asyncio.Future[Any]] = {work, hurried}
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
