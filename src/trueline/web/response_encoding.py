"""Compresses large responses for clients that accept it (RFC 9110, section 12.5.3). Pure; the caller takes a thread.

Clients in Python accept gzip by default, so raw tensors, which hardly shrink, are compressed only for a client that
accepts nothing else, as Triton's client does on request.
"""

from __future__ import annotations

import zlib

import msgspec

from trueline.web.messages import Request, Response

MIN_BYTES = 64 * 2**10
"""A smaller body is sent as it is: packing it takes longer than sending it."""
_LEVEL = 1
_WBITS = {"gzip": 31, "deflate": 15}
_TEXT = (b"application/json", b"text/", b"application/openmetrics-text")
_RAW = b"application/octet-stream"


def coding_for(request: Request, response: Response) -> str | None:
    """The coding in which `response` is to be sent; None: as it is."""
    accepted = request.headers.get(b"accept-encoding")
    if accepted is None or len(response.body) < MIN_BYTES or response.pieces is not None:
        return None
    if b"content-encoding:" in response.headers or request.method == "HEAD":
        return None
    codings = parse_accepted(accepted)
    coding = next((name for name in _WBITS if name in codings), None)
    if response.content_type.startswith(_TEXT) or (response.content_type == _RAW and len(codings) == 1):
        return coding
    return None


def parse_accepted(value: bytes) -> set[str]:
    """The codings that an Accept-Encoding header accepts; `*` is read as gzip.

    >>> sorted(parse_accepted(b"GZip;q=0.5, br, deflate;q=0, identity"))
    ['br', 'gzip']
    """
    accepted = set()
    for part in value[:1024].decode("latin-1").lower().split(","):
        name, _, quality = part.strip().partition(";")
        weight = quality.strip().removeprefix("q=").strip()
        if name.strip() and weight not in ("0", "0.0", "0.00", "0.000"):
            accepted.add("gzip" if name.strip() == "*" else name.strip())
    return accepted - {"identity"}


def encode(response: Response, coding: str) -> Response:
    """`response` in `coding`. Takes some 10 ms for a megabyte."""
    packer = zlib.compressobj(_LEVEL, wbits=_WBITS[coding])
    body = packer.compress(response.body) + packer.flush()
    lines = b"content-encoding: %b\r\nvary: accept-encoding\r\n" % coding.encode()
    return msgspec.structs.replace(response, body=body, headers=response.headers + lines, lead=b"")
