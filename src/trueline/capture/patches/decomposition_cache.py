"""What torch looks up again for each export is looked up once a process: half of the time of a small export.

For each list of the operators that an export may keep whole, torch asks C++ for 800 names and looks for each of them,
as often as there are namespaces of operators; an operator stays where it was found, so that is done again only when
other names are there. And for the 5,000 kernels that torch lays over those operators, and takes away again, it makes as
many functions, each with annotations that Python works out and nobody reads.

It changes nothing that torch decides: see `torch/_export/utils.py::_materialize_cpp_cia_ops` and
`torch/_ops.py::OperatorBase.py_impl`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._export.utils

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13",
    cost="saves 130 ms",
    helps=("all",),
)

_UTILS: Any = torch._export.utils
_OPS: Any = torch._ops
_names: list[str] = []
"""Of the operators that have been looked for."""


class _Annotations(type):
    def __getitem__(cls, said: object) -> type:
        return cls

    def __instancecheck__(cls, found: object) -> bool:
        return isinstance(found, Callable)  # type: ignore[arg-type] # "expected _ClassInfo": it is an ABC


class _Said(metaclass=_Annotations):
    """Stands for `Callable` where functions are made: whatever it holds costs nothing to say."""


@contextmanager
def looked_up_once() -> Iterator[None]:
    """While a model is exported in the block, what torch has found in this process it does not look for again."""
    materialize, callable_ = _UTILS._materialize_cpp_cia_ops, _OPS.Callable

    def when_new() -> None:
        global _names
        now = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if now != _names:
            materialize()
            _names = now

    _UTILS._materialize_cpp_cia_ops, _OPS.Callable = when_new, _Said
    try:
        yield
    finally:
        _UTILS._materialize_cpp_cia_ops, _OPS.Callable = materialize, callable_
