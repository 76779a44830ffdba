"""Programs on which passes of torch.onnx fail, rewritten to other operators of the same values.

Its pass over dtypes turns `1.0 - x` of integers into a call that torch does not have; its constant folding fails on
parts whose size is known only at run time.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from trueline.capture.export.silence import quiet
from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13, onnxscript 0.7.2",
    cost="a second export, after the first one failed",
    helps=("xlnet", "t5"),
)

_ATEN = torch.ops.aten
_STUMBLES = ("compatible OpOverload for aten.sub", "SplitToSequence")


def helps(error: Exception) -> bool:
    """Whether `error`, raised by torch.onnx, is one that `mended` takes the cause of away."""
    said = []
    cause: BaseException | None = error
    while cause is not None:
        said.append(str(cause))
        cause = cause.__cause__
    return any(words in one for words in _STUMBLES for one in said)


def mended(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """`program` with tensors on the left of each difference, and slices in place of parts."""
    with quiet():
        found: torch.export.ExportedProgram = program.run_decompositions({})
    for node in list(found.graph.nodes):
        if node.target is _ATEN.rsub.Scalar and len(node.args) == 2 and not node.kwargs:
            _turned(found.graph, node)
        elif node.target is _ATEN.split.Tensor and isinstance(node.args[1], Node):
            _sliced(found.graph, node)
    found.graph.lint()
    return found


def _turned(graph: Graph, node: Node) -> None:
    """`1.0 - x` as `x * -1.0 + 1.0`, of floats: a product with -1 is exact, the sum rounded as the difference."""
    given, number = node.args
    if not isinstance(number, float):
        return
    with graph.inserting_before(node):
        less = graph.call_function(_ATEN.mul.Tensor, (given, -1.0))
        less.meta = dict(node.meta)
        found = graph.call_function(_ATEN.add.Tensor, (less, number))
        found.meta = dict(node.meta)
    node.replace_all_uses_with(found)
    graph.erase_node(node)


def _sliced(graph: Graph, node: Node) -> None:
    """Parts of a size that is known only when the program runs, each as a slice; the last one ends where all ends."""
    given, size, *rest = node.args
    dim = node.kwargs.get("dim", rest[0] if rest else 0)
    assert isinstance(size, Node)
    for part in list(node.users):
        if part.target is not operator.getitem:
            return
        number = part.args[1]
        assert isinstance(number, int)
        bounds = []
        with graph.inserting_before(part):
            for times in (number, number + 1):
                bound = graph.call_function(operator.mul, (size, times))
                bound.meta["val"] = size.meta["val"] * times
                bounds.append(bound)
            found = graph.call_function(_ATEN.slice.Tensor, (given, dim, *bounds))
        found.meta = dict(part.meta)
        part.replace_all_uses_with(found)
        graph.erase_node(part)
    graph.erase_node(node)
