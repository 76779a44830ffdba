"""torch.onnx's own translations are listed, and their signatures read, once a process, and not once an export.

For each export torch.onnx asks onnxscript for the list, and onnxscript parses the source of all 500 functions in it to
learn the name of a domain: more than half of the time of a small export. The list follows from onnxscript's registry,
so it is kept for as long as that holds the same functions. And for each of them torch.onnx reads the annotations anew:
a signature follows from its function alone. Sources: onnxscript's `_framework_apis/torch_2_5.py::get_torchlib_ops`;
`torch/onnx/_internal/exporter/_registration.py::OnnxDecompMeta`.
"""

from __future__ import annotations

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
    cost="saves 900 ms from the second export of a process on",
    helps=("all",),
)

_APIS: Any = vars(_lazy_import)["onnxscript_apis"]
_SIGNATURES: Any = _schemas


@contextmanager
def listed_once() -> Iterator[None]:
    """While a model is exported in the block, the list and the signatures are those that were made before."""
    usual, reads = _APIS.get_torchlib_ops, _SIGNATURES.op_signature_from_function
    _APIS.get_torchlib_ops = lambda: _listed(usual, _functions())
    _SIGNATURES.op_signature_from_function = lambda function, *said, **more: (
        _read(reads, function, said, tuple(more.items()))
        if isinstance(function, Hashable)
        else reads(function, *said, **more)
    )
    try:
        yield
    finally:
        _APIS.get_torchlib_ops, _SIGNATURES.op_signature_from_function = usual, reads


def _functions() -> tuple[int, ...]:
    """The identities of what is registered; those of the last list stay what they are, for the list holds them."""
    from onnxscript.function_libs.torch_lib import ops, registration

    del ops  # the import registers
    return tuple(
        id(function) for one in registration.default_registry.values() for function in (*one.overloads, *one.complex)
    )


@lru_cache(maxsize=1)
def _listed(usual: Any, functions: tuple[int, ...]) -> Any:
    return usual()


@lru_cache(maxsize=4096)
def _read(reads: Any, function: Any, said: tuple[Any, ...], more: tuple[tuple[str, Any], ...]) -> Any:
    return reads(function, *said, **dict(more))
