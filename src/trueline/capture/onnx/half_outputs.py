"""torch.onnx sums half-precision numbers in single precision, and leaves out the cast back where a sum is an output.

Its pass over dtypes adds that cast, but the program still names what was there before it as its output. ONNX
Runtime then returns FP32 where the model returns FP16.
"""

import onnx_ir as ir
import torch

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13",
    cost="a cast of such an output",
    helps=("x.half().sum(1)", "x.half().cumsum(1)"),
)
_HALF = {torch.float16: ir.DataType.FLOAT16, torch.bfloat16: ir.DataType.BFLOAT16}


def cast_outputs(model: ir.Model, program: torch.export.ExportedProgram) -> None:
    """Rewrites `model`, which was written from `program`, in place."""
    (returned,) = (node.args[0] for node in program.graph.nodes if node.op == "output")
    outputs = model.graph.outputs
    values = [getattr(one, "meta", {}).get("val") for one in returned][-len(outputs) :]
    for place, (output, value) in enumerate(zip(list(outputs), values, strict=False)):
        kind = _HALF.get(value.dtype) if isinstance(value, torch.Tensor) else None
        if kind is None or output.dtype != ir.DataType.FLOAT:
            continue
        cast = ir.node("Cast", [output], attributes={"to": kind})
        narrow = cast.outputs[0]
        narrow.type, narrow.shape = ir.TensorType(kind), output.shape
        narrow.name, output.name = output.name, f"{output.name}_single"
        model.graph.append(cast)
        outputs[place] = narrow
