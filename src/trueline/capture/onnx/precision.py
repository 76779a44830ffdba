"""Where ONNX Runtime computes less exactly than torch does, by an amount that grows with a size or is all of a number.

Sums of many numbers, or of a free count
    ONNX Runtime adds one element after the other in single precision; torch adds in a tree, and accumulates `cumsum` in
    double. Equal numbers round the same way at each addition: a mean of 4,096 differed from torch's by 5.6e-5 of it.
Fourier transforms
    Of a length that is no power of two; summed, at length 1,000, answers up to 12 were off by 5e-4, torch 3e-6.
Magnitudes of complex numbers
    A square of 1e-30 is 0 in single precision.
Normalizations
    Mean and variance are such sums. Rows of 512 by 512 equal numbers were off by 6.6e-4, torch's by 2.5e-7.
Sigmoids
    ONNX Runtime's is a polynomial: off by 2 % at -12, and 0 below -18. The formula takes its place, but before a layer
    whose sums hide its tail. A single addition hides nothing: a condition that is cast to a number may add zero.

Largest and smallest numbers
    A NaN is left out, unless it is the first, where torch's answer is NaN. The answer may only steer a loop, so that no
    probe shows it.

Each is computed in double, or by its formula; sums of a few stay, since probes see their error as it is.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="onnxruntime 1.31",
    cost="casts around sums over a free size and around transforms",
    helps=("fft_length-lengths_divide", "convolution_causal-lengths_mean", "large_and_small_columns-maximum-glu"),
)

_SUMS = ("ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "CumSum")
_NORMALIZATIONS = ("InstanceNormalization", "LayerNormalization")
_FEW = 1024
"""At most this many numbers are added up by ONNX Runtime's own operators."""
_FX_NODE = "pkg.torch.onnx.fx_node"
_MIXES = frozenset((
    *("Conv", "ConvTranspose", "Einsum", "Gemm", "GRU", "LSTM", "MatMul", "RNN"),
    *("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization"),
    *("Acos", "Cos", "Cosh", "Exp", "HardSigmoid", "LogSoftmax", "Sigmoid", "Softmax", "Softplus"),
))  # fmt: skip
"""Operators that add a small number to larger ones, or take one for zero."""


def compute_exactly(model: ir.Model) -> None:
    """Rewrites `model` in place."""
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.inputs and node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT:
            if _loses_digits(node):
                _compute_in_double(node)
            elif node.op_type == "Sigmoid" and reaches_output(node):
                _compute_by_formula(node)
            elif node.op_type in ("ReduceMax", "ReduceMin"):
                _keep_nan(node)
            elif node.op_type in _NORMALIZATIONS and _normalizes_many(node):
                _normalize_by_formula(node, ir.DataType.FLOAT)
        elif node.op_type in _NORMALIZATIONS and node.inputs[0] is not None and _is_of_doubles(node):
            _normalize_by_formula(node, ir.DataType.DOUBLE)
        elif node.op_type == "BatchNormalization" and node.inputs[0] is not None and _is_of_doubles(node):
            _normalize_by_channel(node)


def _loses_digits(node: ir.Node) -> bool:
    if node.op_type in _SUMS and not _is_magnitude(node):
        return _are_many(_sizes_of_axes(node))
    if node.op_type == "DFT":
        return any(not isinstance(size, int) or size & (size - 1) for size in _sizes_of_axes(node))
    return _is_magnitude(node)


def _is_magnitude(node: ir.Node) -> bool:
    return node.op_type == "ReduceL2" and "aten.abs" in node.metadata_props.get(_FX_NODE, "")


def _are_many(sizes: Sequence[object]) -> bool:
    fixed = [size for size in sizes if isinstance(size, int)]
    return len(fixed) < len(sizes) or math.prod(fixed) > _FEW


def _sizes_of_axes(node: ir.Node) -> list[object]:
    """The sizes of the axes that are added up, a name or None for a free one; none where the shape is not known."""
    value = node.inputs[0]
    shape = value.shape if value is not None else None
    if shape is None:
        return []
    axes = _axes(node)
    sizes = [shape[axis] for axis in (range(len(shape)) if axes is None else axes)]
    return [size if isinstance(size, int) else None for size in sizes]


