"""Keeps foreign web pages out of a server that needs no token.

A browser on this machine sends a page's requests to loopback too: forms and images of any site, and everything once the
site's own name leads to 127.0.0.1 (DNS rebinding). It says so in headers that other programs do not send, and that are
checked here. Sources: CWE-352, CWE-350; RFC 6454; W3C, Fetch Metadata Request Headers.
"""

import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from trueline.errors import UsageError

HEADERS = frozenset([b"origin", b"sec-fetch-site"])
_NAME = re.compile(r"[\w.-]+")
_PORT = re.compile(r":\d*$")
_NUMBERS = re.compile(r"[0-9a-fx.]+")
_WHAT_TO_DO = "--cors-origin allows the pages of one origin"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRule:
    """Which hosts and pages may reach a server without tokens."""

    hosts: frozenset[str] | None = frozenset()
    """Names by which clients may call the server, beside addresses and localhost; None: any name."""
    origin: str = ""
    """Pages of this origin may send requests, or of any for `*`, as the CORS settings say."""

    @classmethod
    def of(cls, host: str, *, allowed: str = "", origin: str = "", any_host: bool = False) -> "PageRule":
        """The rule of a server that listens on `host`; `allowed`: further names, with commas. Raises UsageError."""
        names = [name.strip().lower() for name in allowed.split(",") if name.strip()]
        for name in names:
            if name != "*" and not _NAME.fullmatch(name):
                raise UsageError(f"allowed_hosts has '{name[:80]}'", hint="give names without scheme and port, or *")
        known = None if any_host or "*" in names else frozenset([*names, host.lower(), socket.gethostname().lower()])
        return cls(hosts=known, origin=origin)

    def find_fault(self, method: str, target: bytes, headers: Mapping[bytes, bytes]) -> str:
        """Why a request with this head is refused; empty: it is not. Names of `headers` are in lower case."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        for authority in (host, _authority_of(target)):
            if not self._knows(authority):
                return (
                    f"the request is for the host '{authority[:80]}', which is no name of this server: call it by its "
                    "address, or start it with --allowed-hosts"
                )
        if self.origin == "*":
            return ""
        if b"origin" in headers:
            origin = headers[b"origin"].decode("latin-1").lower()
            if origin and (origin == self.origin.lower() or (host and origin.partition("://")[2] == host)):
                return ""
            return f"the request comes from a page of the origin '{origin[:80]}': {_WHAT_TO_DO}"
        site = headers.get(b"sec-fetch-site", b"none").decode("latin-1")
        if site in ("none", "same-origin") or _follows_link(method, headers):
            return ""
        return f"the request comes from a page of another site (sec-fetch-site: {site[:80]}): {_WHAT_TO_DO}"

    def _knows(self, authority: str) -> bool:
        name = _PORT.sub("", authority).removesuffix(".")
        if not name or self.hosts is None or name in self.hosts:
            return True
        return name == "localhost" or name.endswith(".localhost") or _is_address(name)


def _authority_of(target: bytes) -> str:
    """Host and port of a target in absolute form (RFC 9112, 3.2.2), else "".

    >>> _authority_of(b"http://a.test:80/x?y=http://b"), _authority_of(b"/x?y=http://b")
    ('a.test:80', '')
    """
    if target.startswith(b"/"):
        return ""
    return target.decode("latin-1").partition("://")[2].partition("/")[0].partition("?")[0].rpartition("@")[2].lower()


def _is_address(name: str) -> bool:
    """Whether `name` is an address, which no other site's name can be.

    >>> [_is_address(name) for name in ("127.0.0.1", "[::1]", "127.1", "0x7f.1", "a.test", "127.0.0.1.a.test", "[a]")]
    [True, True, True, True, False, False, False]
    """
    try:
        if name.startswith("["):
            ipaddress.IPv6Address(name[1:-1].partition("%")[0])
        elif _NUMBERS.fullmatch(name):
            socket.inet_aton(name)
        else:
            return False
    except (OSError, ValueError):
        return False
    return True


def _follows_link(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether the user follows a link on another page to a page of this server."""
    follows = headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"sec-fetch-dest") == b"document"
    return follows and method in ("GET", "HEAD")
