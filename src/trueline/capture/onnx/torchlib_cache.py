"""torch.onnx lists its translations, and reads their signatures, once a process and not once an export.

onnxscript parses the source of 500 functions to learn a domain's name: with the signatures, more than half the time of
a small export. The list is kept while onnxscript's registry holds the same functions. Sources:
`torch_2_5.get_torchlib_ops` of onnxscript; `torch/onnx/_internal/exporter/_registration.py::OnnxDecompMeta`.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from torch.onnx._internal import _lazy_import
from torch.onnx._internal.exporter import _schemas

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13, onnxscript 0.7.2",
    cost="saves 900 ms from the second export on",
    helps=("all",),
)

_APIS: Any = vars(_lazy_import)["onnxscript_apis"]
_SIGNATURES: Any = _schemas


@contextmanager
def cache_torchlib() -> Iterator[None]:
    """In the block, an export reuses the list and the signatures of earlier ones."""
    list_ops, read = _APIS.get_torchlib_ops, _SIGNATURES.op_signature_from_function

    def read_cached(function: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(function, Hashable):
            return _read(read, function, args, tuple(kwargs.items()))
        return read(function, *args, **kwargs)

    _APIS.get_torchlib_ops = lambda: _list_ops(list_ops, _function_ids())
    _SIGNATURES.op_signature_from_function = read_cached
    try:
        yield
    finally:
        _APIS.get_torchlib_ops, _SIGNATURES.op_signature_from_function = list_ops, read


def _function_ids() -> tuple[int, ...]:
    """Identities of the registered functions; the cached list keeps those of its own alive."""
    from onnxscript.function_libs.torch_lib import ops, registration

    del ops  # the import registers
    entries = registration.default_registry.values()
    return tuple(id(function) for entry in entries for function in (*entry.overloads, *entry.complex))


@lru_cache(maxsize=1)
def _list_ops(original: Any, functions: tuple[int, ...]) -> Any:
    return original()


@lru_cache(maxsize=4096)
def _read(original: Any, function: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Any:
    return original(function, *args, **dict(kwargs))
