"""Decompresses request bodies a piece at a time, within a bound of what comes out. Source: RFC 1950 to 1952."""

import zlib

from trueline.errors import RequestError, TooLarge, UnsupportedMedia
from trueline.web.body import Body, BodyBuffer

CODINGS = frozenset({"gzip", "x-gzip", "deflate"})
ON_LOOP_BYTES = 64 * 2**10
"""Decompressed at once; the rest in a thread. A few bytes may become any number of bytes."""
PIECE_BYTES = 256 * 2**10
MAX_MEMBERS = 4096
"""Of one gzip body: each costs time, even an empty one."""
_IN_BYTES = 16 * 2**10


def check_coding(coding: str) -> None:
    """Raises UnsupportedMedia."""
    if coding not in CODINGS:
        raise UnsupportedMedia(
            f"content-encoding '{coding[:64]}' is not read here; send gzip, deflate or the plain body"
        )


class Decompressor:
    """Decompresses one body. Its methods raise TooLarge beyond `limit_bytes`, RequestError for a torn body."""

    def __init__(self, body: Body, coding: str, limit_bytes: int) -> None:
        """Raises UnsupportedMedia."""
        check_coding(coding)
        self._body, self._coding, self._limit = memoryview(body), coding, limit_bytes
        self._at = 0
        self._rest = b""
        self._reader: zlib._Decompress | None = None
        self._members = 0
        self._plain = BodyBuffer()

    def run(self, num_bytes: int | None = None) -> Body | None:
        """The plain body; None after about `num_bytes` of it, if there is more. May be continued in a thread."""
        end = None if num_bytes is None else len(self._plain) + num_bytes
        while self._rest or self._at < len(self._body) or self._reader is not None:
            if end is not None and len(self._plain) >= end:
                return None
            self._step()
        return self._plain.take()

    def _step(self) -> None:
        piece: bytes | memoryview = self._rest
        if not piece:
            piece = self._body[self._at : self._at + _IN_BYTES]
            self._at += len(piece)
        if self._reader is None:
            self._reader = self._begin(piece)
        try:
            found = self._reader.decompress(piece, min(PIECE_BYTES, self._limit + 1 - len(self._plain)))
        except zlib.error as error:
            raise RequestError(f"the body is no {self._coding}: {error}") from error
        self._plain.add(found)
        if len(self._plain) > self._limit:
            raise TooLarge(f"the opened body has more than {self._limit} bytes, which is what this server takes")
        self._rest = self._reader.unconsumed_tail
        if self._reader.eof:
            self._rest, self._reader = self._reader.unused_data, None
            if self._coding == "deflate":
                self._rest, self._at = b"", len(self._body)
        elif not found and not self._rest and self._at >= len(self._body):
            raise RequestError(f"the body is torn: its {self._coding} does not end")

    def _begin(self, piece: bytes | memoryview) -> "zlib._Decompress":
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise TooLarge(f"the body has more than {MAX_MEMBERS} members of gzip", hint="compress it in one piece")
        if self._coding != "deflate":
            return zlib.decompressobj(31)
        # some clients send deflate without zlib's two bytes in front
        has_head = len(piece) > 1 and piece[0] & 0x0F == 8 and (piece[0] << 8 | piece[1]) % 31 == 0
        return zlib.decompressobj(15 if has_head else -15)


def decompress(body: Body, coding: str, limit_bytes: int) -> Body:
    """The plain body. Raises TooLarge beyond `limit_bytes`, RequestError for a torn one, UnsupportedMedia.

    >>> decompress(zlib.compress(b"abc"), "deflate", 10)
    b'abc'
    """
    plain = Decompressor(body, coding, limit_bytes).run()
    assert plain is not None  # run to its end
    return plain