def _normalizes_many(node: ir.Node) -> bool:
    """Whether it has a free count of numbers, or more than ONNX Runtime sums up well, and its rank is known."""
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    if shape is None or any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return False
    return _are_many([shape[axis] for axis in _normalized_axes(node, len(shape))])


def _is_of_doubles(node: ir.Node) -> bool:
    """Whether it is one of doubles, whose rank is known: it has what is added to the variance in single precision."""
    value = node.inputs[0]
    beside = any(one.uses() or one.is_graph_output() for one in node.outputs[1:])
    return value is not None and value.dtype == ir.DataType.DOUBLE and value.shape is not None and not beside


def _normalized_axes(node: ir.Node, rank: int) -> list[int]:
    if node.op_type == "InstanceNormalization":
        return list(range(2, rank))
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
    return list(range(axis % rank, rank))


def _axes(node: ir.Node) -> list[int] | None:
    """None: all, or not known."""
    attribute = node.attributes.get("axis") or node.attributes.get("axes")
    if attribute is not None:
        found = attribute.value
        return [int(found)] if isinstance(found, int) else [int(one) for one in found]
    given = node.inputs[-1] if len(node.inputs) > 1 else None
    tensor = None if given is None else convenience.get_const_tensor(given)
    return None if tensor is None or not tensor.size else [int(one) for one in tensor.numpy().reshape(-1)]


def _compute_in_double(node: ir.Node) -> None:
    wide = ir.node("Cast", [node.inputs[0]], attributes={"to": ir.DataType.DOUBLE})
    squares = node.op_type == "ReduceL2" and not _is_magnitude(node)  # out of range where torch's are
    kind = "ReduceSumSquare" if squares else node.op_type
    same = ir.Node(node.domain, kind, [wide.outputs[0], *node.inputs[1:]], node.attributes.values())
    same.outputs[0].shape = node.outputs[0].shape
    narrow = ir.node("Cast", [same.outputs[0]], attributes={"to": ir.DataType.FLOAT})
    narrow.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    _replace(node, [wide, same, narrow, *([ir.node("Sqrt", [narrow.outputs[0]])] if squares else [])])


def _keep_nan(node: ir.Node) -> None:
    types = ir.DataType.BOOL, ir.DataType.UINT8, ir.DataType.UINT8, ir.DataType.BOOL
    torn = ir.node("IsNaN", [node.inputs[0]])
    number = ir.node("Cast", [torn.outputs[0]], attributes={"to": ir.DataType.UINT8})
    any_torn = ir.Node("", "ReduceMax", [number.outputs[0], *node.inputs[1:]], node.attributes.values())
    steps = torn, number, any_torn, ir.node("Cast", [any_torn.outputs[0]], attributes={"to": ir.DataType.BOOL})
    for one, kind in zip(steps, types, strict=True):
        one.outputs[0].type = ir.TensorType(kind)
    same = ir.Node(node.domain, node.op_type, list(node.inputs), node.attributes.values())
    nan = ir.node("Constant", [], attributes={"value": ir.tensor(math.nan, dtype=ir.DataType.FLOAT)})
    chosen = ir.node("Where", [steps[-1].outputs[0], nan.outputs[0], same.outputs[0]])
    _replace(node, [*steps, same, nan, chosen])


