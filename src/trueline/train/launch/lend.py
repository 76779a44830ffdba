"""Lends this machine's cores until the job ends, a signal takes them back, or what has started this process ends."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

from trueline.engine.hosts.relay import Relay


async def lend(relay: Relay, *, piped: bool = False, until: Callable[[], Awaitable[str]] | None = None) -> str:
    """Returns why this host does not lend its cores any more. `piped`: the end of stdin ends it; `until`: its return
    does, with a reason. The first SIGINT or SIGTERM lets the workers leave between two steps, the second ends them."""
    loop = asyncio.get_running_loop()
    lending = asyncio.ensure_future(relay.run())
    why = "its workers were ended at once"

    def stop() -> None:
        if not relay.withdraw():
            lending.cancel()

    def read_end() -> None:
        if not os.read(0, 1 << 10):
            loop.remove_reader(0)
            if relay.is_led_from_start:  # else the host that began the job is dead, and another one leads
                lending.cancel()

    async def watch(over: Callable[[], Awaitable[str]]) -> None:
        nonlocal why
        why = await over()
        lending.cancel()

    if piped:
        loop.add_reader(0, read_end)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    watching = asyncio.ensure_future(watch(until)) if until is not None else None
    try:
        return await lending
    except asyncio.CancelledError:
        return why
    finally:
        if watching is not None:
            watching.cancel()
