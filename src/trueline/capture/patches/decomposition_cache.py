"""torch looks its operators up once a process, not once for every namespace: half the time of a small export.

This is repeated only when there are new names. And the 5,000 functions that torch defines as kernels over these
operators get no annotations, which Python would evaluate and nothing reads. Source:
`torch/_export/utils.py::_materialize_cpp_cia_ops`, `torch/_ops.py::OperatorBase.py_impl`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._export.utils

from trueline.capture.patches import Patch

PATCH = Patch(issue="none found", versions="torch 2.13", cost="saves 130 ms", helps=("all",))

_UTILS: Any = torch._export.utils
_OPS: Any = torch._ops
_names: list[str] = []
"""Of the operators that have been looked up."""


class _Annotations(type):
    def __getitem__(cls, arguments: object) -> type:
        return cls

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Callable)  # type: ignore[arg-type] # "expected _ClassInfo": it is an ABC


class _Callable(metaclass=_Annotations):
    """Replaces `Callable` in annotations of torch._ops, without the cost of `Callable[...]`."""


@contextmanager
def cache_operators() -> Iterator[None]:
    """In the block, an export looks up only operators that are new in this process."""
    materialize, callable_ = _UTILS._materialize_cpp_cia_ops, _OPS.Callable

    def materialize_new() -> None:
        global _names
        names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if names != _names:
            materialize()
            _names = names

    _UTILS._materialize_cpp_cia_ops, _OPS.Callable = materialize_new, _Callable
    try:
        yield
    finally:
        _UTILS._materialize_cpp_cia_ops, _OPS.Callable = materialize, callable_