def _normalize_by_formula(node: ir.Node, single: ir.DataType) -> None:
    """Mean and sum of squares in double, the latter rounded to `single`, so that it overflows where torch's does."""
    given, scale, *rest = (value for value in node.inputs if value is not None)
    assert given.shape is not None
    rank = len(given.shape)
    epsilon = _epsilon_of(node)
    nodes: list[ir.Node] = []

    def add(op: str, *inputs: ir.Node | ir.Value, to: ir.DataType, **attributes: Any) -> ir.Node:
        values = [one.outputs[0] if isinstance(one, ir.Node) else one for one in inputs]
        nodes.append(ir.node(op, values, attributes=attributes | ({"to": to} if op == "Cast" else {})))
        nodes[-1].outputs[0].type = ir.TensorType(to)
        return nodes[-1]

    def hold(number: float | list[int], kind: ir.DataType) -> ir.Node:
        return add("Constant", to=kind, value=ir.tensor(number, dtype=kind))

    wide, whole = ir.DataType.DOUBLE, ir.DataType.INT64
    axes = hold(_normalized_axes(node, rank), whole)
    numbers = add("Cast", given, to=wide)
    apart = add("Sub", numbers, add("ReduceMean", numbers, axes, to=wide), to=wide)
    total = add("Cast", add("ReduceSumSquare", apart, axes, to=wide), to=single)
    sizes = add("Gather", add("Shape", given, to=whole), axes, to=whole)
    count = add("Cast", add("ReduceProd", sizes, keepdims=0, to=whole), to=single)
    variance = add("Add", add("Div", total, count, to=single), hold(epsilon, single), to=single)
    found = add("Div", add("Cast", apart, to=single), add("Sqrt", variance, to=single), to=single)
    if node.op_type == "InstanceNormalization":  # its scale and shift are a number for each channel
        beside = hold(list(range(1, rank - 1)), whole)
        scale, *rest = (add("Unsqueeze", one, beside, to=single).outputs[0] for one in (scale, *rest))
    found = add("Mul", found, scale, to=single)
    for shift in rest:
        found = add("Add", found, shift, to=single)
    _replace(node, nodes)


def _epsilon_of(node: ir.Node) -> float:
    """The number of the code: the attribute has it in single precision."""
    return float(str(np.float32(node.attributes["epsilon"].as_float()))) if "epsilon" in node.attributes else 1e-5


def _normalize_by_channel(node: ir.Node) -> None:
    """Of doubles, by the mean and variance that the program holds."""
    given, scale, shift, mean, variance = node.inputs
    assert given is not None
    assert given.shape is not None
    nodes: list[ir.Node] = []

    def add(op: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        nodes.append(ir.node(op, inputs, attributes=attributes))
        nodes[-1].outputs[0].type = ir.TensorType(ir.DataType.DOUBLE)
        return nodes[-1].outputs[0]

    beside = add("Constant", value=ir.tensor(list(range(1, len(given.shape) - 1)), dtype=ir.DataType.INT64))
    beside.type = ir.TensorType(ir.DataType.INT64)
    epsilon = add("Constant", value=ir.tensor(_epsilon_of(node), dtype=ir.DataType.DOUBLE))
    deviation = add("Sqrt", add("Add", variance, epsilon))
    scale, shift, mean, deviation = (add("Unsqueeze", one, beside) for one in (scale, shift, mean, deviation))
    found = add("Mul", add("Div", add("Sub", given, mean), deviation), scale)
    add("Add", found, shift)
    _replace(node, nodes)


def _compute_by_formula(node: ir.Node) -> None:
    one = ir.node("Constant", [], attributes={"value": ir.tensor(1.0, dtype=ir.DataType.FLOAT)})
    negative = ir.node("Neg", [node.inputs[0]])
    power = ir.node("Exp", [negative.outputs[0]])
    below = ir.node("Add", [one.outputs[0], power.outputs[0]])
    _replace(node, [one, negative, power, below, ir.node("Reciprocal", [below.outputs[0]])])


def _replace(node: ir.Node, by: list[ir.Node]) -> None:
    """Puts `by` in the place of `node`; the last one returns what `node` does."""
    assert node.graph is not None
    old = node.outputs[0]
    for number, one in enumerate(by):
        if one.outputs[0].type is None:
            kind = ir.DataType.DOUBLE if one is not by[-1] and by[0].op_type == "Cast" else ir.DataType.FLOAT
            one.outputs[0].type = ir.TensorType(kind)
        one.metadata_props.update(node.metadata_props)
        one.outputs[0].name = f"{old.name}_exactly_{number}"
    by[-1].outputs[0].shape = old.shape
    convenience.replace_nodes_and_values(node.graph, node, [node], by, [old], [by[-1].outputs[0]])


def reaches_output(node: ir.Node) -> bool:
    """Whether an answer holds the small numbers of `node` as they are, or one of a subgraph does."""
    left, seen = list(node.outputs), set[int]()
    while left:
        value = left.pop()
        if value.is_graph_output():
            return True
        for user in _new_users(value, seen):
            left.extend(user.outputs)
    return False


def _new_users(value: ir.Value, seen: set[int]) -> Iterator[ir.Node]:
    for user, _ in value.uses():
        if user.op_type not in _MIXES and id(user) not in seen:
            seen.add(id(user))
            yield user
