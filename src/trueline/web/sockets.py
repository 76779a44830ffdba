"""Listening sockets, and TLS 1.2 and newer for the HTTP and gRPC ports.

With a client authority every connection needs a client certificate of it (mutual TLS), health checks included.
Source: RFC 8446, RFC 5246; Mozilla's intermediate configuration, which Python's defaults follow.
"""

import errno
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueline.errors import PortInUse, UsageError

BACKLOG = 1024


def listen(host: str, port: int, *, guarded: bool = False, shared: bool = False) -> socket.socket:
    """A socket that listens on `host` and `port` (0: a free one). Raises PortInUse, UsageError.

    An address that other machines can reach is refused unless the server is `guarded`, which means that it
    authenticates clients. Several processes of this user may listen on a `shared` port; the kernel spreads connections.
    """
    family, address = _resolve(host, port)
    check_reach(address[0], guarded=guarded, name=host)
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise _explain(error, host, port) from error
    return made


def check_reach(address: str, *, guarded: bool, name: str = "") -> None:
    """Raises UsageError for an address that other machines can reach, unless the server is `guarded`."""
    host, _ = _resolve(address, 0)[1]
    if not guarded and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        raise UsageError(
            f"{name or address} can be reached from other machines, and this server authenticates no client",
            hint="listen on 127.0.0.1, or name a --key-file, whose tokens clients then need, or a --client-ca",
        )


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    if not 0 <= port < 2**16:
        raise UsageError(f"port {port} does not exist: ports go from 0 to 65535")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"host '{host}' is not known here: {error.strerror or error}") from error
    family, _, _, _, address = addresses[0]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """PEM files: the server's chain, its key (None: in the same file), and the authority that clients come from."""

    certificate: Path
    private_key: Path | None = None
    client_ca: Path | None = None

    @property
    def mutual(self) -> bool:
        """Whether clients need a certificate."""
        return self.client_ca is not None


def parse_certificates(certificate: str | None, private_key: str | None, client_ca: str | None) -> Certificates | None:
    """None without TLS. Raises UsageError for a key or an authority without a certificate."""
    if certificate is not None:
        key, authority = (None if path is None else Path(path) for path in (private_key, client_ca))
        return Certificates(certificate=Path(certificate), private_key=key, client_ca=authority)
    for flag, value in (("--private-key", private_key), ("--client-ca", client_ca)):
        if value is not None:
            raise UsageError(f"{flag} {value} is given without --certificate", hint="name the server's own too")
    return None


def make_ssl_context(given: Certificates) -> ssl.SSLContext:
    """For the HTTP ports. Raises UsageError that names the file."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])
    for path in (given.certificate, given.private_key, given.client_ca):
        if path is not None:
            try:
                path.open("rb").close()
            except OSError as error:
                raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        # without the password OpenSSL would prompt for the one of an encrypted key
        made.load_cert_chain(given.certificate, given.private_key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        key = given.private_key or given.certificate
        raise UsageError(
            f"{given.certificate} and {key} are no certificate with its private key: {error}",
            hint="both are PEM; the key has no password and belongs to the first certificate of the chain",
        ) from error
    if given.client_ca is not None:
        made.verify_mode = ssl.CERT_REQUIRED
        try:
            made.load_verify_locations(given.client_ca)
        except ssl.SSLError as error:
            raise UsageError(f"{given.client_ca} holds no certificate of an authority: {error}") from error
    return made


def make_grpc_credentials(given: Certificates) -> Any:
    """For the gRPC port. `make_ssl_context` has checked the files."""
    import grpc

    key = (given.private_key or given.certificate).read_bytes()
    authority = None if given.client_ca is None else given.client_ca.read_bytes()
    return grpc.ssl_server_credentials(
        [(key, given.certificate.read_bytes())], root_certificates=authority, require_client_auth=given.mutual
    )
