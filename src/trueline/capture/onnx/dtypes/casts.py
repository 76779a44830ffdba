"""Roundings that ONNX Runtime and torch.onnx leave out: to half precision, and of casts in a row.

Operators in FP16 and BF16
    ONNX Runtime has kernels for few. It puts casts to FP32 around the others and drops each with the cast beside it,
    which may be the model's own: `(x.half() + 1).float()` is computed in single precision, without infinities, at every
    level of optimization. Casts of the program stay. So each operator that calculates gets casts of its own, and its
    answer is rounded where it leaves torch's operator, as torch's kernels do. BF16 has no other way to run.
Casts in a row
    Where two of them lose digits, ONNX Runtime drops the first: `x.long().int()` saturates where torch's wraps. Two
    moves between them keep both.
Outputs
    torch.onnx sums half-precision numbers in single precision, and leaves out the cast back where a sum is an output:
    its pass over dtypes adds that cast, but the program still names what was there before it as its output.

Source: `onnxruntime/core/optimizer/insert_cast_transformer.cc`.
"""

import onnx_ir as ir
import torch

from trueline.capture.onnx import kernels
from trueline.capture.onnx.dtypes.fusions import separate
from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13, onnxruntime 1.31",
    cost="two casts around each operator in half precision; two moves between casts that lose digits",
    helps=("(x.half() + 1).float() - 1", "x.long().int()", "x.half().sum(1)"),
)
_HALF = {torch.float16: ir.DataType.FLOAT16, torch.bfloat16: ir.DataType.BFLOAT16}
_SINGLE = ir.DataType.FLOAT
_FX_NODE = "pkg.torch.onnx.fx_node"
_NO_ARITHMETIC = frozenset((
    *("Cast", "CastLike", "Clip", "Compress", "Concat", "Constant", "ConstantOfShape", "Expand", "EyeLike", "Flatten"),
    *("Gather", "GatherElements", "GatherND", "Identity", "If", "IsInf", "IsNaN", "Loop", "Max", "Min"),
    *("RandomNormalLike", "RandomUniformLike", "Reshape", "ReverseSequence", "Scan", "ScatterElements", "ScatterND"),
    *("SequenceAt", "SequenceConstruct", "SequenceInsert", "Shape", "Sign", "Size", "Slice", "Split"),
    *("SplitToSequence", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
))  # fmt: skip
"""Operators that are exact in any dtype; those whose dtype is an attribute, or that of a subgraph."""
_FIXED = frozenset(("Cast", "CastLike", "Constant", "ConstantOfShape", "EyeLike", "If", "Loop", "Scan"))
_DIGITS = {
    ir.DataType.BOOL: 1,
    ir.DataType.FLOAT16: 11,
    ir.DataType.BFLOAT16: 8,
    _SINGLE: 24,
    ir.DataType.DOUBLE: 53,
    **{ir.DataType[f"INT{bits}"]: bits - 1 for bits in (8, 16, 32, 64)},
    **{ir.DataType[f"UINT{bits}"]: bits for bits in (8, 16, 32, 64)},
}
"""Binary ones."""


def cast_outputs(model: ir.Model, program: torch.export.ExportedProgram) -> None:
    """Casts the outputs of `model`, which was written from `program`, to the dtypes that the program returns."""
    (returned,) = (node.args[0] for node in program.graph.nodes if node.op == "output")
    outputs = model.graph.outputs
    values = [getattr(one, "meta", {}).get("val") for one in returned][-len(outputs) :]
    for place, (output, value) in enumerate(zip(list(outputs), values, strict=False)):
        kind = _HALF.get(value.dtype) if isinstance(value, torch.Tensor) else None
        if kind is None or output.dtype != _SINGLE:
            continue
        cast = ir.node("Cast", [output], attributes={"to": kind})
        narrow = cast.outputs[0]
        narrow.type, narrow.shape = ir.TensorType(kind), output.shape
        narrow.name, output.name = output.name, f"{output.name}_single"
        model.graph.append(cast)
        outputs[place] = narrow


def keep_halves(model: ir.Model) -> None:
    """Computes operators in half precision as torch does: in single precision, then rounded. In place."""
    opset = model.opset_imports.get("", 18)
    changed = False
    for number, node in enumerate(list(ir.traversal.RecursiveGraphIterator(model.graph))):
        kinds = kernels.read_kinds(node, opset) if node.domain == "" and node.op_type not in _FIXED else {}
        kernels.set_types(node, kinds, opset)
        single = {name: _SINGLE if kind in _HALF.values() else kind for name, kind in kinds.items()}
        if single == kinds or not kernels.has_kernel(node.op_type, opset, single):
            continue
        if _calculates(node) or not kernels.has_kernel(node.op_type, opset, kinds):
            kernels.widen(node, kinds, single, opset, f"half_{number}")
            changed = True
    if changed:
        _round_once(model)


def _calculates(node: ir.Node) -> bool:
    reduction = node.attributes.get("reduction")
    adds_up = reduction is not None and reduction.as_string() != "none"
    return node.op_type not in _NO_ARITHMETIC or adds_up


def _round_once(model: ir.Model) -> None:
    """Leaves out casts to half precision and back within one operator of torch."""
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        rounding = node.inputs[0].producer() if node.op_type == "Cast" and node.inputs[0] is not None else None
        if rounding is None or rounding.op_type != "Cast" or rounding.outputs[0].dtype not in _HALF.values():
            continue
        exact, found, place = rounding.inputs[0], node.outputs[0], node.metadata_props.get(_FX_NODE)
        within = place and place == rounding.metadata_props.get(_FX_NODE) and not found.is_graph_output()
        if within and exact is not None and exact.dtype == _SINGLE == found.dtype:
            for user, at in list(found.uses()):
                user.replace_input_with(at, exact)


def keep_each_cast(model: ir.Model) -> None:
    """Puts moves between two casts that lose digits both. In place."""
    for number, node in enumerate(list(ir.traversal.RecursiveGraphIterator(model.graph))):
        middle = node.inputs[0] if node.op_type == "Cast" else None
        first = middle.producer() if middle is not None else None
        if middle is None or first is None or first.op_type != "Cast" or first.inputs[0] is None:
            continue
        kinds = first.inputs[0].dtype, middle.dtype, node.outputs[0].dtype
        if None in kinds or _holds(kinds[1], kinds[0]) or _holds(kinds[2], kinds[1]):
            continue
        separate(node, 0, f"cast_{number}")


def _holds(wide: ir.DataType | None, narrow: ir.DataType | None) -> bool:
    """Whether each number of the one dtype is one of the other."""
    if wide is None or narrow is None or wide not in _DIGITS or narrow not in _DIGITS:
        return False
    if wide == narrow:
        return True
    digits = _DIGITS[wide] >= _DIGITS[narrow]
    if wide.is_floating_point():
        ranges = wide != ir.DataType.FLOAT16 or (_DIGITS[narrow] <= 8 and not narrow.is_floating_point())
        return digits and ranges
    signs = wide.is_signed() or narrow == ir.DataType.BOOL or not narrow.is_signed()
    return digits and signs and not narrow.is_floating_point()
