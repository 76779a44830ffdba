"""Waiting for another process, thread or task that gives no event.

The only place of the tests that polls: with a small pause, and with a limit that only a hanging test reaches.
Where there is an event (a line of a pipe, a lock, an `asyncio.Event`), wait for that instead.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

LIMIT_S = 200.0
"""Below the limit of a test, so that the error says what was waited for."""


def until(condition: Callable[[], T], what: str | Callable[[], object]) -> T:
    """The first true result of `condition`. Raises AssertionError that names `what` was expected."""
    for pause_s in _pauses(what):
        if found := condition():
            return found
        time.sleep(pause_s)
    raise AssertionError("unreachable")


async def until_async(condition: Callable[[], T], what: str | Callable[[], object]) -> T:
    """As `until`, while the tasks of the loop continue."""
    for pause_s in _pauses(what):
        if found := condition():
            return found
        await asyncio.sleep(pause_s)
    raise AssertionError("unreachable")


async def until_reached(ask: Callable[[], Awaitable[T]], what: str | Callable[[], object]) -> T:
    """The first answer of `ask`, which raises ConnectionError as long as nothing listens."""
    for pause_s in _pauses(what):
        try:
            return await ask()
        except ConnectionError:
            await asyncio.sleep(pause_s)
    raise AssertionError("unreachable")


async def until_told(ask: Callable[[], Awaitable[T]], what: str | Callable[[], object]) -> T:
    """The first true answer of `ask`."""
    for pause_s in _pauses(what):
        if found := await ask():
            return found
        await asyncio.sleep(pause_s)
    raise AssertionError("unreachable")


def _pauses(what: str | Callable[[], object]) -> Iterator[float]:
    ends, pause_s = time.monotonic() + LIMIT_S, 0.001
    while time.monotonic() < ends:
        yield pause_s
        pause_s = min(1.5 * pause_s, 0.05)
    raise AssertionError(f"not within {LIMIT_S:g} s: {what() if callable(what) else what}")


def until_ended(pids: Iterable[int]) -> None:
    """Returns once these processes have ended. Their parent, which may be another process, may reap them later."""
    for pid in pids:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                assert select.select([handle], [], [], LIMIT_S)[0], (
                    f"not within {LIMIT_S:g} s: the end of process {pid}"
                )
            finally:
                os.close(handle)
