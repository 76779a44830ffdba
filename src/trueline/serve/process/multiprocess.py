"""The parent of several server processes on the same ports: starts them, replaces dead ones, and stops them.

Each process listens with SO_REUSEPORT, loads and proves every version, and follows the state file, so that management
requests to one process reach all. Weights are mapped from files in one temporary folder. The first process listens
while it loads, the others when they are ready. The parent holds the ports, so that their numbers stay. Each process has
its own metrics; with a metrics port they use it and the numbers after it.
"""

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
from trueline.errors import TruelineError, rebuild_error
from trueline.serve import host
from trueline.serve.handlers.workdir import WEIGHTS, WorkDir
from trueline.serve.process.signals import Stop
from trueline.serve.settings import ServeSettings, to_arguments
from trueline.web.sockets import listen

READY_S = 300.0
_PAUSE_S = (0.1, 1.0, 5.0, 30.0)  # before a restart, by the number of failed restarts before it


async def run(settings: ServeSettings, announce: Callable[[dict[str, Any]], None]) -> None:
    """Serves until it is stopped. Raises the error of the first process."""
    stop = Stop()
    stop.listen(asyncio.get_running_loop(), lifeline=settings.lifeline)
    with contextlib.ExitStack() as held:
        each = held.enter_context(_fix_ports(settings))
        port = each.metrics_port
        every = [replace(each, metrics_port=port + n) if port else each for n in range(settings.processes)]
        children = [_Child(one) for one in every]
        try:
            record = await stop.unless(children[0].start())
            if record is None:
                return
            for one in children:
                one.resume()
            await stop.unless(asyncio.gather(*(one.start() for one in children[1:])))
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
    """The settings with held ports, and with a state file if versions are managed."""
    with contextlib.ExitStack() as held:
        fixed: dict[str, Any] = {}
        for name in ("port", "management_port", "grpc_port", "grpc_management_port"):
            port = getattr(settings, name)
            if port is not None:
                fixed[name] = _hold(settings, port, held)
        if settings.management_port is not None and settings.state is None:
            folder = Path(tempfile.mkdtemp(prefix="trueline-state-"))
            held.callback(shutil.rmtree, folder, ignore_errors=True)
            fixed["state"] = str(folder / "served.json")
        weights = WorkDir(prefix=WEIGHTS)
        held.callback(weights.remove)
        fixed["shared_weights"] = str(weights.folder)
        fixed["most_threads"] = max(1, len(os.sched_getaffinity(0)) // settings.processes)
        memory = host.run_memory_of(processes=settings.processes)
        fixed["run_memory_bytes"] = settings.run_memory_bytes // settings.processes or memory
        yield replace(settings, processes=1, shared=True, lifeline=True, **fixed)


def _hold(settings: ServeSettings, port: int, held: contextlib.ExitStack) -> int:
    """The number of a port that no other server can take; this process does not listen on it."""
    if port:  # raises PortInUse
        listen(settings.host, port, guarded=settings.guarded).close()
    probe = listen(settings.host, port, guarded=settings.guarded, shared=True)
    address, family = probe.getsockname(), probe.family
    held_one = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    held_one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held_one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held_one.bind(address)
    probe.close()
    return int(address[1])


class _Child:
    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None

    def resume(self) -> None:
        """From now on it starts from the state file, if there is one, and listens when it is ready."""
        self._settings = replace(self._settings, resumed=self._settings.state is not None, joins=True)

    async def start(self) -> dict[str, Any]:
        """Returns its record when it is ready. Raises its error, else TruelineError."""
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
        """Restarts it whenever it ends, until cancelled."""
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
        """Lets it drain; kills it after `timeout_s`, or at a second stop."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        ended = asyncio.ensure_future(process.wait())
        await stop.wait_unless_hurried(ended, timeout_s)
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await ended
