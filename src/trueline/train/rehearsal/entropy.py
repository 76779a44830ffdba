"""Where Python code draws from the system's entropy, and what returns the bytes of a pretence there.

What a library draws by itself in C (`torch.Generator().seed()`) is not among it.
"""

from __future__ import annotations

import builtins
import io
import os
import random
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from trueline.train.rehearsal.pretence import ENTROPY, Pretence

DEVICES = ("/dev/urandom", "/dev/random")
_FILE_BYTES = 1 << 16
Replacement = tuple[Any, str, Any]
"""A module or class, a name in it, and what is there instead."""


class EntropyStream(io.RawIOBase):
    """A device of entropy that is read as a file."""

    def __init__(self, pretence: Pretence) -> None:
        self._pretence = pretence

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        self._pretence.note(ENTROPY)
        room[:] = self._pretence.draw(len(room))
        return len(room)


def list_entropy(pretence: Pretence) -> list[Replacement]:
    def draw(count: int, *_: Any) -> bytes:
        pretence.note(ENTROPY)
        return pretence.draw(count)

    plain_seed = random.Random.seed

    def seed_plain(generator: random.Random, a: Any = None, version: int = 2) -> None:
        plain_seed(generator, draw(32) if a is None else a, version)

    def seed_global(a: Any = None, version: int = 2) -> None:
        random._inst.seed(a, version)

    def seed_torch() -> int:
        seed = int.from_bytes(draw(7))
        torch.manual_seed(seed)
        return seed

    def make_unique() -> uuid.UUID:
        return uuid.UUID(bytes=draw(16), version=4)

    found: list[Replacement] = [
        (os, "urandom", draw), (os, "getrandom", draw), (random, "_urandom", draw), (uuid, "uuid4", make_unique),
        (random.Random, "seed", seed_plain), (random, "seed", seed_global),
        (torch, "seed", seed_torch), (torch.random, "seed", seed_torch),
    ]  # fmt: skip
    return [*found, *_list_devices(pretence, draw)]


def is_device(name: Any) -> bool:
    return isinstance(name, str | os.PathLike) and os.fspath(name) in DEVICES


def is_open_device(value: Any) -> bool:
    return isinstance(value, io.BufferedIOBase | io.RawIOBase) and is_device(getattr(value, "name", None))


def open_stream(pretence: Pretence, mode: str = "rb", buffering: int = -1) -> Any:
    """What `open` returns for a device: without buffering bytes are drawn as they are read."""
    raw = EntropyStream(pretence)
    if "b" in mode and not buffering:
        return raw
    buffered = io.BufferedReader(raw)
    return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="latin-1")


def _list_devices(pretence: Pretence, draw: Callable[[int], bytes]) -> list[Replacement]:
    plain, plain_descriptor, plain_array = builtins.open, os.open, np.fromfile

    def open_file(file: Any, mode: str = "r", buffering: int = -1, *given: Any, **named: Any) -> Any:
        if is_device(file):
            return open_stream(pretence, mode, buffering)
        return plain(file, mode, buffering, *given, **named)

    def open_descriptor(path: Any, flags: int, *given: Any, **named: Any) -> int:
        if not is_device(path):
            return plain_descriptor(path, flags, *given, **named)
        descriptor = os.memfd_create("entropy")
        os.write(descriptor, draw(_FILE_BYTES))
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def read_array(file: Any, dtype: Any = float, count: int = -1, *given: Any, **named: Any) -> Any:
        if not is_device(file):
            return plain_array(file, dtype, count, *given, **named)
        return np.frombuffer(draw(count * np.dtype(dtype).itemsize), dtype).copy()

    return [(builtins, "open", open_file), (io, "open", open_file), (os, "open", open_descriptor),
            (np, "fromfile", read_array)]  # fmt: skip
