"""Programs on which passes of torch.onnx fail, rewritten to other operators of the same values.

Its pass over dtypes turns `1.0 - x` of integers into a call that torch does not have; its constant folding fails on
parts whose size is known only at run time.
"""

import operator

import torch
from torch.fx import Graph, Node

from trueline.capture.export.tracing import quiet
from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found", versions="torch 2.13, onnxscript 0.7.2", cost="a second export", helps=("xlnet", "t5")
)

_ATEN = torch.ops.aten
_MESSAGES = ("compatible OpOverload for aten.sub", "SplitToSequence")


def may_help(error: Exception) -> bool:
    """Whether torch.onnx raised `error` for a reason that `rewrite` removes."""
    messages = []
    cause: BaseException | None = error
    while cause is not None:
        messages.append(str(cause))
        cause = cause.__cause__
    return any(words in message for words in _MESSAGES for message in messages)


def rewrite(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """`program` with the tensor on the left of each difference, and slices in place of parts."""
    with quiet():
        functional: torch.export.ExportedProgram = program.run_decompositions({})
    for node in list(functional.graph.nodes):
        if node.target is _ATEN.rsub.Scalar and len(node.args) == 2 and not node.kwargs:
            _rewrite_difference(functional.graph, node)
        elif node.target is _ATEN.split.Tensor and isinstance(node.args[1], Node):
            _rewrite_split(functional.graph, node)
    functional.graph.lint()
    return functional


def _rewrite_difference(graph: Graph, node: Node) -> None:
    """`1.0 - x` becomes `x * -1.0 + 1.0`: a product with -1 is exact, and the sum is rounded as the difference is."""
    tensor, number = node.args
    if not isinstance(number, float):
        return
    with graph.inserting_before(node):
        negative = graph.call_function(_ATEN.mul.Tensor, (tensor, -1.0))
        result = graph.call_function(_ATEN.add.Tensor, (negative, number))
    negative.meta, result.meta = dict(node.meta), dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _rewrite_split(graph: Graph, node: Node) -> None:
    """Each part of a size that is known only at run time becomes a slice; the last one ends where the tensor ends."""
    tensor, size, *rest = node.args
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
            result = graph.call_function(_ATEN.slice.Tensor, (tensor, dim, *bounds))
        result.meta = dict(part.meta)
        part.replace_all_uses_with(result)
        graph.erase_node(part)
    graph.erase_node(node)
