"""Does the answer depend on what an iterator or a file gives next? A later value may be another one, of any kind: a
line of a file, a row of a table, the name of a function. Each value is altered: where the answer is then another, or
the model raises, it reads what it is given."""

import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from trueline.capture.model import streams
from trueline.capture.proof.state.tainted import Decisions
from trueline.capture.proof.state.tainted_text import mark_any

READS = frozenset({"read", "read1", "readline", "readlines", "recv", "fetchone", "fetchmany", "fetchall", "send"})
"""Methods of files, cursors and generators that give the next value."""
Alter = Callable[[Any], Any]


class NextValues:
    """Stands in for a stream, with values that are altered."""

    def __init__(self, stream: Any, alter: Alter) -> None:
        self._stream, self._alter = stream, alter
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._give(next(self._stream))

    def _give(self, value: Any) -> Any:
        self.given += 1
        return self._alter(value)

    def __getattr__(self, name: str) -> Any:
        held = getattr(self._stream, name)
        if name in READS and callable(held):
            return lambda *args, **options: self._give(held(*args, **options))
        return self._alter(held) if isinstance(held, int) else held


def keep(value: Any) -> Any:
    return value


def marking_next(decisions: Decisions) -> Alter:
    """Gives numbers and texts that note decisions."""
    return lambda value: tree_map(lambda one: mark_any(one, decisions), value)


def change(value: Any) -> Any:
    """Another value of that kind; an object without any use where nothing is known of the kind."""
    return tree_map(_change_one, value)


def _change_one(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float | complex | np.number):
        return value + 1
    if isinstance(value, str):
        return f"{int(value) + 1}" if value.strip().isdecimal() else f"{value}~"
    if isinstance(value, bytes):
        return bytes((one + 1) % 256 for one in value) or b"~"
    if isinstance(value, torch.Tensor):
        return value.logical_not() if value.dtype is torch.bool else value + 1
    if isinstance(value, np.ndarray) and value.dtype.kind in "iufc":
        return value + 1
    return object()


def stand_for(value: Any) -> Callable[[Alter], NextValues] | None:
    """What makes a stand-in for a stream; None for anything else. A copy is read where there is one, so that no value
    is used up."""
    if not streams.is_stream(value):
        return None

    def make(alter: Alter) -> NextValues:
        copied = None if isinstance(value, io.IOBase) else streams.copy_iterator(value)
        return NextValues(value if copied is None else copied, alter)

    return make
