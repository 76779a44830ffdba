"""Programs over which torch.onnx's own passes stumble, written otherwise: the same values, other operators.

Its pass over dtypes runs the program once more, and there an attention may lie in memory otherwise than when it was
exported, so that a view of it cannot be taken; and a number minus a tensor is turned around into a call that torch does
not have. Its folding of constants fails over parts whose size is known only when the program runs. These are bugs of
the passes (torch 2.13, onnxscript 0.7); what is written here is proven as any other program.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from trueline.capture.export.silence import quiet

_ATEN = torch.ops.aten
_STUMBLES = ("Cannot view a tensor", "compatible OpOverload for aten.sub", "SplitToSequence")


def helps(error: Exception) -> bool:
    """Whether `error`, raised by torch.onnx, is one that `mended` takes the cause of away."""
    said = []
    cause: BaseException | None = error
    while cause is not None:
        said.append(str(cause))
        cause = cause.__cause__
    return any(words in one for words in _STUMBLES for one in said)


def mended(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """`program` with a copy before each view, tensors on the left of each difference, and slices for parts."""
    with quiet():
        found: torch.export.ExportedProgram = program.run_decompositions({})
    for node in list(found.graph.nodes):
        if node.target is _ATEN.view.default:
            _copied_first(found.graph, node)
        elif node.target is _ATEN.rsub.Scalar and len(node.args) == 2 and not node.kwargs:
            _turned(found.graph, node)
        elif node.target is _ATEN.split.Tensor and isinstance(node.args[1], Node):
            _sliced(found.graph, node)
    found.graph.lint()
    return found


def _copied_first(graph: Graph, node: Node) -> None:
    given: Any = node.args[0]
    with graph.inserting_before(node):
        copy = graph.call_function(_ATEN.clone.default, (given,), {"memory_format": torch.contiguous_format})
    copy.meta = {**given.meta, "val": given.meta["val"].clone(memory_format=torch.contiguous_format)}
    node.args = (copy, *node.args[1:])


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
