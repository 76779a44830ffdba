"""When a server process is to end: signals, and the lifeline to the process that started it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

from trueline import events


class Stop:
    """Signals and the lifeline, as two moments: stop, and stop now."""

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
            self.ask("the parent process is gone")
