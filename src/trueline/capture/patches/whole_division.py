"""The smallest whole number divided by -1, truncated: torch ends the process with SIGFPE, and a server with it.

In the saved copy of the graph dividend and divisor change their signs first; the answer is then that of `//`.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13",
    cost="three operators beside each division of whole numbers that truncates",
    helps=("division_by_value", "ids_modulo"),
)
_ATEN = torch.ops.aten
_TRAPS = (torch.int32, torch.int64)


@contextmanager
def avoid_overflow(program: torch.export.ExportedProgram) -> Iterator[None]:
    """In the block, where `program` is saved, its graph has no truncated division that may trap."""
    module = program.graph_module
    original = module.graph
    if any(_may_trap(node) for node in original.nodes):
        module.graph = _rewrite(copy.deepcopy(original))
    try:
        yield
    finally:
        if module.graph is not original:
            module.graph = original


def _may_trap(node: torch.fx.Node) -> bool:
    truncates = node.target is _ATEN.div.Tensor_mode and node.kwargs.get("rounding_mode") == "trunc"
    return truncates and node.meta["val"].dtype in _TRAPS


def _rewrite(graph: torch.fx.Graph) -> torch.fx.Graph:
    for node in [one for one in graph.nodes if _may_trap(one)]:
        above, below = node.args
        with graph.inserting_before(node):
            if not isinstance(below, torch.fx.Node):
                node.args = (_call(graph, _ATEN.neg.default, above), 1) if below == -1 else node.args
                continue
            is_minus = _call(graph, _ATEN.eq.Scalar, below, -1)
            negative = _call(graph, _ATEN.where.self, is_minus, _call(graph, _ATEN.neg.default, above), above)
            node.args = negative, _call(graph, _ATEN.masked_fill.Scalar, below, is_minus, 1)
    return graph


def _call(graph: torch.fx.Graph, function: Callable[..., Any], *args: Any) -> torch.fx.Node:
    node = graph.call_function(function, args)
    node.meta["val"] = function(*(one.meta["val"] if isinstance(one, torch.fx.Node) else one for one in args))
    return node
