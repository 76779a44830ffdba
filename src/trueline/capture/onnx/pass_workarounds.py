"""Programs on which passes of torch.onnx fail, or of which they leave out checks, rewritten to other operators; and
lengths that it infers wrongly.

Its pass over dtypes turns `1.0 - x` of integers into a call that torch does not have; its constant folding fails on
parts whose size is known only at run time.

One leaves out what raises, `torch._assert_async(ok, "…")`. Such a check becomes an index that is 0 where it holds, and
beyond a table of one number where it does not, which ONNX Runtime refuses. What is looked up, 0, is added to the
outputs, so that no runtime leaves it out.

The result of a Fourier transform of a length of its own is taken to be as long as what is transformed, by ONNX Runtime
too. It reuses memory of tensors whose sizes have one name, and fails on some lengths.
"""

import operator
import re
from typing import Any

import onnx_ir
import torch
from onnx_ir import convenience
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map_only

from trueline.capture.export.tracing import quiet
from trueline.capture.patches import Patch
from trueline.runtime.refusals import CHECK_INDEX

PATCH = Patch(
    issue="none found", versions="torch 2.13, onnxscript 0.7.2", cost="a second export", helps=("xlnet", "t5")
)

_ATEN = torch.ops.aten
_CHECK = _ATEN._assert_async.msg
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


_INNER = re.compile(r"val_\d+$")
"""What the exporter calls values inside of a translation, whose shapes are inferred; those of torch's are known."""


def name_lengths(model: onnx_ir.Model) -> None:
    """Gives the length that a transform receives a name of its own. Rewrites `model` in place."""
    for number, node in enumerate(onnx_ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.op_type != "DFT" or len(node.inputs) < 2 or node.inputs[1] is None:
            continue
        found = node.outputs[0]
        last = node.inputs[2] if len(node.inputs) > 2 else None
        axis = None if last is None else convenience.get_const_tensor(last)
        if found.shape is None or axis is None or not _INNER.match(found.name or ""):
            continue
        sizes: list[Any] = list(found.shape)
        sizes[int(axis.numpy().item())] = f"transformed_{number}"
        _forget_shapes(found)
        found.shape = onnx_ir.Shape(sizes)


def _forget_shapes(value: onnx_ir.Value) -> None:
    """Of `value`, and of what is inferred from it."""
    if value.shape is None or value.is_graph_output() or not _INNER.match(value.name or ""):
        return
    value.shape = None
    for user, _ in value.uses():
        for output in user.outputs:
            _forget_shapes(output)


def keep_checks(program: torch.export.ExportedProgram) -> tuple[torch.export.ExportedProgram, list[str]]:
    """`program` with checks that ONNX has, and their messages; itself where it makes none."""
    if not any(node.target is _CHECK for node in program.graph.nodes):
        return program, []
    with quiet():
        functional: torch.export.ExportedProgram = program.run_decompositions({})
    graph = functional.graph
    (output,) = graph.find_nodes(op="output")
    checks = [node for node in graph.nodes if node.target is _CHECK]
    messages = [str(node.args[1]) for node in checks]
    passed = [_look_up(graph, node, CHECK_INDEX + number) for number, node in enumerate(checks)]
    with graph.inserting_before(output):
        (results,) = output.args
        output.args = (tuple(_add(graph, one, passed) for one in results),)
    for specs, one in zip(functional.graph_signature.output_specs, output.args[0], strict=True):
        specs.arg.name = one.name
    graph.lint()
    functional.graph_module.recompile()
    return functional, messages


def _look_up(graph: Graph, check: Node, beyond: int) -> Node:
    """0 in a tensor [1], where the check holds; where it does not, `beyond` is looked up."""
    holds = check.args[0]
    assert isinstance(holds, Node)
    with graph.inserting_before(check), holds.meta["val"].fake_mode:
        table = _call(graph, check, _ATEN.full.default, [1], 0, dtype=torch.int64)
        fails = _call(graph, check, _ATEN.logical_not.default, holds)
        index = _call(graph, check, _ATEN._to_copy.default, fails, dtype=torch.int64)
        index = _call(graph, check, _ATEN.mul.Tensor, index, beyond)
        index = _call(graph, check, _ATEN.view.default, index, [1])
        found = _call(graph, check, _ATEN.index_select.default, table, 0, index)
    check.replace_all_uses_with(found)
    graph.erase_node(check)
    return found


def _add(graph: Graph, result: object, passed: list[Node]) -> object:
    """`result` and the zeros that `passed` are; what is no tensor is returned as it is."""
    if not isinstance(result, Node) or not isinstance(result.meta.get("val"), torch.Tensor):
        return result
    value = result.meta["val"]
    with value.fake_mode:
        for one in passed:
            zero = _call(graph, result, _ATEN._to_copy.default, one, dtype=value.dtype)
            zero = _call(graph, result, _ATEN.view.default, zero, [])
            join = _ATEN.logical_or.default if value.dtype == torch.bool else _ATEN.add.Tensor
            result = _call(graph, result, join, result, zero)
    return result


def _call(graph: Graph, at: Node, target: Any, *args: Any, **options: Any) -> Node:
    node = graph.call_function(target, args, options)
    node.meta = {name: one for name, one in at.meta.items() if name in ("stack_trace", "nn_module_stack")}
    node.meta["val"] = target(*tree_map_only(Node, lambda one: one.meta["val"], args), **options)
    return node
