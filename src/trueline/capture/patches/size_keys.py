"""A size as a key of the user's dicts, in a set or in a text (`if n not in self.masks`, `f"{n:03d}"`, `json.dumps`),
while a model is traced.

torch refuses to hash a symbolic size and to write it in a given form, and writes its name as a text, without a guard.
Here a table that is made for a size is made for all of them, and the symbols are noted: a claim on them ends where they
were compared, because `n in {37, 91}` is decided once.
"""

import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from trueline.capture.model.code_paths import SourceLine, current_line, is_of_python, is_users
from trueline.capture.patches import Patch

PATCH = Patch(
    issue="pytorch/pytorch#135099",
    versions="torch 2.13",
    cost="under 0.1 ms",
    helps=("a mask in a dict by length", "functools.lru_cache of a size"),
)


@contextmanager
def watch() -> Iterator[dict[str, SourceLine | None]]:
    """torch's names of the symbols that the user's code hashes or writes as text in the block, and the first line."""
    noted: dict[str, SourceLine | None] = {}
    hashed, written, encoded = torch.SymInt.__hash__, torch.SymInt.__repr__, json.JSONEncoder.default

    def note(size: torch.SymInt) -> bool:
        """Whether the user's own code asks; a dict, a set and a text have no frames."""
        if not size.node.is_symbolic() or not is_users(_file_that_asks()):
            return False
        _refuse_values(size.node.expr)
        for symbol in size.node.expr.free_symbols:
            noted.setdefault(str(symbol), current_line())
        return True

    def make_hash(size: torch.SymInt) -> int:
        asked = note(size) or bool(noted)  # the exporter then compares what the user's dicts keep
        return hash(("size", str(size.node.expr))) if asked else hashed(size)

    def write(size: torch.SymInt) -> str:
        note(size)
        return str(written(size))  # type: ignore[no-untyped-call]

    def write_in_form(size: torch.SymInt, form: str) -> str:
        if not size.node.is_symbolic():
            return format(int(size), form)
        note(size)
        return str(written(size))  # type: ignore[no-untyped-call]

    def encode(encoder: json.JSONEncoder, value: Any) -> Any:
        if isinstance(value, torch.SymInt) and note(value):
            return str(written(value))  # type: ignore[no-untyped-call]
        return encoded(encoder, value)

    torch.SymInt.__hash__, torch.SymInt.__repr__ = make_hash, write  # type: ignore[method-assign, assignment]
    torch.SymInt.__format__ = write_in_form  # type: ignore[method-assign, assignment]
    json.JSONEncoder.default = encode  # type: ignore[method-assign, assignment]
    try:
        yield noted
    finally:
        torch.SymInt.__hash__, torch.SymInt.__repr__ = hashed, written  # type: ignore[method-assign]
        del torch.SymInt.__format__
        json.JSONEncoder.default = encoded  # type: ignore[method-assign]


def _refuse_values(of: Any) -> None:
    """Raises where a number is not of a size: one that was taken out of a tensor. What a table has for it, or what its
    text is, would be decided once, for all values."""
    if free_unbacked_symbols(of):
        raise RuntimeError("a number out of a tensor is looked up, or written as a text: that is data-dependent")


def _file_that_asks() -> str:
    """The file of the nearest code outside of this one and of the standard library (`pprint.pformat(n)`)."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or is_of_python(frame.f_code.co_filename)):
        frame = frame.f_back
    return frame.f_code.co_filename


def find_symbols(noted: Collection[str], symbols: Mapping[str, str]) -> frozenset[str]:
    """The signature's names of `noted`, by `symbols`; all where one of them has another name by now.

    >>> [sorted(find_symbols({one}, {"s7": "batch", "4*units": "length"})) for one in ("s7", "units", "s8")]
    [['batch'], ['length'], ['batch', 'length']]
    """
    found = {name: [ours for theirs, ours in symbols.items() if name in re.findall(r"\w+", theirs)] for name in noted}
    return frozenset(symbols.values() if not all(found.values()) else (one for some in found.values() for one in some))
