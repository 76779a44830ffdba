"""What is another in another process or on another machine, and is no clock: the hash of a text, the identity of an
object, the order of a set of texts, the folder, the host, numbers of processors and threads.

A program keeps what this process had. Stand-ins give other values, so that an answer which depends on one shows. What
a process computes of numbers alone (`hash((3, 4))`, a set of whole numbers) is the same everywhere, and so is a set
that is sorted or only asked. A set that is written in the code as such (`{"a", "b"}`): see `literal_sets.py`.
"""

import getpass
import locale
import os
import platform
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

Note = Callable[[str], None]
"""Called with what was read."""

TEXTS: tuple[tuple[Any, str], ...] = (
    *((os, name) for name in ("getcwd", "getlogin")),
    *((socket, name) for name in ("gethostname", "getfqdn")),
    *((platform, name) for name in ("node", "system", "machine", "release", "version", "platform", "processor")),
    *((platform, f"python_{name}") for name in ("version", "implementation")),
    (getpass, "getuser"),
    (tempfile, "gettempdir"),
    *((locale, name) for name in ("getpreferredencoding", "nl_langinfo")),
    (torch.backends.cpu, "get_cpu_capability"),
    (torch, "get_float32_matmul_precision"),
)
"""Functions that return a text of this machine."""
STEPS = (0, 1, 1009)
"""By how much the numbers of this machine are moved: a remainder by a number up to 1,008 shows."""
ORDER = "the order of a set"


def follows_process(value: Any) -> bool:
    """Whether the hash of `value` differs between processes, as that of a text does, and of what has an identity.

    >>> follows_process((1, 2.5)), follows_process((1, "a")), follows_process(frozenset({1}))
    (False, True, False)
    """
    if isinstance(value, tuple | frozenset):
        return any(map(follows_process, value))
    return not isinstance(value, int | float | complex)


def move_text(text: Any, step: int) -> Any:
    """Another text of another length; what is no text is returned as it is."""
    return text if not step or not isinstance(text, str) else "other" if step > 1 else f"{text}x"


def make_builtins(note: Note, step: int, mark: Callable[[Any], Any]) -> dict[str, Any]:
    """Stand-ins for `hash`, `id`, `set` and `frozenset` in the user's files. What is computed of a hash or an identity
    is marked, so that it notes decisions; itself it only tells one value from another."""

    def hash_elsewhere(value: Any) -> Any:
        found = hash(value)
        if not follows_process(value):
            return found
        note("hash")
        return Identity(-found if step == STEPS[-1] else found + step, mark)  # in the opposite order, too

    def id_elsewhere(value: Any) -> Any:
        note("id")
        return Identity(id(value) + 16 * step, mark)

    def make(kind: type) -> Any:
        return _LikeSet(kind.__name__, (_Unordered, kind), {"note": staticmethod(note), "turned": bool(step)})

    return {"hash": hash_elsewhere, "id": id_elsewhere, "set": make(set), "frozenset": make(frozenset)}


class Identity(int):
    """A number that only tells one object from another, until something is computed of it."""

    mark: Callable[[Any], Any]

    def __new__(cls, value: int, mark: Callable[[Any], Any]) -> Any:
        made = super().__new__(cls, value)
        made.mark = mark
        return made

    def __reduce__(self) -> Any:
        return int, (int(self),)


def _compute(name: str) -> Callable[..., Any]:
    own = getattr(int, name)

    def compute(self: Any, *others: Any) -> Any:
        found = own(self, *others)
        return found if found is NotImplemented else self.mark(found)

    return compute


for _name in ("mod", "and", "floordiv", "rshift", "xor", "divmod", "truediv", "sub"):
    setattr(Identity, f"__{_name}__", _compute(f"__{_name}__"))


def copy_set(kept: Any, builtins: dict[str, Any]) -> Any:
    """A stand-in for a set that the model keeps; None where its order is the same in all processes."""
    plain = type(kept) in (set, frozenset) and len(kept) > 1 and any(map(follows_process, kept))
    return builtins[type(kept).__name__](kept) if plain else None


def as_set(value: Any, builtins: dict[str, Any]) -> Any:
    """A stand-in for a set that was just made; what is no set, or has one order only, is returned as it is."""
    stand = copy_set(value, builtins)
    return value if stand is None else stand


class _LikeSet(type):
    """Sets that the code makes are instances of the stand-in, too."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.__mro__[2])


def _keep_kind(name: str) -> Callable[..., Any]:
    def combine(self: Any, *others: Any) -> Any:
        found = getattr(type(self).__mro__[2], name)(self, *others)
        return found if found is NotImplemented else type(self)(found)

    return combine


class _Unordered:
    """A set whose order is noted, and another where it is `turned`."""

    note: Note
    turned: bool

    def __iter__(self) -> Iterator[Any]:
        found = list(type(self).__mro__[2].__iter__(self))  # type: ignore[attr-defined]
        if len(found) > 1 and any(map(follows_process, found)):
            self.note(ORDER)
            found = found[::-1] if self.turned else found
        return iter(found)

    def pop(self) -> Any:
        value = next(iter(self))
        self.remove(value)  # type: ignore[attr-defined]
        return value


for _name in ("and", "or", "sub", "xor", "rand", "ror", "rsub", "rxor"):
    setattr(_Unordered, f"__{_name}__", _keep_kind(f"__{_name}__"))
for _name in ("union", "intersection", "difference", "symmetric_difference", "copy"):
    setattr(_Unordered, _name, _keep_kind(_name))
