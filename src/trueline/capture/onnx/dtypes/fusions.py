"""Operators that ONNX Runtime joins into one whose numbers are in single precision, apart: for doubles.

A product of matrices beside a factor (`(a @ b) * 0.1`) becomes a FusedMatMul, which has the factor in FP32; a
normalization by hand becomes one operator, which has what is added below its root in FP32. Two moves of the same
elements between them, which no pass leaves out, keep both. Sources: ONNX Runtime's `matmul_scale_fusion.cc`,
`layer_norm_fusion.cc`.
"""

import onnx_ir as ir
from onnx_ir import convenience

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="onnxruntime 1.31",
    cost="two moves beside a factor of a product of matrices, of doubles alone",
    helps=("(a @ b) * 0.1 of doubles", "addmm of doubles with alpha"),
)
_FACTORS = ("Mul", "Div")


def separate(node: ir.Node, at: int, tag: str) -> None:
    """Puts two moves before the input `at` of `node`, which no pass of a runtime looks through."""
    value = node.inputs[at]
    assert value is not None
    assert node.graph is not None
    axis = ir.node("Constant", [], attributes={"value": ir.tensor([0], dtype=ir.DataType.INT64)})
    apart = ir.node("Unsqueeze", [value, axis.outputs[0]])
    same = ir.node("Squeeze", [apart.outputs[0], axis.outputs[0]])
    for number, one in enumerate((axis, apart, same)):
        one.outputs[0].name = f"apart_{tag}_{number}"
        one.outputs[0].type = ir.TensorType(ir.DataType.INT64) if one is axis else value.type
        one.metadata_props.update(node.metadata_props)
    same.outputs[0].shape = value.shape
    node.graph.insert_before(node, [axis, apart, same])
    node.replace_input_with(at, same.outputs[0])


def keep_doubles(model: ir.Model) -> None:
    """Rewrites `model` in place."""
    for number, node in enumerate(list(ir.traversal.RecursiveGraphIterator(model.graph))):
        for at, value in enumerate(node.inputs):
            producer = value.producer() if value is not None and value.dtype == ir.DataType.DOUBLE else None
            if producer is not None and _would_be_joined(producer, node):
                separate(node, at, f"{number}_{at}")


def _would_be_joined(first: ir.Node, second: ir.Node) -> bool:
    if second.op_type == "Sqrt":
        return first.op_type == "Add"
    pair = first.op_type, second.op_type
    return (pair[0] == "MatMul" and _is_scaled(second)) or (pair[1] == "MatMul" and _is_scaled(first))


def _is_scaled(node: ir.Node) -> bool:
    """Whether it multiplies by a number, or divides by one, that no float is."""
    for value in node.inputs if node.op_type in _FACTORS else ():
        tensor = None if value is None else convenience.get_const_tensor(value)
        if tensor is not None and tensor.size == 1:
            number = tensor.numpy()
            return bool((number != number.astype("float32")).any()) or node.op_type == "Div"
    return False
