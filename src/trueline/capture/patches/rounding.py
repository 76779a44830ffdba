"""`math.ceil`, `math.floor` and `round` of a size, written in operators that torch can save.

torch traces these and its archive has none; it has trunc, comparisons and a choice between two numbers. Only the
saved copy of the graph changes. Source: torch's schema of exported programs.
"""

import copy
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="pytorch/pytorch#138852", versions="torch 2.13", cost="a copy of the graph", helps=("BestShare", "nllb_moe")
)

_FURTHER: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {
    math.ceil: (operator.gt, operator.add),
    math.floor: (operator.lt, operator.sub),
}
"""Function -> when its result is one further than trunc's, and in which direction."""


@contextmanager
def round_by_trunc(program: torch.export.ExportedProgram) -> Iterator[None]:
    """In the block, where `program` is saved, its graph has no ceil, floor and round of a size."""
    module = program.graph_module
    original = module.graph
    if any(_is_rounding(node) for node in original.nodes if node.op == "call_function"):
        module.graph = _rewrite(copy.deepcopy(original))
    try:
        yield
    finally:
        if module.graph is not original:
            module.graph = original


def _rewrite(graph: torch.fx.Graph) -> torch.fx.Graph:
    """`ceil(x)` becomes `trunc(x) + 1` where x is above trunc(x), else `trunc(x)`; floor likewise."""
    for node in [one for one in graph.nodes if one.op == "call_function" and _is_rounding(one)]:
        size = node.args[0]
        with graph.inserting_before(node):
            result = _round_half(graph, size) if node.target is round else _further(graph, node.target, size)
        result.meta |= node.meta  # shapes that follow are written in its terms
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    return graph


def _is_rounding(node: torch.fx.Node) -> bool:
    """Whether it rounds to a whole number."""
    return node.target in _FURTHER or (node.target is round and node.args[1:] in ((), (None,)))


def _further(graph: torch.fx.Graph, target: Any, size: Any) -> torch.fx.Node:
    is_further, step = _FURTHER[target]
    whole = _call(graph, math.trunc, size)
    further = _call(graph, step, whole, 1)
    result = _call(graph, torch.sym_ite, _call(graph, is_further, size, whole), further, whole)
    result.meta["val"] = target(size.meta["val"])  # the archive holds no Piecewise
    return result


def _round_half(graph: torch.fx.Graph, size: Any) -> torch.fx.Node:
    """The nearest whole number, of two equally near ones the even one."""
    low = _further(graph, math.floor, size)
    rest, high = _call(graph, operator.sub, size, low), _call(graph, operator.add, low, 1)
    even = _call(graph, operator.add, low, _call(graph, operator.mod, low, 2))
    below = _call(graph, torch.sym_ite, _call(graph, operator.lt, rest, 0.5), low, even)
    below.meta["val"] = round(size.meta["val"])
    return _call(graph, torch.sym_ite, _call(graph, operator.gt, rest, 0.5), high, below)


def _call(graph: torch.fx.Graph, function: Callable[..., Any], *args: Any) -> torch.fx.Node:
    node = graph.call_function(function, args)
    node.meta["val"] = function(*(one.meta["val"] if isinstance(one, torch.fx.Node) else one for one in args))
    return node
