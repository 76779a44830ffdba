"""The exporter's guards that are conditions of the user's code: `if length // 16000 == 5`.

torch compares sizes for reasons of its own, too: strides, broadcasting, its way with 0 and 1. A program mostly holds
where such a guard is broken, and probes decide. Behind a condition of the user's code there may be anything.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv, ShapeGuardPythonPrinter

from trueline.capture.model.code_paths import is_of_python, is_users

_NOTED: "WeakKeyDictionary[ShapeEnv, list[Any]]" = WeakKeyDictionary()
_TRANSPARENT = (torch.__file__, "/torch/fx/experimental/", "/capture/patches/stand_ins/")
"""Parts of the paths of code that decides where its caller's does: `SymBool.__bool__`, what stands in for `int`."""


@contextmanager
def watch() -> Iterator[None]:
    """Notes the guards that the user's code makes in the block, with the sizes' environment that they belong to."""
    plain = ShapeEnv.evaluate_sym_node

    def evaluate(env: ShapeEnv, *given: Any, **named: Any) -> Any:
        before = len(env.guards)
        answer = plain(env, *given, **named)
        if len(env.guards) > before and _is_of_user(sys._getframe(1)):
            _NOTED.setdefault(env, []).extend(guard.expr for guard in env.guards[before:])
        return answer

    ShapeEnv.evaluate_sym_node = evaluate  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ShapeEnv.evaluate_sym_node = plain  # type: ignore[method-assign]


def _is_of_user(frame: FrameType | None) -> bool:
    """Whether the nearest code that is not part of how torch compares sizes is the user's."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_of_python(file) and not any(part in file for part in _TRANSPARENT):
            return is_users(file)
        frame = frame.f_back
    return False


def list_codes(program: torch.export.ExportedProgram) -> frozenset[str]:
    """Of the program's guards those that `watch` noted, as torch writes them."""
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    sizes: list[Any] = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    env = next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)
    if env is None or env not in _NOTED:
        return frozenset()
    sources: Any = env.var_to_sources
    printer = ShapeGuardPythonPrinter(sources, lambda source: source.name, sources)
    return frozenset(printer.doprint(one) for one in _NOTED[env] if one.free_symbols <= sources.keys())
