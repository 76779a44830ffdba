"""`math.ceil(0.5 * length)` in an exported program: said in operators that torch can write to a file.

torch traces Python's ceil and floor of a size and has no words for them in its archive; for trunc, for comparisons and
for a choice between two numbers it has. Up to the file's edge the program stays as it is. Source: torch's schema of
exported programs (the operators on sizes), Python's documentation of math.trunc.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="https://github.com/pytorch/pytorch/issues/138852",
    versions="torch 2.13",
    cost="a copy of the graph, when the program is saved",
    helps=("BestShare", "nllb_moe"),
)

_BEYOND: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {
    math.ceil: (operator.gt, operator.add),
    math.floor: (operator.lt, operator.sub),
}
"""Function -> when its answer is one further than trunc's, and in which direction."""


@contextmanager
def storable(program: torch.export.ExportedProgram) -> Iterator[None]:
    """While `program` is written in the block, its graph rounds sizes by trunc, a comparison and a choice."""
    module = program.graph_module
    before = module.graph
    if not any(node.target in _BEYOND for node in before.nodes if node.op == "call_function"):
        yield
        return
    module.graph = _said(copy.deepcopy(before))
    try:
        yield
    finally:
        module.graph = before


def _said(graph: torch.fx.Graph) -> torch.fx.Graph:
    """`graph` with `ceil(x)` as `trunc(x) + 1` where x is above trunc(x), else `trunc(x)`; and floor likewise."""
    for node in [one for one in graph.nodes if one.op == "call_function" and one.target in _BEYOND]:
        (size,) = node.args
        beyond, step = _BEYOND[node.target]
        with graph.inserting_before(node):
            whole = _added(graph, math.trunc, size)
            further = _added(graph, step, whole, 1)
            found = _added(graph, torch.sym_ite, _added(graph, beyond, size, whole), further, whole)
        found.meta |= node.meta  # shapes that follow are said in its terms
        node.replace_all_uses_with(found)
        graph.erase_node(node)
    return graph


def _added(graph: torch.fx.Graph, function: Callable[..., Any], *args: Any) -> torch.fx.Node:
    node = graph.call_function(function, args)
    node.meta["val"] = function(*(one.meta["val"] if isinstance(one, torch.fx.Node) else one for one in args))
    return node
