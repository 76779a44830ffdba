"""Iterators and files: what gives another value each time. Some show how far they are (the rest of a
list, the line number of a reader), others show nothing (rows of a database, lines of a file)."""

import copy
import gc
import io
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import GeneratorType, WrapperDescriptorType
from typing import Any

from trueline.capture.model import code_paths

NEST = 4
"""Iterators inside of iterators that are looked at: `map(int, filter(None, lines))`."""
WIDTH = 8
"""Iterators side by side that are looked at: `zip(rows, names)`."""
_COUNTS = ("line_num", "index", "iterindex")
"""Attributes that say how far an iterator is: of a reader of csv, of arrays of numpy."""


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator that is written in C: `itertools.count`, `iter([...])`, `csv.reader`."""
    slot = getattr(type(value), "__next__", None)
    return isinstance(slot, WrapperDescriptorType) and not isinstance(value, GeneratorType | io.IOBase)


def is_stream(value: Any) -> bool:
    """Whether it is an iterator of any kind but the user's own, which shows what it keeps, or an open file to read."""
    if isinstance(value, io.IOBase):
        in_memory = isinstance(value, io.StringIO | io.BytesIO)
        return not value.closed and (in_memory or value.readable())
    step = getattr(type(value), "__next__", None)
    code = getattr(step, "__code__", None)
    return step is not None and (code is None or not code_paths.is_users(code.co_filename))


def hides_place(value: Any) -> bool:
    """Whether nothing shows how far a stream is. A generator counts: what it keeps may follow from earlier sizes that
    it was sent, and it cannot be put back."""
    if isinstance(value, io.StringIO | io.BytesIO) or not is_stream(value):
        return False
    return not is_iterator(value) or not any(find_position(value))


def find_position(value: Any, nest: int = NEST) -> tuple[object, ...]:
    """Where an iterator is; each part is empty where nothing shows it."""
    left, shown = _read(lambda: operator.length_hint(value, -1)), ""
    if type(value).__name__ in ("count", "repeat"):
        shown = repr(value)
    counts = [_read(lambda name=name: getattr(value, name)) for name in _COUNTS]  # type: ignore[misc]
    plain = [one for one in (*_state_of(value), *counts) if isinstance(one, int)]
    nested = [one for one in _state_of(value) if isinstance(one, tuple)]
    return (plain, (left or -1) + 1, shown, repr(nested) if nested else "", *find_inside(value, nest))


def _read(ask: Callable[[], Any]) -> Any:
    """None where there is no answer."""
    try:
        return ask()
    except Exception:  # noqa: BLE001 - what an iterator of a library raises may be anything: numpy's a ValueError
        return None


def _state_of(value: Any) -> Sequence[object]:
    """What a copy of an iterator would be made of: numbers that it is made with, and its state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 and later: DeprecationWarning
        made = _read(value.__reduce__) if hasattr(value, "__reduce__") else None
    if not isinstance(made, tuple) or len(made) < 2:
        return ()
    return [one for one in made[1] if isinstance(one, int)] + [one for one in made[2:] if isinstance(one, int | tuple)]


def find_inside(value: Any, nest: int = NEST) -> Iterator[object]:
    """Where the iterators are that `value`, an iterator or a generator, takes its values from."""
    held = gc.get_referents(value) if nest else []
    for one in [*held, *(inner for some in held if type(some) is tuple for inner in some[:WIDTH])]:
        if isinstance(one, GeneratorType):
            yield -1 if one.gi_frame is None else (one.gi_frame.f_lasti, repr(_plain_locals(one)))
            yield from find_inside(one, nest - 1)
        elif is_iterator(one):
            yield from find_position(one, nest - 1)


def _plain_locals(generator: Any) -> list[object]:
    return [one for one in generator.gi_frame.f_locals.values() if isinstance(one, int | float | str)]


def copy_iterator(value: Any) -> Any:
    """An iterator that is where `value` is; None where there is no copy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _read(lambda: copy.copy(value))
