"""Several server processes on the same ports: the parent that starts them, replaces what dies, and stops them.

Each process listens with SO_REUSEPORT, and the kernel spreads connections among them; each loads and checks every
version by itself, and follows the state file, so that an act of management on one reaches all. Weights are mapped from
files in one folder, which is this server's and goes with it. The first process listens while it loads, so that it can
be asked whether it lives; those that join it listen when they are ready. The parent answers nobody and holds the ports:
a number that the system chose stays the same when every process is replaced. Metrics are each process's own; with a
metrics port the processes take that one and those after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trueline import events
from trueline.errors import TruelineError
from trueline.serve.child_process import rebuild_error
from trueline.serve.handlers.workdir import WEIGHTS, WorkDir
from trueline.serve.process.signals import Stop
from trueline.serve.settings import ServeSettings, to_arguments
from trueline.web.sockets import listen

READY_S = 300.0
_PAUSE_S = (0.1, 1.0, 5.0, 30.0)
"""Before a process that died is started again, by how often it died without having been ready."""


async def run(settings: ServeSettings, announce: Callable[[dict[str, Any]], None]) -> None:
    """Serves until told to stop. Raises what the first process would have raised."""
    stop = Stop()
    stop.listen(asyncio.get_running_loop(), lifeline=settings.lifeline)
    with contextlib.ExitStack() as held:
        each = held.enter_context(_fix_ports(settings))
        children = [_Child(_of(each, number)) for number in range(settings.processes)]
        try:
            record = await _unless(stop, children[0].start())
            if record is None:
                return
            for one in children:
                one.resume()
            await _unless(stop, asyncio.gather(*(one.start() for one in children[1:])))
            if not stop.asked.is_set():
                announce(record | {"processes": len(children)})
            keepers = [asyncio.ensure_future(one.keep()) for one in children]
            await stop.asked.wait()
            for keeper in keepers:
                keeper.cancel()
        finally:
            await asyncio.gather(*(one.end(settings.drain_s + 5.0, stop) for one in children))


@contextlib.contextmanager
def _fix_ports(settings: ServeSettings) -> Iterator[ServeSettings]:
    """The settings with every port a number, which stays ours, and a state file if versions are managed."""
    with contextlib.ExitStack() as held:
        fixed: dict[str, Any] = {}
        for name in ("port", "management_port", "grpc_port", "grpc_management_port"):
            wanted = getattr(settings, name)
            if wanted is not None:
                fixed[name] = _hold(settings, wanted, held)
        if settings.management_port is not None and settings.state is None:
            folder = Path(tempfile.mkdtemp(prefix="trueline-state-"))
            held.callback(shutil.rmtree, folder, ignore_errors=True)
            fixed["state"] = str(folder / "served.json")
        weights = WorkDir(prefix=WEIGHTS)
        held.callback(weights.remove)
        fixed["shared_weights"] = str(weights.folder)
        fixed["most_threads"] = max(1, len(os.sched_getaffinity(0)) // settings.processes)
        yield replace(settings, processes=1, shared=True, lifeline=True, **fixed)


def _hold(settings: ServeSettings, port: int, held: contextlib.ExitStack) -> int:
    """The number of a port that nobody else can take; this process does not listen on it."""
    if port:  # in use by others? then say so now, in words
        listen(settings.host, port, guarded=settings.guarded).close()
    probe = listen(settings.host, port, guarded=settings.guarded, shared=True)
    address, family = probe.getsockname(), probe.family
    held_one = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    held_one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held_one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held_one.bind(address)
    probe.close()
    return int(address[1])


def _of(settings: ServeSettings, number: int) -> ServeSettings:
    port = settings.metrics_port
    return replace(settings, metrics_port=port + number) if port else settings


async def _unless(stop: Stop, work: Any) -> Any:
    """What `work` brings, or None when the server is told to stop before."""
    task = asyncio.ensure_future(work)
    asked = asyncio.ensure_future(stop.asked.wait())
    await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if task.done():
        return task.result()
    task.cancel()
    return None


class _Child:
    """One server process."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None

    def resume(self) -> None:
        """From now on it begins with what the state file says, if there is one, and joins those that answer."""
        self._settings = replace(self._settings, resumed=self._settings.state is not None, joins=True)

    async def start(self) -> dict[str, Any]:
        """Returns its record when it is ready. Raises what it says, TruelineError when it says nothing."""
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-P", "-m", "trueline.serve", *to_arguments(self._settings))
        process = self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), READY_S)
        except TimeoutError:
            raise TruelineError(f"a server process was not ready within {READY_S:g} s") from None
        if not line:
            raise TruelineError(f"a server process ended with code {await process.wait()} before it was ready")
        record: dict[str, Any] = json.loads(line)
        if record["event"] != "server.ready":
            raise rebuild_error(record["code"], record)
        events.emit("process.ready", pid=process.pid)
        return record

    async def keep(self) -> None:
        """Starts it again whenever it ends, until this is cancelled."""
        failures = 0
        while True:
            assert self._process is not None
            code = await self._process.wait()
            pause_s = _PAUSE_S[min(failures, len(_PAUSE_S) - 1)]
            events.emit("process.ended", pid=self._process.pid, code=code, again_in_s=pause_s)
            await asyncio.sleep(pause_s)
            try:
                await self.start()
                failures = 0
            except TruelineError as error:
                failures += 1
                events.emit("process.failed", why=error.message)

    async def end(self, timeout_s: float, stop: Stop) -> None:
        """Asks it to drain; kills it after `timeout_s`, or when the stop is urgent."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        ended, hurried = asyncio.ensure_future(process.wait()), asyncio.ensure_future(stop.hurried.wait())
        await asyncio.wait({ended, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await ended
