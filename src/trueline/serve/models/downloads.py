"""Downloads what a client registers by its http(s) address into a store, from addresses that the operator allows.

By default no address is allowed: TorchServe allowed all of them (CVE-2023-43654). Against request forgery, each address
of a redirect must be allowed too; the connection goes to the address that was checked (no second look-up of the name);
and hosts of the machine or a private network are refused unless a pattern names the host. A download that is too large,
cut short or late leaves no file.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urljoin, urlsplit, urlunsplit

from trueline import files
from trueline.errors import NotFound, RequestError, UsageError
from trueline.storage.object_store import redact_uri

if TYPE_CHECKING:
    import httpx

MAX_BYTES = 16 * 2**30
"""Of one download; also the limit of what an archive unpacks to."""
TOTAL_S = 3600.0
_SILENCE_S = 30.0  # without a byte
_REDIRECTS = 5
_URL_CHARACTERS = 2048
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_OTHER_HOST = "a-host-that-no-pattern-names.invalid"
_HTTP = re.compile(r"https?://", re.IGNORECASE)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_UNICAST = ipaddress.ip_network("2000::/3")
"""Every public IPv6 address. Outside are IPv4 in old forms (::/96, ::ffff:0:0:0/96, local NAT64) and site-local ones,
which Python calls global."""
_SPECIAL = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24")))
_METADATA = frozenset(map(ipaddress.ip_address, ("168.63.129.16", "192.0.0.192", "100.100.100.200", "fd00:ec2::254")))
"""Of machines at Azure, Oracle, Alibaba and AWS, beside the link-local ones."""
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class DownloadFailed(RequestError):
    """The archive at an address was not read."""

    code = "download_failed"
    torchserve_type = "DownloadArchiveException"


class NotAllowed(NotFound):
    """No pattern of --allowed-urls matches the address."""

    torchserve_type = "ModelNotFoundException"

    def __init__(self, url: str) -> None:
        super().__init__(
            f"Given URL {redact_uri(url)[:128]} does not match any allowed URL(s)",
            hint="put the file into the model store, or start the server with --allowed-urls",
        )


class AlreadyStored(RequestError):
    """The store has a file of this name; TorchServe answers 500."""

    code = "already_stored"
    status = 409
    torchserve_type = "InternalServerException"

    def __init__(self, name: str) -> None:
        super().__init__(f"Model file already exists {name}")


def is_http(source: str) -> bool:
    return bool(_HTTP.match(source))


@dataclass(frozen=True, slots=True)
class AllowedUrls:
    """Patterns of whole addresses, in any case, as TorchServe's `allowed_urls`."""

    patterns: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> AllowedUrls:
        """Patterns with commas between. Raises UsageError."""
        try:
            return cls(tuple(re.compile(one.strip(), re.IGNORECASE) for one in text.split(",") if one.strip()))
        except re.error as error:
            raise UsageError(
                f"--allowed-urls {text[:80]} is no regular expression: {error}",
                hint=r"write for example https://models\.example\.com/.*",
            ) from error

    def allows(self, url: str) -> bool:
        """False for a long one: an ordinary pattern with two `.*` takes time squared in the length."""
        return len(url) <= _URL_CHARACTERS and any(one.fullmatch(url) for one in self.patterns)

    def names_host(self, url: str) -> bool:
        """Whether a pattern allows `url` for its host, and not the same address on any host.

        >>> AllowedUrls.parse("https://10[.]0[.]0[.]5/.*").names_host("https://10.0.0.5/a.mar")
        True
        >>> AllowedUrls.parse("https?://.*").names_host("https://10.0.0.5/a.mar")
        False
        """
        parts = urlsplit(url)
        port = "" if parts.port is None else f":{parts.port}"
        others = [urlunsplit(parts._replace(netloc=_OTHER_HOST + one)) for one in {"", port}]
        return any(one.fullmatch(url) and not any(map(one.fullmatch, others)) for one in self.patterns)


def file_of(url: str) -> str:
    """The name in the store of what `url` names. Raises NotFound, DownloadFailed."""
    if ".." in url:
        raise NotFound(f"Relative path is not allowed in url: {redact_uri(url)[:128]}")
    name = urlsplit(url).path.rsplit("/", 1)[-1]
    if not _FILE.fullmatch(name):
        raise DownloadFailed(f"'{name[:128]}' at the end of {redact_uri(url)[:128]} is no name of a file in the store")
    return name


def download(url: str, name: str, store: Path, allowed: AllowedUrls, *, max_bytes: int = MAX_BYTES) -> Path:
    """The new file `name` of `store` with the content of `url`. Blocks.

    Raises NotAllowed, AlreadyStored, DownloadFailed, StorageError; then there is no file.
    """
    if not allowed.allows(url):
        raise NotAllowed(url)
    target = store / name
    if target.exists():
        raise AlreadyStored(name)
    try:
        with _unnamed_file(store) as (file, path):
            _read(url, allowed, file, max_bytes)
            file.flush()
            os.fsync(file.fileno())
            folder = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:  # fails if the name was taken meanwhile; link(2) without a folder would link the symbolic link itself
                os.link(path, name, dst_dir_fd=folder, follow_symlinks=True)
            finally:
                os.close(folder)
    except FileExistsError as error:
        raise AlreadyStored(name) from error
    except OSError as error:
        raise files.storage_error(error, target) from error
    return target


