"""Listening sockets."""

from __future__ import annotations

import errno
import ipaddress
import socket

from trueline.errors import PortInUse, UsageError

_BACKLOG = 1024


def listen(host: str, port: int, *, guarded: bool = False, shared: bool = False) -> socket.socket:
    """A socket that listens on `host` and `port` (0: a free one). Raises PortInUse, UsageError.

    An address that other machines can reach is refused unless the server is `guarded`, which means that it
    authenticates clients. Several processes of this user may listen on a `shared` port; the kernel spreads connections.
    """
    family, address = _resolve(host, port)
    check_reach(address[0], guarded=guarded, said=host)
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        raise _explain(error, host, port) from error
    return made


def check_reach(address: str, *, guarded: bool, said: str = "") -> None:
    """Raises UsageError for an address that other machines can reach, unless the server is `guarded`."""
    found, _ = _resolve(address, 0)[1]
    if not guarded and not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
        raise UsageError(
            f"{said or address} can be reached from other machines, and this server authenticates no client",
            hint="listen on 127.0.0.1, or name a --key-file, whose tokens clients then need, or a --client-ca",
        )


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    if not 0 <= port < 2**16:
        raise UsageError(f"port {port} does not exist: ports go from 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"host '{host}' is not known here: {error.strerror or error}") from error
    family, _, _, _, address = found[0]
    return family, (str(address[0]), int(address[1]))


def _explain(error: OSError, host: str, port: int) -> PortInUse | UsageError:
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"port {port} on {host} is in use: another process listens there",
            hint="stop that process, or choose another port (--port 0 takes a free one)",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return UsageError(f"port {port} on {host} is not for this user", hint="choose a port above 1023")
    return UsageError(f"cannot listen on {host} port {port}: {error.strerror or error}")
