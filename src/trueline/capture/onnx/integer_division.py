"""The smallest whole number divided by -1: ONNX Runtime ends its process with SIGFPE, where torch answers.

Such a request would end the server. So where a divisor may be -1, dividend and divisor change their signs first.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience

from trueline.capture.onnx.size_arithmetic import computes_size
from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="onnxruntime 1.31",
    cost="four operators beside each division of whole numbers by others that are no constants",
    helps=("division_by_value", "ids_modulo"),
)
_TRAPS = (ir.DataType.INT32, ir.DataType.INT64)


def avoid_overflow(model: ir.Model) -> None:
    """Rewrites `model` in place."""
    for number, node in enumerate(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.op_type in ("Div", "Mod") and not computes_size(node) and _may_overflow(node):
            _change_signs(node, number)


def _may_overflow(node: ir.Node) -> bool:
    dividend, divisor = node.inputs
    kinds = {value.dtype for value in (dividend, divisor) if value is not None}
    if divisor is None or kinds.isdisjoint(_TRAPS):
        return False
    constant = convenience.get_const_tensor(divisor)
    return constant is None or bool(np.any(constant.numpy() == -1))


def _change_signs(node: ir.Node, number: int) -> None:
    dividend, divisor = node.inputs
    graph = node.graph
    assert dividend is not None
    assert divisor is not None
    assert graph is not None
    kind = dividend.dtype if dividend.dtype in _TRAPS else divisor.dtype
    assert kind is not None
    minus, one = (
        ir.node("Constant", [], attributes={"value": ir.tensor(np.array(value, kind.numpy()))}) for value in (-1, 1)
    )
    is_minus = ir.node("Equal", [divisor, minus.outputs[0]])
    negative = ir.node("Neg", [dividend])
    above = ir.node("Where", [is_minus.outputs[0], negative.outputs[0], dividend])
    below = ir.node("Where", [is_minus.outputs[0], one.outputs[0], divisor])
    made = [minus, one, is_minus, negative, above, below]
    for at, new in enumerate(made):
        new.outputs[0].name = f"signs_{number}_{at}"
        new.outputs[0].type = ir.TensorType(ir.DataType.BOOL if new is is_minus else kind)
        new.metadata_props.update(node.metadata_props)
    graph.insert_before(node, made)
    node.replace_input_with(0, above.outputs[0])
    node.replace_input_with(1, below.outputs[0])
