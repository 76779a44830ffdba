"""The server process: listen, load, be ready, drain, leave.

It answers whether it lives from the first moment, and whether it is ready only after the golden examples were replayed.
Loading and long runs happen in threads; the event loop never waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trueline import events
from trueline.bundle.read import Bundle, open_bundle
from trueline.errors import RegistryError, TruelineError
from trueline.serve.batcher import Policy
from trueline.serve.child import revived
from trueline.serve.connection import Server
from trueline.serve.limits import Limits
from trueline.serve.listen import listen
from trueline.serve.models import Loaded, Models, load, public_reason
from trueline.serve.routes import Routes
from trueline.serve.settings import Settings

SWEEP_S = 1.0
_RESOLVE_S = 300.0

T = TypeVar("T")
Field = str | int | float | bool | None
Announce = Callable[[dict[str, Field]], None]


@dataclass(frozen=True, slots=True)
class Found:
    """Where a source's bundle lies, and what the registry says about it."""

    path: Path
    name: str | None = None
    version: str | None = None
    digest: str | None = None


def find(source: str, tracking_uri: str | None) -> Found:
    """The bundle behind `source`. A registry is asked in a child process: it is heavy. Raises RegistryError."""
    if not source.startswith("models:/"):
        return Found(Path(source))
    command = [sys.executable, "-P", "-m", "trueline.registry", "resolve", source]
    if tracking_uri is not None:
        command += ["--tracking-uri", tracking_uri]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RESOLVE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RegistryError(f"the registry did not resolve {source} within {_RESOLVE_S:g} s") from error
    try:
        reply = json.loads(done.stdout.strip().splitlines()[-1])
        if done.returncode:
            raise revived(reply["error"], reply)
        return Found(Path(reply["path"]), reply["name"], str(reply["version"]), reply["digest"])
    except (IndexError, KeyError, TypeError, ValueError) as error:
        said = done.stderr.strip().splitlines()
        last = f"; it said: {said[-1]}" if said else ""
        raise RegistryError(
            f"the registry's answer for {source} is not understood (exit code {done.returncode}){last}"
        ) from error


class _Stop:
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


async def run(settings: Settings, announce: Announce) -> None:
    """Serves until told to stop. `announce` gets one record when the server is ready. Raises TruelineError."""
    loop = asyncio.get_running_loop()
    sock = listen(settings.host, settings.port, allow_remote=settings.allow_remote)
    models = Models()
    routes = Routes(models, loop)
    server = Server(routes, Limits(body_bytes=settings.max_body_bytes), loop)
    stop = _Stop()
    stop.listen(loop, lifeline=settings.lifeline)
    listener = await loop.create_server(server, sock=sock)
    port = sock.getsockname()[1]
    events.emit("server.listening", host=settings.host, port=port)
    sweeper = loop.create_task(_sweep(server))
    try:
        record = await _until(stop, loop.create_task(_load(settings, models, loop)))
        if record is not None:
            announce({"event": "server.ready", "url": url_of(settings.host, port), "port": port, **record})
            await stop.asked.wait()
        listener.close()
        routes.draining = True
        await _drain(server, stop, settings.drain_s)
    finally:
        sweeper.cancel()
        listener.close()


def url_of(host: str, port: int) -> str:
    """Where to ask.

    >>> url_of("::1", 80)
    'http://[::1]:80'
    """
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _until(stop: _Stop, work: asyncio.Future[dict[str, Field]]) -> dict[str, Field] | None:
    asked = asyncio.ensure_future(stop.asked.wait())
    both: set[asyncio.Future[Any]] = {work, asked}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if work.done():
        return work.result()
    work.cancel()
    return None


def _in_thread(loop: asyncio.AbstractEventLoop, work: Callable[[], T]) -> asyncio.Future[T]:
    """What `work` returns, from a daemon thread: a server that is told to stop does not wait for a load to end."""
    answer: asyncio.Future[T] = loop.create_future()

    def settle(act: Callable[[], None]) -> None:
        if not answer.done():
            act()

    def body() -> None:
        try:
            made = work()
            act = partial(answer.set_result, made)
        except Exception as error:  # noqa: BLE001 - blind on purpose: it is raised again where the answer is awaited
            act = partial(answer.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, act)

    threading.Thread(target=body, name="load", daemon=True).start()
    return answer


async def _load(settings: Settings, models: Models, loop: asyncio.AbstractEventLoop) -> dict[str, Field]:
    found = await _in_thread(loop, lambda: find(settings.source, settings.tracking_uri))
    bundle = await _in_thread(loop, lambda: open_bundle(found.path))
    name = settings.name or found.name or bundle.name
    version = models.add(name, settings.version or found.version or "1")
    events.emit("version.loading", model=name, version=version.version, digest=bundle.digest[:12])
    try:
        loaded = await _in_thread(loop, lambda: _load_program(bundle, settings, found.digest))
    except TruelineError as error:
        version.fail(public_reason(error))
        raise
    lanes = 1 if loaded.plan.batch else 2
    policy = Policy(
        batch=loaded.plan.batch,
        max_batch=loaded.plan.max_batch,
        max_delay_s=settings.max_delay_s,
        lanes=lanes,
        max_requests=settings.max_queue,
    )
    version.make_ready(loaded, policy, ThreadPoolExecutor(lanes, thread_name_prefix="run"), loop)
    gc.collect()
    gc.freeze()
    events.emit("version.ready", model=name, version=version.version, golden_cases=loaded.golden_cases)
    return {"model": name, "version": version.version, "digest": loaded.digest}


def _load_program(bundle: Bundle, settings: Settings, digest: str | None) -> Loaded:
    loaded = load(bundle, threads=settings.threads, max_batch=settings.max_batch, digest=digest)
    if settings.max_delay_s:  # the operator wants requests to wait for company
        return replace(loaded, plan=replace(loaded.plan, inline_values=0))
    return loaded


async def _drain(server: Server, stop: _Stop, drain_s: float) -> None:
    drained = asyncio.ensure_future(server.drain())
    hurried = asyncio.ensure_future(stop.hurried.wait())
    await asyncio.wait({drained, hurried}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    events.emit("server.stopped", dropped=server.num_connections)
    drained.cancel()
    hurried.cancel()


async def _sweep(server: Server) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        server.sweep()
