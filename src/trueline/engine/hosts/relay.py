"""What `trueline join` runs: lends this machine's cores to a job on another host.

    master ◀── one gRPC stream over TLS ── relay ── Unix socket ──▶ agent ──fork──▶ workers

The agent is that of the local engine. The relay passes orders to it, and reports and output of its processes back. A
connection that is lost is made again. When no master answers for `FENCE` leases, it has given up what runs here: the
relay ends it. When the relay ends, by any means, all that it has started ends.
"""

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec

from trueline import events, files
from trueline.engine.contract import Seen
from trueline.engine.hosts import folder as job_folder
from trueline.engine.hosts.agent import HostAgent
from trueline.engine.hosts.forward import MasterDoor
from trueline.engine.hosts.host_clock import OwnClock
from trueline.engine.hosts.messages import (
    CERTIFICATE_NAME,
    FETCH,
    JOIN,
    PULSE_S,
    PULSES,
    AddOrder,
    CoresOffer,
    Dismissal,
    EventLines,
    FromHost,
    FromMaster,
    Greeting,
    HostList,
    JournalCopy,
    KillOrder,
    ProcessOutput,
    ProcessReport,
    Pulse,
    Welcome,
    Withdrawal,
    decode_from_master,
    encode,
)
from trueline.engine.hosts.reach import check_port, find_open, is_silent
from trueline.engine.hosts.route import announce, split_address
from trueline.engine.hosts.standby import JoinRequest, LentHost, Standby
from trueline.engine.hosts.tls import find_clock_fault
from trueline.engine.local.client import LocalEngine
from trueline.environment import available_bytes
from trueline.errors import TrainError, TruelineError, UsageError

FENCE = 10
"""Leases without a master after which what runs here is ended: the longest lease that a master gives."""
CONNECT_S, AGAIN_S, RETRY_S = 5.0, 1.0, 0.2
"""How long the first and each further connection may take, and what lies between them."""
OUTPUT_S = 0.25
MOST_OUTPUT = 64 << 10
"""Bytes of a process's output in one message."""
_END = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT}
"""The master has refused this host: another attempt would be too."""


