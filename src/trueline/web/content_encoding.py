"""`Content-Encoding`: gzip and deflate bodies, decompressed no further than the limit of plain bodies. Pure.

Source: RFC 9110 8.4.
"""

from __future__ import annotations

import zlib

from trueline.errors import RequestError, TooLarge, UnsupportedMedia

CODINGS = frozenset({"gzip", "x-gzip", "deflate"})
IN_THREAD_BYTES = 64 * 2**10
"""A longer body is decompressed in a thread."""


def check_coding(coding: str) -> None:
    """Raises UnsupportedMedia."""
    if coding not in CODINGS:
        raise UnsupportedMedia(
            f"content-encoding '{coding[:64]}' is not read here; send gzip, deflate or the plain body"
        )


def decompress(body: bytes | bytearray, coding: str, limit_bytes: int) -> bytes:
    """The plain body. Raises TooLarge beyond `limit_bytes`, RequestError for a torn one.

    >>> decompress(zlib.compress(b"abc"), "deflate", 10)
    b'abc'
    """
    check_coding(coding)
    found, left = bytearray(), bytes(body)
    while left:
        reader = zlib.decompressobj(_window(left, coding))
        try:
            found += reader.decompress(left, limit_bytes + 1 - len(found))
        except zlib.error as error:
            raise RequestError(f"the body is no {coding}: {error}") from error
        if len(found) > limit_bytes:
            raise TooLarge(f"the opened body has more than {limit_bytes} bytes, which is what this server takes")
        if not reader.eof:
            raise RequestError(f"the body is torn: its {coding} does not end")
        left = reader.unused_data if coding != "deflate" else b""
    return bytes(found)


def _window(body: bytes, coding: str) -> int:
    """zlib's wbits. Some clients send deflate without zlib's two bytes in front."""
    if coding != "deflate":
        return 31
    has_head = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
    return 15 if has_head else -15
