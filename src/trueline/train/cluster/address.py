"""Where the head of a submitted job listens."""

import contextlib
import socket

from trueline.engine.hosts import route
from trueline.errors import UsageError

_NO_ROUTE = "192.0.2.1"
"""An address for documentation (RFC 5737): the route to it is the default route."""


def find_address(interface: str) -> str:
    """Where other hosts reach this one: at `interface`, else at the address of its name, else on its default route."""
    if interface:
        return route.find_interface_address(interface)
    with contextlib.suppress(UsageError):
        address = route.resolve(socket.gethostname())
        if not address.startswith("127."):  # Debian gives a host's name 127.0.1.1
            return address
    with contextlib.suppress(UsageError):
        return route.find_own_address(_NO_ROUTE)
    return "127.0.0.1"