@contextlib.contextmanager
def _unnamed_file(folder: Path) -> Iterator[tuple[BinaryIO, str]]:
    """A file that ends with this process, and where it can be linked from; with a name where the file system wants one.

    Source: open(2), O_TMPFILE.
    """
    name = None
    try:
        handle = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        handle, name = tempfile.mkstemp(prefix=files.PARTIAL, dir=folder)
    try:
        with open(handle, "wb") as file:
            yield file, name or f"/proc/self/fd/{handle}"
    finally:
        if name is not None:
            os.unlink(name)


def _read(url: str, allowed: AllowedUrls, file: Any, max_bytes: int) -> None:
    import httpx  # slow to import

    until, at = time.monotonic() + TOTAL_S, url
    try:
        with httpx.Client(verify=ssl.create_default_context(), trust_env=False, timeout=_SILENCE_S) as client:
            for _ in range(_REDIRECTS + 1):
                with contextlib.closing(client.send(_request(client, at, allowed), stream=True)) as response:
                    if response.is_redirect:
                        at = _follow(at, response.headers["location"], allowed)
                        continue
                    if response.status_code != 200:
                        raise DownloadFailed(f"Failed to download archive from: {redact_uri(url)[:128]}")
                    return _copy(response, url, file, max_bytes, until)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise DownloadFailed(f"Failed to download archive from: {redact_uri(url)[:128]}") from error
    raise DownloadFailed(f"{redact_uri(url)[:128]} is redirected more than {_REDIRECTS} times")


def _copy(response: httpx.Response, url: str, file: Any, max_bytes: int, until: float) -> None:
    size = 0
    for piece in response.iter_raw():
        size += len(piece)
        if size > max_bytes:
            raise DownloadFailed(f"{redact_uri(url)[:128]} has more than {max_bytes} bytes, the limit of a download")
        if time.monotonic() > until:
            raise DownloadFailed(
                f"{redact_uri(url)[:128]} was not read within {TOTAL_S:g} s; put the file into the model store"
            )
        file.write(piece)
    told = response.headers.get("content-length", str(size))
    if told != str(size):
        raise DownloadFailed(f"{redact_uri(url)[:128]} ended after {size} of {told[:20]} bytes")


def _follow(at: str, to: str, allowed: AllowedUrls) -> str:
    """Raises NotAllowed, DownloadFailed."""
    target = urljoin(at, to)
    if not allowed.allows(target):
        raise NotAllowed(target)
    if urlsplit(at).scheme == "https" and urlsplit(target).scheme != "https":
        raise DownloadFailed(f"{redact_uri(at)[:128]} is redirected from https to {redact_uri(target)[:128]}")
    return target


def _request(client: httpx.Client, url: str, allowed: AllowedUrls) -> httpx.Request:
    """A request to the checked address of the host. Raises DownloadFailed, ValueError."""
    parts = urlsplit(url)
    plain = len(url) <= _URL_CHARACTERS and url.isascii() and url.isprintable() and not set(url) & set(" \\#")
    if not plain or "@" in parts.netloc or parts.hostname is None or parts.scheme not in ("http", "https"):
        raise DownloadFailed(f"'{redact_uri(url)[:128]}' is no plain http or https address")
    address = _resolve(parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
    _check(address, url, named=allowed.names_host(url))
    host = f"[{address}]" if address.version == 6 else str(address)
    port = "" if parts.port is None else f":{parts.port}"
    return client.build_request(
        "GET",
        urlunsplit(parts._replace(netloc=host + port)),
        headers={"host": parts.netloc, "accept-encoding": "identity", "user-agent": "trueline"},
        extensions={"sni_hostname": parts.hostname},
    )


def _resolve(host: str, port: int) -> _Address:
    return ipaddress.ip_address(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])


def _check(address: _Address, url: str, *, named: bool) -> None:
    """Raises DownloadFailed for an address that clients may not reach through the server."""
    inner = _unwrap(address)
    never = inner.is_link_local or inner.is_multicast or inner.is_unspecified or inner in _METADATA
    if never or (not named and not (_is_public(inner) and address.is_global)):
        raise DownloadFailed(
            f"Failed to download archive from: {redact_uri(url)[:128]}: its host is on this machine or in a private "
            "network",
            hint="a pattern of --allowed-urls that names the host allows it, unless the address is link-local",
        )


def _is_public(address: _Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        return address.is_global and address in _UNICAST
    return address.is_global and not any(address in network for network in _SPECIAL)


def _unwrap(address: _Address) -> _Address:
    """The IPv4 address in an IPv6 address (mapped, 6to4, NAT64), else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
