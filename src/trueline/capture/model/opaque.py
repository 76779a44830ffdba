"""Objects written in C that keep something which no attribute shows: a buffer of text, a queue, a lock, a number of
ctypes. Each has a state that differs after a write, that can be put back, and in place of which others can be tried."""

import array
import ctypes
import io
import mmap
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

_LOCK = type(threading.Lock())
_NUMBERS: Any = ctypes._SimpleCData
_DIGESTS = frozenset({"_hashlib", "_md5", "_sha1", "_sha2", "_sha3", "_blake2"})
"""Modules of hashes."""
_HIDING = frozenset(
    {
        *(f"{module}.SRE_Scanner" for module in ("_sre", "re")),
        *(f"zlib.{kind}" for kind in ("Compress", "Decompress")),
        *(f"_{name}.{name.upper()}{kind}" for name in ("bz2", "lzma") for kind in ("Compressor", "Decompressor")),
    }
)
_BASES = frozenset({"sqlite3.Connection", "_dbm.dbm", "_gdbm.gdbm", "dbm.dumb._Database"})
_SPANS = memoryview | mmap.mmap


def read_state(value: Any) -> object:
    """What `value` holds; None for an object of another kind, or a closed one."""
    if isinstance(value, io.StringIO | io.BytesIO):
        return None if value.closed else (value.tell(), len(value.getvalue()))
    if isinstance(value, _NUMBERS | ctypes.Structure | ctypes.Array):
        return bytes(value)
    if isinstance(value, queue.SimpleQueue):
        return value.qsize()
    if isinstance(value, _LOCK):
        return value.locked()
    if isinstance(value, np.random.SeedSequence):
        return value.n_children_spawned
    if isinstance(value, _SPANS):
        return bytes(value)
    return value.digest() if is_hash(value) else None


def hides_state(value: Any) -> bool:
    """Whether it continues at each call, from a place that can be neither read nor put back: `re.finditer`, a
    compressor."""
    return f"{type(value).__module__}.{type(value).__name__}" in _HIDING


def is_base(value: Any) -> bool:
    """Whether it is an open database, which may hold other rows at each call."""
    return f"{type(value).__module__}.{type(value).__name__}" in _BASES


def is_hash(value: Any) -> bool:
    """Whether it is a hash of hashlib that can be continued."""
    return type(value).__module__ in _DIGESTS and hasattr(value, "digest")


def write_state(value: Any, state: Any) -> None:
    """Puts back what `value` held, where that can be done."""
    if state is None or read_state(value) == state:
        return
    if isinstance(value, io.StringIO | io.BytesIO):
        value.truncate(state[1])
        value.seek(state[0])
    elif isinstance(value, _NUMBERS | ctypes.Structure | ctypes.Array):
        ctypes.memmove(ctypes.addressof(value), state, len(state))
    elif isinstance(value, queue.SimpleQueue):
        while value.qsize() > state:
            value.get_nowait()
    elif isinstance(value, _LOCK):
        (value.acquire if state else value.release)()
    elif isinstance(value, _SPANS):
        with suppress(TypeError, ValueError):  # one that cannot be written
            value[:] = state


def make_others(value: Any, counts: Iterable[int]) -> Iterator[Any]:
    """Objects of the kind of `value` that hold as much as each of the `counts`."""
    if isinstance(value, _LOCK):
        other = threading.Lock()
        if not value.locked():
            other.acquire()
        yield other
        return
    for count in counts:
        if isinstance(value, np.random.SeedSequence):
            yield np.random.SeedSequence(value.entropy, spawn_key=value.spawn_key, n_children_spawned=count)
        elif isinstance(value, _SPANS):
            yield from (bytearray(count.to_bytes(max(len(value), 8), order)) for order in ("little", "big"))
        elif isinstance(value, _NUMBERS) and type(value)._type_ in "bBhHiIlLqQfd":
            yield type(value)(count)
        elif isinstance(value, array.array) and value.typecode in "bBhHiIlLqQfd":
            yield array.array(value.typecode, [count] * len(value))
        elif isinstance(value, io.StringIO | io.BytesIO):
            made = type(value)()
            made.write("." * count if isinstance(made, io.StringIO) else b"." * count)  # type: ignore[arg-type]
            yield made
        elif isinstance(value, queue.SimpleQueue):
            filled = queue.SimpleQueue[Any]()
            for _ in range(count):
                filled.put(None)
            yield filled