class Relay:
    """Lends cores until the job ends or `withdraw` is called. Raises UsageError, TrainError."""

    def __init__(self, request: JoinRequest, standby: Standby, agent: HostAgent | None = None) -> None:
        """`agent`: one that has begun."""
        self._request, self._standby, self._agent = request, standby, agent or HostAgent()
        self._door = MasterDoor(request.address)
        self._own_address = announce(request.interface, split_address(request.address)[0])
        self._id = secrets.token_hex(8)
        self._bearer = request.token.token
        self._engine: LocalEngine | None = None
        self._job = self._agent.job
        self._welcome: Welcome | None = None
        self._outgoing: asyncio.Queue[FromHost] = asyncio.Queue()
        self._offsets: dict[str, int] = {}
        self._ended: set[str] = set()
        self._withdrawn = False
        self._heard_at = 0.0
        self._fenced = False
        self._clock = OwnClock()

    async def run(self) -> str:
        """Returns why the master has sent this host away."""
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time()
        try:
            await check_port(self._request.address)
            await self._door.start()
            open_door = True
            while True:
                try:
                    if open_door:
                        return await self._connect()
                except _Away as away:
                    if self._welcome is None:
                        raise await self._describe_first(away) from away
                await asyncio.sleep(RETRY_S)
                assert self._welcome is not None
                silent_s = loop.time() - self._heard_at
                due = self._standby.may_lead(self._id, silent_s) and not self._withdrawn and not self._fenced
                if due and (ended := await self._lead()) is not None:
                    return ended
                open_door = await self._turn()
                if not self._fenced and silent_s > FENCE * self._welcome.lease_s:
                    await self._fence(silent_s)
                if self._withdrawn and silent_s > self._welcome.lease_s:
                    return "the master does not answer"
        finally:
            self._end()

    def withdraw(self) -> bool:
        """Takes the cores back: the workers leave between two steps. False: it has begun already."""
        if self._standby.halt("Ctrl-C"):
            return True
        if self._withdrawn:
            return False
        self._withdrawn = True
        events.emit("join.leaving", why="Ctrl-C")
        self._outgoing.put_nowait(Withdrawal())
        return True

    @property
    def is_led_from_start(self) -> bool:
        """Whether its master is the one that it joined, and no successor on another host."""
        return self._door.target == self._request.address

    @property
    def is_fenced(self) -> bool:
        """Whether no master answers for so long that it has given up what ran here."""
        return self._fenced

    async def _turn(self) -> bool:
        """Turns to the next host that could lead the job and takes connections; False: none does."""
        masters = [self._request.address, *self._standby.others]
        at = masters.index(self._door.target) + 1 if self._door.target in masters else 0
        found = await find_open([*masters[at:], *masters[:at]])
        if found:
            self._door.turn(found)
        return bool(found)

    async def _lead(self) -> str | None:
        """Leads the job from here, if this host may; None: another one does."""
        assert self._engine is not None
        alive = [seen.ref for seen in await self._engine.list() if seen.alive]
        host = LentHost(
            agent=self._agent.process, socket=self._agent.socket, lifeline=self._agent.lifeline, job=self._job,
            request=self._request,
        )  # fmt: skip
        self._door.turn(self._standby.address)
        return await self._standby.lead(alive, host, self._id)

    async def _describe_first(self, away: "_Away") -> TruelineError:
        """The error of a host that has not joined yet."""
        address = self._request.address
        if str(away):
            return TrainError(f"the master at {address} broke off: {away}", hint="join again")
        if await is_silent(address):
            return TrainError(
                f"{address} takes connections and answers nothing",
                hint="its host hangs, or something else listens there: look at the job on that host",
            )
        if fault := find_clock_fault(self._request.token.ca, time.time()):
            return UsageError(fault, hint="set this host's clock, then join again")
        return UsageError(
            f"what listens at {address} is not the start of the job that the token is of",
            hint="copy the token file again",
        )

    async def _fence(self, silent_s: float) -> None:
        self._fenced = True
        events.emit(
            "join.fenced", why=f"no master answered for {silent_s:.0f} s, so that it has given up what runs here"
        )
        assert self._engine is not None
        for seen in await self._engine.list():
            await self._engine.kill(seen.ref)

    def _end(self) -> None:
        self._door.close()
        self._agent.end()

    async def _connect(self) -> str:
        credentials = grpc.ssl_channel_credentials(root_certificates=self._request.token.ca.encode())
        options = [("grpc.ssl_target_name_override", CERTIFICATE_NAME), ("grpc.enable_http_proxy", 0), *PULSES]
        metadata = (("authorization", f"Bearer {self._bearer}"),)
        patience_s = CONNECT_S if self._welcome is None else AGAIN_S
        async with grpc.aio.secure_channel(self._door.target, credentials, options=options) as channel:
            try:
                await asyncio.wait_for(channel.channel_ready(), patience_s)
                join: Any = channel.stream_stream(JOIN, encode, decode_from_master)
                call = join(metadata=metadata)
                return await self._converse(channel, call, metadata)
            except (TimeoutError, asyncio.InvalidStateError):  # the latter: a write into a call that has ended
                raise _Away from None
            except grpc.aio.AioRpcError as error:
                if error.code() in _END:
                    raise UsageError(
                        f"{self._door.target} refuses this host: {error.details()}",
                        hint="the join line of the running job, and its token file, are in the job's folder",
                    ) from error
                raise _Away(f"{error.details()}") from error

    async def _converse(self, channel: Any, call: Any, metadata: Any) -> str:
        request = self._request
        await call.write(Greeting(id=self._id, name=request.name, address=self._own_address, versions=request.versions))
        welcome = await self._read(call)
        if not isinstance(welcome, Welcome):
            raise _Away
        if self._welcome is None:
            await self._prepare(channel, welcome, metadata)
        self._standby.note(welcome, self._job)
        self._bearer = welcome.secret
        assert self._engine is not None
        running = tuple(await self._engine.list())
        self._fenced = False
        standby, memory = self._standby.address, available_bytes()
        await call.write(CoresOffer(cores=request.cores, running=running, standby=standby, memory=memory))
        events.emit("join.joined", job=welcome.job, cores=request.cores, address=self._own_address)
        work = (self._send(call), self._pulse(), self._watch(), self._forward_output())
        orders = asyncio.ensure_future(self._take_orders(call))
        tasks = [orders, *map(asyncio.ensure_future, work)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([orders], timeout=RETRY_S)  # a write fails before the reason for the end is read
            return str(await (orders if orders.done() else next(iter(done))))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: Any) -> FromMaster:
        message = await call.read()
        if not isinstance(message, FromMaster):  # the end of the stream
            code = await call.code()
            if code in _END:
                raise UsageError(f"{self._door.target} refuses this host: {await call.details()}")
            raise _Away("the connection ended")
        self._heard_at = asyncio.get_running_loop().time()
        received: FromMaster = message
        return received

    async def _prepare(self, channel: Any, welcome: Welcome, metadata: Any) -> None:
        """Fetches the job's files and starts the agent. Raises UsageError where this host lacks something."""
        check_packages(welcome.packages)
        check_store(welcome)

        async def fetch(digest: str) -> bytes:
            chunks = channel.unary_stream(FETCH)(digest.encode(), metadata=metadata)
            return b"".join([chunk async for chunk in chunks])

        cache = files.user_cache() / "joined"
        count = await job_folder.unpack(welcome.files, self._job, cache, fetch)
        events.emit("join.prepared", job=welcome.job, files=len(welcome.files), fetched=count)
        self._agent.begin(welcome.preload)
        (self._job / "ca.pem").write_text(self._request.token.ca)
        self._engine = LocalEngine(str(self._agent.socket))
        self._agent.serves = True
        await self._engine.preload(welcome.preload)
        self._welcome = welcome

    def _localize(self, order: AddOrder) -> AddOrder:
        """The order with what differs on this host: the job's folder, the master's address, where workers listen."""
        own = {
            "TRUELINE_JOB": str(self._job), "TRUELINE_MASTER": self._door.address,
            "TRUELINE_CA": str(self._job / "ca.pem"), "TRUELINE_HOST": self._own_address,
            "TRUELINE_PORTS": self._request.ports,
        }  # fmt: skip
        env = order.spec.env | own if "TRUELINE_MASTER" in order.spec.env else order.spec.env
        log = str(self._job / "logs" / f"{order.spec.ref}.log")
        return AddOrder(msgspec.structs.replace(order.spec, env=env, log=log))

    async def _take_orders(self, call: Any) -> str:
        assert self._engine is not None
        while True:
            match await self._read(call):
                case AddOrder() as order:
                    await self._engine.add([self._localize(order).spec])
                case KillOrder(ref, grace_s):
                    await self._engine.kill(ref, grace_s=grace_s)
                case Dismissal(why):
                    return why
                case Pulse() as answer:
                    if off := self._clock.take_answer(answer):
                        events.emit("join.clock", off=off)
                case JournalCopy() | HostList() | EventLines() as copy:
                    self._standby.note(copy, self._job)
                case _:
                    continue

    async def _send(self, call: Any) -> None:
        if self._withdrawn:  # the master may not have heard it
            self._outgoing.put_nowait(Withdrawal())
        while True:
            await call.write(await self._outgoing.get())

    async def _pulse(self) -> None:
        """Raises _Away when the master has not answered for a lease."""
        assert self._welcome is not None
        while True:
            self._outgoing.put_nowait(self._clock.make_pulse(os.getloadavg()[0]))
            await asyncio.sleep(PULSE_S)
            if asyncio.get_running_loop().time() - self._heard_at > self._welcome.lease_s:
                raise _Away

    async def _watch(self) -> None:
        assert self._engine is not None
        async for seen in self._engine.watch():
            if not seen.alive:
                self._forward_rest(seen)
            self._outgoing.put_nowait(ProcessReport(seen))
        raise TrainError("the agent of this host ended", hint="join again")

    async def _forward_output(self) -> None:
        while True:
            for log in (self._job / "logs").glob("*.log"):
                if log.stem not in self._ended and log.stem != "agent":
                    self._forward_log(log)
            await asyncio.sleep(OUTPUT_S)

    def _forward_log(self, log: Path) -> bool:
        at = self._offsets.get(log.stem, 0)
        with contextlib.suppress(OSError), log.open("rb") as file:
            file.seek(at)
            if data := file.read(MOST_OUTPUT):
                self._offsets[log.stem] = at + len(data)
                self._outgoing.put_nowait(ProcessOutput(log.stem, data))
                return True
        return False

    def _forward_rest(self, seen: Seen) -> None:
        while self._forward_log(self._job / "logs" / f"{seen.ref}.log"):
            continue
        self._ended.add(seen.ref)


class _Away(Exception):
    """The master does not answer at the moment."""


def check_packages(packages: dict[str, str], find: Callable[[str], str] | None = None) -> None:
    """Raises UsageError if this host lacks a package that the recipe imports, or has another version of it."""
    faults = []
    for name, version in packages.items():
        here = (find or find_version)(name)
        if here != version:
            faults.append(f"{name} {version} ({f'here is {here}' if here else 'not installed here'})")
    if faults:
        raise UsageError(
            f"the recipe needs {', '.join(faults)}", hint="install what the host that trains has, then join again"
        )


def find_version(package: str) -> str:
    """The installed version of a distribution; empty: it is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_store(welcome: Welcome) -> None:
    """Raises UsageError if checkpoints are written to a folder that this host does not see."""
    if welcome.probe and not Path(welcome.store, welcome.probe).exists():
        raise UsageError(
            f"this host does not see the folder of the job's checkpoints, {welcome.store}",
            hint="start the job with --checkpoints in a folder that all hosts mount, or in an object store",
        )
