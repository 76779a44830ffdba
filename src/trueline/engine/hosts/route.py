"""Addresses of this machine: on which one another host reaches it, and how addresses are written.

An address is `HOST:PORT`; an IPv6 host stands in brackets, as in a URL (RFC 3986).
"""

import contextlib
import fcntl
import socket
import struct
from pathlib import Path

from trueline.errors import UsageError

_SIOCGIFADDR = 0x8915
ANY = ("", "0.0.0.0", "::")
"""Hosts that stand for every address of the machine."""


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`. Raises UsageError.

    >>> split_address("host-a:7700"), split_address("[fd00::1]:80")
    (('host-a', 7700), ('fd00::1', 80))
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise UsageError(f"'{address}' is not HOST:PORT", hint="for example host-a:7700 or [fd00::1]:7700")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """
    >>> join_address("10.0.0.1", 80), join_address("fd00::1", 80)
    ('10.0.0.1:80', '[fd00::1]:80')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str) -> str:
    """The first address of `host`, a name or an address. Raises UsageError."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UsageError(f"there is no host '{host}': {error.strerror}", hint="give its name or its address") from error


def find_own_address(peer: str) -> str:
    """The address of this machine from which it reaches `peer`. No packet is sent. Raises UsageError."""
    address = resolve(peer)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise UsageError(
                f"this machine has no route to {peer}: {error.strerror}", hint="name an interface with --interface"
            ) from error
        return str(probe.getsockname()[0])


def find_interface_address(interface: str) -> str:
    """The address of `interface`, which is its name or an address of this machine. Raises UsageError."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET) as own:
        own.bind((interface, 0))
        return str(own.getsockname()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
    for line in _read_ipv6():
        digits, _, _, scope, _, name = line.split()
        if name == interface and scope != "20":  # not link-local: that one needs a zone
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    names = ", ".join(name for _, name in socket.if_nameindex())
    raise UsageError(f"there is no interface or address '{interface}' here", hint=f"this machine has {names}")


def _read_ipv6() -> list[str]:
    try:
        return Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return []


def list_ports(ports: str) -> list[int]:
    """The ports FIRST-LAST; without them 0, which stands for any free one.

    >>> list_ports("7800-7802"), list_ports("")
    ([7800, 7801, 7802], [0])
    """
    first, _, last = ports.partition("-")
    return list(range(int(first), int(last or first) + 1)) if ports else [0]


def announce(interface: str, peer: str) -> str:
    """Where workers of this machine listen: at `interface` if one is given, else on the route to `peer`."""
    return find_interface_address(interface) if interface else find_own_address(peer)
