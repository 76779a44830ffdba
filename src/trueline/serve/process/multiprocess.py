"""The parent of several server processes on the same ports: starts them, replaces dead ones, and stops them.

Each process listens with SO_REUSEPORT, loads and proves every version, and follows the state file, so that management
requests to one process reach all. Weights are mapped from files in one temporary folder. The first process listens
while it loads, the others when they are ready. The parent holds the ports, so that their numbers stay. Each process has
its own metrics; with a metrics port they use it and the numbers after it.

A process that ends without a reason (a signal, lack of memory, a crash) is started again after a growing pause, whether
it was loading or serving. One that reports why it cannot serve (a wrong option, a damaged bundle) ends the start with
that reason. After the start only a stop ends the parent; a process that fails is tried again while the others serve.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec

from trueline import events
from trueline.errors import RegistryError, ServerFault, StorageError, TruelineError, rebuild_error
from trueline.files import TemporaryFolder
from trueline.serve import host
from trueline.serve.process.signals import Stop
from trueline.serve.settings import ServeSettings, to_arguments
from trueline.web.sockets import listen

READY_S = 300.0
"""A process has this long to become ready, and more if the first one needed more than a third of it."""
START_ATTEMPTS = 4
"""After this number of attempts a server of which no process serves is given up, and another one is announced
with fewer processes."""
COMMAND = (sys.executable, "-P", "-m", "trueline.serve")
_PAUSE_S = (0.1, 1.0, 5.0, 30.0)  # before a restart, by the number of failed attempts before it


class ProcessEnded(TruelineError):
    """A server process ended, or hung, and said no reason."""

    code = "process_ended"


def may_pass(error: TruelineError) -> bool:
    """Whether a process that failed with `error` may become ready when it is started again."""
    return isinstance(error, ProcessEnded | StorageError | RegistryError | ServerFault)


async def run(settings: ServeSettings, announce: Callable[[dict[str, Any]], None]) -> None:
    """Serves until it is stopped.

    Raises the error that a process reports while the server starts; ProcessEnded if none became ready in
    START_ATTEMPTS attempts, and at the stop if a process was failing or lost requests that it had accepted.
    """
    stop = Stop()
    stop.listen(asyncio.get_running_loop(), lifeline=settings.lifeline)
    with contextlib.ExitStack() as held:
        each = held.enter_context(_fix_ports(settings))
        port = each.metrics_port
        every = [replace(each, metrics_port=port + n) if port else each for n in range(settings.processes)]
        children = [_Child(one) for one in every]
        keepers: list[asyncio.Task[None]] = []
        try:
            record = await stop.unless(children[0].begin())
            if record is None:
                return
            for one in children:
                one.resume(children[0].took_s)
            keepers.append(asyncio.create_task(children[0].keep()))
            rest = asyncio.gather(*(one.begin_beside() for one in children[1:]))
            if await stop.unless(rest) is not None:
                announce(record | {"processes": sum(not one.why for one in children)})
                keepers += [asyncio.create_task(one.keep()) for one in children[1:]]
                await stop.asked.wait()
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await asyncio.gather(*(one.end(settings.drain_s + 5.0, stop) for one in children))
    failed = [one.why for one in children if one.failing]
    if failed:
        raise ProcessEnded(f"{len(failed)} of {len(children)} server processes failed: {failed[0]}")


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
            place = TemporaryFolder("state")
            held.callback(place.remove)
            fixed["state"] = str(place.path / "served.json")
        weights = TemporaryFolder("weights")
        held.callback(weights.remove)
        fixed["shared_weights"] = str(weights.path)
        fixed["siblings"] = settings.processes
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
    """One server process, and those that replace it."""

    def __init__(self, settings: ServeSettings) -> None:
        self.why = "a server process that was not started yet"
        """Why it does not serve; empty when it does."""
        self.took_s = 0.0
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._ready_s: float | None = None
        """The limit of a start; None for the first process: how long its models need is not known yet."""
        self._failures = 0
        self._lost = False

    @property
    def failing(self) -> bool:
        """Whether it could not be started again, or lost requests while it drained."""
        return self._failures > 0 or self._lost

    def resume(self, first_took_s: float) -> None:
        """From now on it starts from the state file, if there is one, and listens when it is ready."""
        self._settings = replace(self._settings, resumed=self._settings.state is not None, joins=True)
        self._ready_s = max(READY_S, 3 * first_took_s)

    async def begin(self) -> dict[str, Any]:
        """The record of the process that becomes ready. Raises its error, ProcessEnded after START_ATTEMPTS."""
        while True:
            try:
                return await self._start()
            except TruelineError as error:
                if not may_pass(error) or self._failures >= START_ATTEMPTS:
                    raise
                await self._pause()

    async def begin_beside(self) -> None:
        """As `begin`, while another process serves: what may pass is left to `keep`. Raises its error."""
        try:
            await self.begin()
        except TruelineError as error:
            if not may_pass(error):
                raise

    async def keep(self) -> None:
        """Restarts it whenever it ends, until cancelled."""
        while True:
            if self._process is not None and not self.why:
                code = await self._process.wait()
                self.why = f"a server process {_describe_end(code)}"
            await self._pause()
            with contextlib.suppress(TruelineError):  # its event says why
                await self._start()

    async def _pause(self) -> None:
        pause_s = _PAUSE_S[min(self._failures, len(_PAUSE_S) - 1)]
        pid = 0 if self._process is None else self._process.pid
        events.emit("process.ended", pid=pid, why=self.why, again_in_s=pause_s)
        await asyncio.sleep(pause_s)

    async def _start(self) -> dict[str, Any]:
        """The record of a process that is ready. Raises its error, else ProcessEnded."""
        began = asyncio.get_running_loop().time()
        try:
            record = await self._first_record()
            if record["event"] != "server.ready":
                raise rebuild_error(record["code"], record)
        except TruelineError as error:
            self.why = error.message
            self._failures += 1
            raise
        self.why, self._failures = "", 0
        self.took_s = asyncio.get_running_loop().time() - began
        assert self._process is not None
        events.emit("process.ready", pid=self._process.pid)
        return record

    async def _first_record(self) -> dict[str, Any]:
        """What a new process announces. Raises ProcessEnded."""
        pipe = asyncio.subprocess.PIPE
        command = (*COMMAND, *to_arguments(self._settings))
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        except OSError as error:  # too many processes, no memory
            raise ProcessEnded(f"a server process could not be started: {error.strerror or error}") from error
        self._process = process
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._ready_s):
                async for line in process.stdout:
                    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # a library's own output
                        record = msgspec.json.decode(line, type=dict[str, Any])
                        if "event" in record:
                            return record
                code = await process.wait()
        except TimeoutError:
            self._kill()
            await process.wait()
            raise ProcessEnded(f"a server process was not ready within {self._ready_s:g} s, and was ended") from None
        raise ProcessEnded(
            f"a server process {_describe_end(code)} before it was ready", hint="the server's log says more"
        )

    async def end(self, timeout_s: float, stop: Stop) -> None:
        """Lets it drain; kills it after `timeout_s`, or at a second stop."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()  # the lifeline: a signal may have reached it too, and a second one would hurry it
        ended = asyncio.ensure_future(process.wait())
        await stop.wait_unless_hurried(ended, timeout_s)
        if ended.done():
            code = ended.result()
            if code and not self.why:
                self._lost, self.why = True, f"a server process {_describe_end(code)} while it drained"
                events.emit("process.ended", pid=process.pid, why=self.why)
            return
        self._kill()
        await ended
        events.emit("process.killed", pid=process.pid, why="hurried" if stop.hurried.is_set() else f"{timeout_s:g} s")

    def _kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


def _describe_end(code: int) -> str:
    """How a process ended.

    >>> _describe_end(-9), _describe_end(-11), _describe_end(1)
    ('was killed (SIGKILL; by the kernel if memory ran out)', 'ended by SIGSEGV', 'ended with exit code 1')
    """
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL; by the kernel if memory ran out)"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
