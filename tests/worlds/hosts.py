"""A master's side and a joined host in one process: an engine whose processes run on the other side of a TLS stream."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc

from trueline import clock
from trueline.engine.hosts import relay as relays
from trueline.engine.hosts.fleet import FleetEngine
from trueline.engine.hosts.messages import PULSES, Welcome
from trueline.engine.hosts.service import HostsService
from trueline.engine.hosts.standby import JoinRequest
from trueline.engine.hosts.tls import make_certificates
from trueline.engine.hosts.token import TokenFile, issue_token

VERSIONS = {"trueline": "1", "torch": "2"}
WAIT_S = 100


class NoLocalEngine:
    """The agent of a machine that takes no process."""

    async def add(self, specs):
        assert not specs

    async def kill(self, ref, *, grace_s=0.0):
        """It has none."""

    async def list(self):
        return []

    async def capacity(self):
        return 0

    async def watch(self):
        await asyncio.Event().wait()
        yield


class HostWorld:
    """The service on a port of the loopback, in a thread of its own; `engine` may be called from any loop."""

    def __init__(self, folder: Path, *, cores: int = 0, files=(), lease_s: float = 3.0, **welcome) -> None:
        self.folder, self.events, self.rooms = folder, [], []
        self.certificates = make_certificates("job")
        self.loop = asyncio.new_event_loop()
        self.logs: dict[str, str] = {}
        self.fleet = FleetEngine(
            NoLocalEngine(), cores=cores, file=folder / "hosts.json", lease_s=lease_s, now=clock.monotonic_s,
            emit=lambda name, **fields: self.events.append((name, fields)),
        )  # fmt: skip
        self.fleet.on_room = self.rooms.append
        self.engine = LoopEngine(self)
        greet = Welcome(job="job", secret="secret", lease_s=lease_s, preload=(), files=tuple(files), **welcome)
        self.service = HostsService(self.fleet, greet, folder / "blobs", VERSIONS, self.write, bytes, bytes)
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.address = self.call(self._serve())

    def write(self, ref, data):
        with open(self.logs[ref], "ab") as log:
            log.write(data)

    def call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    async def _serve(self):
        self.server = grpc.aio.server(options=PULSES)
        self.server.add_generic_rpc_handlers((self.service.make_handler(),))
        credentials = grpc.ssl_server_credentials([(self.certificates.key, self.certificates.master)])
        port = self.server.add_secure_port("127.0.0.1:0", credentials)
        await self.server.start()
        self.running = asyncio.ensure_future(self.fleet.run())
        return f"127.0.0.1:{port}"

    def join(self, *, cores: int = 4, name: str = "host-b", versions=VERSIONS, address: str = ""):
        """Begins to lend cores; returns the relay and its future."""
        token = TokenFile(job="job", token=issue_token("secret", now=time.time()), ca=self.certificates.ca.decode())
        request = JoinRequest(address=address or self.address, token=token, cores=cores, name=name, versions=versions)
        relay = relays.Relay(request, NoStandby())
        return relay, asyncio.run_coroutine_threadsafe(relay.run(), self.loop)

    def wait(self, name: str):
        """The fields of the first event of this name."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for event, fields in tuple(self.events):
                if event == name:
                    return fields
            threading.Event().wait(0.01)
        raise AssertionError(f"no {name} among {self.events}")

    def close(self) -> None:
        async def stop():
            await self.fleet.dismiss("the job is over", 0.0)
            await self.server.stop(1.0)
            self.running.cancel()

        self.call(stop())

    def end_loop(self) -> None:
        """After `close`, and what still needs the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT_S)
        self.loop.close()


class NoStandby:
    """Of a host that takes no master."""

    address = ""
    others = ()

    def note(self, message, job):
        return None

    def may_lead(self, host_id, silent_s):
        return False

    async def lead(self, alive, host, host_id):
        raise AssertionError("a host that takes no master was asked to lead")

    def halt(self, why):
        return False


class LoopEngine:
    """An engine that runs in the loop of a world."""

    def __init__(self, world: HostWorld) -> None:
        self._world = world

    def _pass(self, work):
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._world.loop))

    async def add(self, specs):
        self._world.logs.update({spec.ref: spec.log for spec in specs})
        await self._pass(self._world.fleet.add(specs))

    async def kill(self, ref, *, grace_s=0.0):
        await self._pass(self._world.fleet.kill(ref, grace_s=grace_s))

    async def list(self):
        return await self._pass(self._world.fleet.list())

    async def capacity(self):
        return await self._pass(self._world.fleet.capacity())

    async def watch(self):
        changes = self._world.fleet.watch()
        while True:
            yield await self._pass(anext(changes))


@contextlib.contextmanager
def joined(folder: Path, **given) -> Iterator[HostWorld]:
    """A world with one joined host."""
    world = HostWorld(folder, **given)
    _, future = world.join()
    try:
        world.wait("host.joined")
        yield world
    finally:
        world.close()
        assert future.result(WAIT_S) == "the job is over"
        world.end_loop()
