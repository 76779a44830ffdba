"""A maximum over a tensor that was padded with zeros stays one: ONNX Runtime would make the zeros part of its window.

Its pass that joins a Pad with the pool after it (PadFusion, ONNX Runtime 1.31) lets the pool do the padding, and a
MaxPool's own padding is less than every number: where all that it sees is below nought, the answer is another. A
MaxPool that also says where its maxima lie is left alone, since the places would change; so it is asked for them.
"""

from __future__ import annotations

import onnx_ir

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="https://github.com/microsoft/onnxruntime/pull/18136",
    versions="onnxruntime 1.31",
    cost="one output more for each MaxPool behind a Pad",
    helps=("bit", "dpt_hybrid"),
)


def apart(model: onnx_ir.Model) -> None:
    """Each MaxPool of what a Pad gives has its places as a second output, which nobody reads."""
    for node in onnx_ir.traversal.RecursiveGraphIterator(model.graph):
        given = node.inputs[0] if node.op_type == "MaxPool" and len(node.outputs) == 1 else None
        before = given.producer() if given is not None else None
        if before is not None and before.op_type == "Pad":
            node.resize_outputs(2)
            node.outputs[1].name = f"{node.outputs[0].name}_places"
            node.outputs[1].type = onnx_ir.TensorType(onnx_ir.DataType.INT64)
