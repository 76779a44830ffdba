"""The listeners of a server: HTTP for requests, management and metrics; gRPC for requests and management."""

import asyncio
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trueline import events
from trueline.serve.protocols.dispatch import is_vital
from trueline.serve.settings import ServeSettings
from trueline.web.messages import App
from trueline.web.origin import PageRule
from trueline.web.parser import HttpLimits
from trueline.web.server import HttpServer
from trueline.web.sockets import (
    BACKLOG,
    check_reach,
    listen,
    make_grpc_credentials,
    make_ssl_context,
    parse_certificates,
)

Field = str | int | float | bool | None
SWEEP_S = 1.0
MANAGEMENT_BYTES = 2**20
"""Of a request body on the ports without tensors."""
OPEN_FILES = 16_384
"""Asked of the system, as far as its hard limit allows."""
RESERVED_FILES = 128
"""Not for connections."""


@dataclass(frozen=True, slots=True)
class _HttpPort:
    """A port of HTTP."""

    what: str
    server: HttpServer
    listener: asyncio.Server
    number: int


@dataclass(frozen=True, slots=True)
class _GrpcPort:
    """A port of gRPC."""

    what: str
    server: Any
    number: int


class Ports:
    def __init__(self, settings: ServeSettings, loop: asyncio.AbstractEventLoop) -> None:
        """Raises UsageError for certificates that cannot be read."""
        self._settings, self._loop = settings, loop
        self._secured = parse_certificates(settings.certificate, settings.private_key, settings.client_ca)
        self._open_files = _raise_open_files()
        self._http: list[_HttpPort] = []
        self._grpc: list[_GrpcPort] = []

    async def open(self, what: Literal["data", "management", "metrics"], app: App, number: int) -> None:
        """Port 0 is a free one. Raises PortInUse, UsageError for an unguarded address that other machines reach."""
        settings = self._settings
        context = None if self._secured is None else make_ssl_context(self._secured)
        sock = listen(settings.host, number, guarded=settings.guarded, shared=settings.shared)
        limits = _limits_of(what, settings.max_body_bytes, self._open_files)
        vital = is_vital if what == "data" else _all_are_vital
        server = HttpServer(app, limits, self._loop, is_vital=vital, pages=self._page_rule(what))
        handshake_s = None if context is None else limits.receive_s
        listener = await self._loop.create_server(
            server, sock=sock, ssl=context, ssl_handshake_timeout=handshake_s, backlog=BACKLOG
        )
        found = sock.getsockname()[1]
        events.emit("server.listening", what=what, host=settings.host, port=found)
        self._http.append(_HttpPort(what, server, listener, found))

    def _page_rule(self, what: str) -> PageRule | None:
        """None where clients need a token. A certificate names the hosts itself, but a browser sends a client's own."""
        settings = self._settings
        if settings.key_file is not None:
            return None
        origin = "" if what == "metrics" else settings.cors_origin
        secured = self._secured is not None
        return PageRule.of(settings.host, allowed=settings.allowed_hosts, origin=origin, any_host=secured)

    async def open_grpc(self, what: Literal["grpc", "grpc_management"], handlers: Sequence[Any], number: int) -> None:
        from trueline.serve.protocols import grpc_base as calls  # slow to import

        settings = self._settings
        check_reach(settings.host, guarded=settings.guarded)
        server, found = await calls.serve(
            handlers,
            settings.host,
            number,
            body_bytes=min(settings.max_body_bytes, MANAGEMENT_BYTES if what == "grpc_management" else 2**40),
            connections=_limits_of(what, 1, self._open_files).connections,
            credentials=None if self._secured is None else make_grpc_credentials(self._secured),
            shared=settings.shared,
        )
        events.emit("server.listening", what=what, host=settings.host, port=found)
        self._grpc.append(_GrpcPort(what, server, found))

    def places(self) -> dict[str, Field]:
        """URLs and ports for the announcement."""
        found: dict[str, Field] = {f"{calls.what}_port": calls.number for calls in self._grpc}
        scheme = "http" if self._secured is None else "https"
        for port in self._http:
            head = "" if port.what == "data" else f"{port.what}_"
            found |= {f"{head}url": url_of(self._settings.host, port.number, scheme), f"{head}port": port.number}
        return found

    @property
    def num_connections(self) -> int:
        return sum(port.server.num_connections for port in self._http)

    async def sweep(self) -> None:
        """Ends connections that take too long; runs without end."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for port in self._http:
                port.server.sweep()

    async def drain(self, grace_s: float) -> None:
        """Closes the listeners and returns when the accepted requests are answered; gRPC calls have `grace_s`."""
        for port in self._http:
            port.listener.close()
        await asyncio.gather(
            *(port.server.drain() for port in self._http), *(calls.server.stop(grace_s) for calls in self._grpc)
        )

    async def close(self) -> None:
        for calls in self._grpc:
            await calls.server.stop(0.0)
        for port in self._http:
            port.listener.close()


def _limits_of(what: str, body_bytes: int, open_files: int) -> HttpLimits:
    """The limits of a port: all together leave file descriptors for the rest of the server."""
    share = max(8, (open_files - RESERVED_FILES) // 2)
    if what == "data":
        return HttpLimits(body_bytes=body_bytes, connections=min(HttpLimits().connections, share // 2))
    if what == "grpc":  # gRPC closes no idle connection in favour of a new one
        return HttpLimits(body_bytes=body_bytes, connections=share // 2)
    few = max(4, min(256, share // 8))
    return HttpLimits(body_bytes=min(body_bytes, MANAGEMENT_BYTES), connections=few, spare=min(64, few))


def _raise_open_files() -> int:
    """Open files that this process may have, of which each connection is one; raises a soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def _all_are_vital(path: str) -> bool:
    return True


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """The URL of a host and port, as this machine reaches it: through the loopback where all addresses are listened on.

    >>> url_of("::1", 80)
    'http://[::1]:80'
    >>> url_of("0.0.0.0", 80)
    'http://127.0.0.1:80'
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
