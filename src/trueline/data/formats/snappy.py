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


def decompress(data: bytes | memoryview) -> bytes:
    """The content of a framed stream, whose CRC-32Cs are not compared: RecordIO has a CRC-32 of its own.

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
            pieces.append(bytes(content) if kind == _PLAIN else _decompress_block(codec, content, at))
        elif 0x02 <= kind <= 0x7F:
            raise ValueError(f"snappy chunk at byte {at} has the unknown type {kind:#04x}")
        at = end
    return b"".join(pieces)


def _decompress_block(codec: pa.Codec, content: memoryview, at: int) -> bytes:
    """A raw block begins with its length as a varint."""
    length = shift = 0
    for byte in content[:5]:
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if length > _LARGEST:
        raise ValueError(f"snappy chunk at byte {at} claims {length} bytes, at most {_LARGEST} are allowed")
    block: bytes = codec.decompress(content, decompressed_size=length, asbytes=True)
    return block


def masked_crc32c(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of `data`.

    256 lanes of the data are computed side by side in numpy. CRCs are linear over GF(2), so neighbouring lanes are
    joined by shifting the left one over as many zero bytes as the right one has.
    """
    array = np.frombuffer(data, np.uint8)
    width = len(array) // _LANES
    head, table = len(array) - width * _LANES, _table()
    state = np.uint32(0xFFFFFFFF)
    for byte in array[:head].tolist():
        state = table[(int(state) ^ byte) & 0xFF] ^ (state >> np.uint32(8))
    if width:
        lanes = np.zeros(_LANES, np.uint32)
        lanes[0] = state
        for column in np.ascontiguousarray(array[head:].reshape(_LANES, width).T):
            lanes = table[(lanes ^ column) & np.uint32(0xFF)] ^ (lanes >> np.uint32(8))
        while len(lanes) > 1:
            lanes, width = lanes[1::2] ^ _multiply(_shift_matrix(width), lanes[0::2]), width * 2
        state = lanes[0]
    return int(state) ^ 0xFFFFFFFF


@lru_cache(maxsize=256)
def _shift_matrix(width: int) -> UInt32s:
    """The state after `width` zero bytes, for each single bit of a state."""
    if width == 1:
        table, bits = _table(), np.uint32(1) << np.arange(32, dtype=np.uint32)
        one: UInt32s = table[bits & np.uint32(0xFF)] ^ (bits >> np.uint32(8))
        return one
    half = _shift_matrix(width // 2)
    even = _multiply(half, half)
    return _multiply(_shift_matrix(1), even) if width % 2 else even


def _multiply(matrix: UInt32s, states: UInt32s) -> UInt32s:
    """Over GF(2); `matrix` has a column for each bit of a state."""
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
