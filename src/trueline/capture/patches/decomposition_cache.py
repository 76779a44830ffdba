"""torch prepares its composite operators once a process, not once for every export: more than half the time of a small
one.

It looks them up by name for every namespace, and gives 500 of them a dozen kernels each, which it removes again. The
list is kept while no namespace has a new name. Kernels are put back where the operator has those, and gets the
decomposition, with which they were made. And the 5,000 functions that torch defines as kernels get no annotations,
which Python would evaluate and nothing reads. Sources: `torch/_export/utils.py::_collect_all_valid_cia_ops`,
`torch/export/exported_program.py::_override_composite_implicit_decomp`, `torch/_ops.py::OperatorBase.py_impl`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch._export.utils
from torch._subclasses import fake_impls
from torch.export import decomp_utils, exported_program

from trueline.capture.patches import Patch

PATCH = Patch(issue="none found", versions="torch 2.13", cost="saves 250 ms", helps=("all",))

_UTILS: Any = torch._export.utils
_OPS: Any = torch._ops
_PROGRAM: Any = exported_program
_TABLES: Any = decomp_utils
_FAKE: Any = fake_impls
_Override = Callable[[Mapping[Any, Any]], AbstractContextManager[None]]
_names: list[str] = []
"""Of the operators that have been looked up."""
_listed: tuple[object, set[Any]] | None = None
"""What torch knew when it listed the operators, and the list."""
_decompositions: dict[Any, Any] = {}
"""The function that takes an operator apart as C++ does, by the operator: torch makes a new one each time."""
_overrides: dict[tuple[Any, Any], tuple[dict[Any, Any], dict[Any, Any], Any]] = {}
"""By the operator and its decomposition: its kernels before and after that, and its rule for fake tensors."""
_MOST = 5000
"""Overrides that are kept."""


class _Annotations(type):
    def __getitem__(cls, arguments: object) -> type:
        return cls

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Callable)  # type: ignore[arg-type] # "expected _ClassInfo": it is an ABC


class _Callable(metaclass=_Annotations):
    """Replaces `Callable` in annotations of torch._ops, without the cost of `Callable[...]`."""


@contextmanager
def cache_operators() -> Iterator[None]:
    """In the block, an export prepares only operators that are new in this process."""
    materialize, callable_ = _UTILS._materialize_cpp_cia_ops, _OPS.Callable
    collect, override = _UTILS._collect_all_valid_cia_ops, _PROGRAM._override_composite_implicit_decomp
    decompose = _UTILS._get_decomp_for_cia

    def materialize_new() -> None:
        global _names
        names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if names != _names:
            materialize()
            _names = names

    _UTILS._materialize_cpp_cia_ops, _OPS.Callable = materialize_new, _Callable
    for module in (_PROGRAM, _TABLES):
        module._collect_all_valid_cia_ops = lambda: _list_operators(collect)
    for module in (_UTILS, _PROGRAM, _TABLES):
        module._get_decomp_for_cia = lambda op: _get_decomposition(decompose, op)
    _PROGRAM._override_composite_implicit_decomp = lambda wanted: _override(override, wanted)
    try:
        yield
    finally:
        _UTILS._materialize_cpp_cia_ops, _OPS.Callable = materialize, callable_
        for module in (_PROGRAM, _TABLES):
            module._collect_all_valid_cia_ops = collect
        for module in (_UTILS, _PROGRAM, _TABLES):
            module._get_decomp_for_cia = decompose
        _PROGRAM._override_composite_implicit_decomp = override


def _list_operators(collect: Callable[[], set[Any]]) -> set[Any]:
    global _listed
    if _listed is None or _listed[0] != _find_known():
        found = collect()  # which adds names to namespaces
        _listed = _find_known(), found
    return set(_listed[1])


def _get_decomposition(decompose: Callable[[Any], Any], op: Any) -> Any:
    if torch._C.DispatchKey.CompositeImplicitAutograd in op.py_kernels:
        return decompose(op)
    if op not in _decompositions:
        _decompositions[op] = decompose(op)
    return _decompositions[op]


def _find_known() -> object:
    """The names of operators, and how many each namespace has."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    counts = {name: len(getattr(getattr(torch.ops, name), "_dir", ())) for name in torch.ops._dir}
    return names, counts


@contextmanager
def _override(override: _Override, wanted: Mapping[Any, Any]) -> Iterator[None]:
    """As torch's own `override`, which makes those that are missing."""
    with ExitStack() as stack:
        missing = {op: how for op, how in wanted.items() if not _put_back(op, how, stack)}
        before = {op: op.py_kernels.copy() for op in missing if op not in _FAKE.op_implementations_dict}
        stack.enter_context(override(missing))
        if len(_overrides) > _MOST:
            _overrides.clear()
        for op, kernels in before.items():
            _overrides[op, missing[op]] = kernels, op.py_kernels.copy(), _FAKE.op_implementations_dict.get(op)
        yield


def _put_back(op: Any, how: Any, stack: ExitStack) -> bool:
    """Gives `op` its kernels of an earlier time, until `stack` is closed; false where there are none."""
    found = _overrides.get((op, how))
    if found is None or op.py_kernels != found[0] or op in _FAKE.op_implementations_dict:
        return False
    before, after, rule = found

    def set_kernels(kernels: dict[Any, Any]) -> None:
        op.py_kernels.clear()
        op.py_kernels.update(kernels)
        op._dispatch_cache.clear()

    set_kernels(after)
    _FAKE.op_implementations_dict[op] = rule
    stack.callback(set_kernels, before)
    stack.callback(_FAKE._deregister_op_impl, op)
    return True
