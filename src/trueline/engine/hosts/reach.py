"""Whether an address takes connections."""

import asyncio
import ssl
from collections.abc import Sequence

from trueline.engine.hosts.route import split_address
from trueline.errors import TrainError

CONNECT_S, PROBE_S, RETRY_S = 5.0, 0.4, 0.2
"""How long a connection may take, the first and further ones; and what lies between them."""
SILENT_S = 2.0
"""For how long nothing comes from what is taken to be silent."""
REFUSED_S = 10.0
"""Seconds for which a port may refuse."""


async def check_port(address: str) -> None:
    """Raises TrainError if `address` takes no connection, with the reason. A master that starts refuses until it
    listens: that is waited for."""
    host, port = split_address(address)
    loop = asyncio.get_running_loop()
    until = loop.time() + REFUSED_S
    try:
        while True:
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_S)
            except ConnectionRefusedError:
                if loop.time() >= until:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                writer.close()
                return
    except TimeoutError:
        raise TrainError(
            f"{address} does not answer", hint="a firewall on the way drops packets to this port"
        ) from None
    except OSError as error:
        raise TrainError(
            f"cannot reach {address}: {error.strerror or error}",
            hint="check the address of the join line, and that the job still runs",
        ) from error


async def is_silent(address: str) -> bool:
    """Whether what takes connections at `address` answers nothing to the beginning of TLS, as a host does that hangs.

    A server without TLS answers with something else, or closes the connection.
    """
    host, port = split_address(address)
    anyone = ssl.create_default_context()
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port, ssl=anyone), SILENT_S)
    except TimeoutError:
        return True
    except OSError:  # ssl.SSLError too
        return False
    writer.close()
    return False


async def find_open(addresses: Sequence[str]) -> str:
    """The first of `addresses` that takes a connection within PROBE_S; empty: none does. A host that died answers
    nothing, so all are tried at once."""

    async def probe(address: str) -> str:
        host, port = split_address(address)
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), PROBE_S)
        except OSError:  # TimeoutError too
            return ""
        writer.close()
        return address

    probes = [asyncio.ensure_future(probe(address)) for address in addresses]
    try:
        for each in asyncio.as_completed(probes):
            if found := await each:
                return found
        return ""
    finally:
        for one in probes:
            one.cancel()
