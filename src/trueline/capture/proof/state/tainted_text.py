"""Texts, bytes and hashes that note each decision that depends on them, as the numbers of `tainted.py` do.

What is made of such a text is one too (`text.split("-")[0]`, `digest()[0]`), and a number where it is a number. A key
of a dict or set is looked up by its hash, which decides nothing that could be turned.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trueline.capture.model import opaque
from trueline.capture.proof.state import tainted
from trueline.capture.proof.state.tainted import Decisions, Range, mark

_QUESTIONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__")
_KEPT = frozenset({"__add__", "__getitem__", "__mul__", "__rmul__", "__mod__", "__format__", "__str__", "__iter__"})


class _Tainted:
    """A text or bytes that notes decisions."""

    plain: Any
    decisions: Decisions


class TaintedStr(_Tainted, str):
    pass


class TaintedBytes(_Tainted, bytes):
    pass


class TaintedHash:
    """A hash whose digest notes decisions."""

    def __init__(self, plain: Any, decisions: Decisions) -> None:
        self._plain, self._decisions = plain, decisions

    def __getattr__(self, name: str) -> Any:
        held = getattr(self._plain, name)
        return _mark_result(held, self._decisions) if callable(held) else held


def mark_any(value: Any, decisions: Decisions) -> Any:
    """`value`, and what is in a list or tuple, as one that notes decisions; as it is where it is of another kind."""
    if type(value) in (list, tuple):
        return type(value)(mark_any(one, decisions) for one in value)
    if type(value) in _KINDS:
        marked = _KINDS[type(value)](value)
        marked.plain, marked.decisions = value, decisions
        return marked
    if opaque.is_hash(value):
        return TaintedHash(value, decisions)
    if type(value) is uuid.UUID:
        marked = uuid.UUID(int=value.int)
        object.__setattr__(marked, "int", mark(value.int, decisions))
        return marked
    return value if "decisions" in getattr(value, "__dict__", {}) else mark(value, decisions)


_KINDS: dict[type, Any] = {str: TaintedStr, bytes: TaintedBytes}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.plain if isinstance(value, _Tainted) else value


def _mark_result(function: Callable[..., Any], decisions: Decisions) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        found = function(*map(_plain, args), **options)
        return decisions.take(found) if isinstance(found, bool) else mark_any(found, decisions)

    return call


def _method(kind: type, name: str) -> Callable[..., Any]:
    own = getattr(kind, name)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        found = own(self.plain, *map(_plain, args), **options)
        if found is NotImplemented:
            return found
        if name == "__iter__":
            return iter([mark_any(one, self.decisions) for one in found])
        return self.decisions.take(found) if isinstance(found, bool) else mark_any(found, self.decisions)

    return call


for _kind, _marked in _KINDS.items():
    for _name in dir(_kind):
        _public = not _name.startswith("_") and _name not in ("maketrans", "fromhex")
        if _public or _name in _QUESTIONS or (_name in _KEPT and hasattr(_kind, _name)):
            setattr(_marked, _name, _method(_kind, _name))
    _marked.__hash__ = lambda self: hash(self.plain)
    _marked.__reduce__ = lambda self: (type(self.plain), (self.plain,))


@contextmanager
def marking_reads(owner: Any, name: str, decisions: Decisions, within: Range) -> Iterator[None]:
    """Within the block each read of the attribute `name` of `owner` gives what notes decisions: also of a value that
    the call stored there before (`self.link = sha1(self.link).digest()`)."""
    kind = type(owner)

    def read(self: Any) -> Any:
        value = vars(self)[name]
        return mark(value, decisions, within) if isinstance(value, int | float) else mark_any(value, decisions)

    def write(self: Any, value: Any) -> None:
        vars(self)[name] = tainted.plain_of(_plain(value))

    swapped = type(kind.__name__, (kind,), {name: property(read, write), "__module__": kind.__module__})
    try:
        owner.__class__ = swapped
    except TypeError:  # another layout
        yield
        return
    try:
        yield
    finally:
        owner.__class__ = kind
