"""ONNX Runtime's PadFusion lets a MaxPool do the padding of the Pad before it, whose zeros then no longer count.

A MaxPool's own padding is below every number, so a window of negative numbers and padded zeros gets another maximum.
The pass skips a MaxPool that also returns the places of its maxima.
"""

import onnx_ir

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="microsoft/onnxruntime#18136",
    versions="onnxruntime 1.31",
    cost="an unused output",
    helps=("bit", "dpt_hybrid"),
)


def separate_pads(model: onnx_ir.Model) -> None:
    """Gives each MaxPool behind a Pad a second output of places, which is unused."""
    for node in onnx_ir.traversal.RecursiveGraphIterator(model.graph):
        source = node.inputs[0] if node.op_type == "MaxPool" and len(node.outputs) == 1 else None
        producer = source.producer() if source is not None else None
        if producer is not None and producer.op_type == "Pad":
            node.resize_outputs(2)
            node.outputs[1].name = f"{node.outputs[0].name}_places"
            node.outputs[1].type = onnx_ir.TensorType(onnx_ir.DataType.INT64)
