"""Operators that a library registers for itself: as operators that every runtime knows, or named with their line.

A bundle holds aten operators only: another machine need not have the library, and no other runtime knows it. For some
that stand in well-known models an equivalent is written here; it becomes part of the program, and is proven with it.
Source of the meaning: the library's own documentation of the operator and its eager implementation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import SourceLine


def _grouped_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Rows [S, K] sorted by group, each times the weight [G, K, N] of its own; `offs` [G] says where groups end.

    How many rows a group has the values decide, and no graph program has such a loop: each group's product is taken of
    all rows, and one is kept, which is G times the work. What lies beyond the last group is 0, as in the original.
    """
    at = torch.arange(input.shape[0], device=input.device)
    found = input.new_zeros(input.shape[0], weight.shape[2])
    start = torch.zeros_like(offs[0])
    for group in range(weight.shape[0]):
        inside = (at >= start) & (at < offs[group])
        found = torch.where(inside[:, None], input @ weight[group], found)
        start = offs[group]
    return found


EQUIVALENTS: dict[str, Callable[..., Any]] = {"transformers::grouped_mm_fallback": _grouped_mm}
"""Name of an operator -> the same in aten operators."""


def as_aten(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """`program` with an equivalent in the place of each operator that has one; itself where it calls none.

    What torch keeps around operators (an autocast, the levels of a vmap) is carried out.
    """
    called = _targets(program)
    own = [one for one in called if isinstance(one, torch._ops.OpOverload)]
    table = {one: EQUIVALENTS[one._schema.name] for one in own if one._schema.name in EQUIVALENTS}
    return program.run_decompositions(table) if table or any(map(_is_wrapper, called)) else program


def _targets(program: torch.export.ExportedProgram) -> list[Any]:
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    return list(dict.fromkeys(node.target for graph in graphs for node in graph.nodes if node.op == "call_function"))


def _is_wrapper(target: Any) -> bool:
    autocast = target is torch.ops.higher_order.wrap_with_autocast
    return autocast or getattr(target, "__module__", "") == "torch._functorch.predispatch"


_NODE = re.compile(r"%(\w+) :")
_OPERATOR = re.compile(r"torch\.ops\.(\w+\.\w+\.\w+)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def line_of(program: torch.export.ExportedProgram, said: str) -> SourceLine | None:
    """The user's line that called the node, or else the operator, that the message `said` names."""
    nodes = list(program.graph.nodes)
    names, operators = set(_NODE.findall(said)[:1]), set(_OPERATOR.findall(said)[:1])
    found = [node for node in nodes if node.name in names] or [node for node in nodes if str(node.target) in operators]
    for node in found:
        frames = [(file, int(line)) for file, line in _FRAME.findall(node.meta.get("stack_trace") or "")]
        places = [SourceLine(file=file, line=line) for file, line in frames if code_paths.is_users(file)]
        if places:
            return places[-1]
    return None
