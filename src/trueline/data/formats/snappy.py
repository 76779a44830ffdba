"""Snappy's framing format over pyarrow's raw codec, and the CRC-32C in it.

Source: framing_format.txt of google/snappy: a stream identifier, then chunks of type (1 byte), length (3 bytes, little
endian), masked CRC-32C of the content (4 bytes), content of at most 65,536 bytes.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

UInt32s = npt.NDArray[np.uint32]

_IDENTIFIER = b"\xff\x06\x00\x00sNaPpY"
_COMPRESSED, _PLAIN = 0x00, 0x01
_LARGEST = 65536
_POLYNOMIAL = np.uint32(0x82F63B78)
_LANES = 256


def compress(data: bytes) -> bytes:
    """`data` as a framed stream."""
    codec = pa.Codec("snappy")
    out = bytearray(_IDENTIFIER)
    for at in range(0, len(data), _LARGEST):
        block = data[at : at + _LARGEST]
        packed: bytes = codec.compress(block, asbytes=True)
        kind, content = (_COMPRESSED, packed) if len(packed) < len(block) else (_PLAIN, block)
        out += bytes([kind]) + (len(content) + 4).to_bytes(3, "little")
        out += masked_crc32c(block).to_bytes(4, "little") + content
    return bytes(out)


def decompress(data: bytes | memoryview, *, check: bool = False) -> bytes:
    """The content of a framed stream; with `check` its CRC-32Cs are compared too.

    Raises ValueError that names the byte at which the stream is damaged.
    """
    view = memoryview(data)
    if bytes(view[: len(_IDENTIFIER)]) != _IDENTIFIER:
        raise ValueError(f"snappy stream begins with {bytes(view[:10])!r}, expected its identifier")
    codec, pieces, at = pa.Codec("snappy"), [], 0
    while at < len(view):
        kind, end = view[at], at + 4 + int.from_bytes(view[at + 1 : at + 4], "little")
        if at + 4 > len(view) or end > len(view):
            raise ValueError(f"snappy stream ends inside the chunk at byte {at}")
        if kind in (_COMPRESSED, _PLAIN):
            content = view[at + 8 : end]
            piece = bytes(content) if kind == _PLAIN else _raw(codec, content, at)
            if check and masked_crc32c(piece) != int.from_bytes(view[at + 4 : at + 8], "little"):
                raise ValueError(f"snappy chunk at byte {at} does not match its CRC-32C")
            pieces.append(piece)
        elif 0x02 <= kind <= 0x7F:
            raise ValueError(f"snappy chunk at byte {at} has the unknown type {kind:#04x}")
        at = end
    return b"".join(pieces)


def _raw(codec: pa.Codec, content: memoryview, at: int) -> bytes:
    """A raw block begins with its length as a varint."""
    length = shift = 0
    for byte in content[:5]:
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if length > _LARGEST:
        raise ValueError(f"snappy chunk at byte {at} claims {length} bytes, at most {_LARGEST} are allowed")
    found: bytes = codec.decompress(content, decompressed_size=length, asbytes=True)
    return found


def masked_crc32c(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of `data`.

    Long data is cut in 256 lanes that go on side by side in numpy; lanes are joined by moving each over the zeros
    that stand for what follows it (CRCs are linear over GF(2)).
    """
    array = np.frombuffer(data, np.uint8)
    width = len(array) // _LANES
    state = np.uint32(0xFFFFFFFF)
    head = len(array) - width * _LANES
    table = _table()
    if width:
        body = array[head:].reshape(_LANES, width)
    for byte in array[:head].tolist():
        state = table[(int(state) ^ byte) & 0xFF] ^ (state >> np.uint32(8))
    if width:
        lanes = np.zeros(_LANES, np.uint32)
        lanes[0] = state
        for column in np.ascontiguousarray(body.T):
            lanes = table[(lanes ^ column) & np.uint32(0xFF)] ^ (lanes >> np.uint32(8))
        state = _join_lanes(lanes, width)
    return int(state) ^ 0xFFFFFFFF


def _join_lanes(lanes: UInt32s, width: int) -> np.uint32:
    """Lane after lane, pairwise: the left one moves over `width` zero bytes, then widths double."""
    while len(lanes) > 1:
        columns = _shift_matrix(width)
        left, right = lanes[0::2], lanes[1::2]
        for bit in range(32):
            right = right ^ np.where((left >> np.uint32(bit)) & np.uint32(1), columns[bit], np.uint32(0))
        lanes, width = right, width * 2
    return np.uint32(lanes[0])


@lru_cache(maxsize=256)
def _shift_matrix(width: int) -> UInt32s:
    """What each single bit of a state becomes after `width` zero bytes."""
    if width == 1:
        table, bits = _table(), np.uint32(1) << np.arange(32, dtype=np.uint32)
        found: UInt32s = table[bits & np.uint32(0xFF)] ^ (bits >> np.uint32(8))
        return found
    half = _shift_matrix(width // 2)
    found = _apply_matrix(half, half)
    return _apply_matrix(_shift_matrix(1), found) if width % 2 else found


def _apply_matrix(matrix: UInt32s, states: UInt32s) -> UInt32s:
    out = np.zeros(len(states), np.uint32)
    for bit in range(32):
        out ^= np.where((states >> np.uint32(bit)) & np.uint32(1), matrix[bit], np.uint32(0))
    return out


@lru_cache(maxsize=1)
def _table() -> UInt32s:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & np.uint32(1), (table >> np.uint32(1)) ^ _POLYNOMIAL, table >> np.uint32(1))
    return table
