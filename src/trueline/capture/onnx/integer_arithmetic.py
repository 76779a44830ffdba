"""Whole numbers where the processor decides: a division by -1, shifts by many bits; and roundings of them.

The smallest whole number divided by -1 ends ONNX Runtime's process with SIGFPE, and a server with it, where torch
answers. So where a divisor may be -1, dividend and divisor change their signs first.

torch.onnx returns INT8 for a shifted UINT8, has no translation of `a >> b` of two tensors, and leaves shifts by the
width of the dtype or more to the processor, which takes them modulo it. Here a shift is one of 64 bits: by too many, or
by less than 0, it leaves no bit (`<<`), or the sign (`>>`), as torch's. Roundings of whole numbers are written with
operators that ONNX has for floats alone; they change nothing. Source: torch's ATen/native/cpu/BinaryOpsKernel.cpp
(`lshift_kernel`, `rshift_kernel`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import convenience
from onnxscript.function_libs.torch_lib.ops import core
from onnxscript.onnx_opset import opset18

from trueline.capture.onnx.size_arithmetic import computes_size
from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="onnxscript 0.7.2, onnxruntime 1.31",
    cost="four operators beside each division of whole numbers by others that are no constants, ten for each shift",
    helps=("division_by_value", "ids_modulo", "xorshift", "bits of UINT8"),
)
_TRAPS = (ir.DataType.INT32, ir.DataType.INT64)
_ATEN = torch.ops.aten
_INT64, _UINT64 = ir.DataType.INT64, ir.DataType.UINT64
_ROUNDED = ("floor", "ceil", "round", "trunc")
op: Any = opset18


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


def _promote(*values: Any) -> ir.DataType:
    """The dtype that torch gives to an operator's answer; numbers of the code have none."""
    kinds = [one if isinstance(one, int) else getattr(torch, one.dtype.name.lower()) for one in values]
    given: list[Any] = [
        kind if isinstance(kind, int) else torch.empty((1,) * len(one.shape), dtype=kind)
        for one, kind in zip(values, kinds, strict=True)
    ]
    return ir.DataType[str(torch.result_type(*given)).removeprefix("torch.").upper()]


def _wide(value: Any) -> Any:
    return op.Constant(value_int=value) if isinstance(value, int) else op.Cast(value, to=_INT64)


def _shift_bits(value: Any, by: Any, direction: str) -> Any:
    found = op.BitShift(*(op.Cast(one, to=_UINT64) for one in (value, by)), direction=direction)
    return op.Cast(found, to=_INT64)


def _shift_left(self: Any, other: Any) -> Any:
    kind = _promote(self, other)
    by, width, zero = _wide(other), op.Constant(value_int=kind.bitwidth), op.Constant(value_int=0)
    fits = op.And(op.Less(by, width), op.GreaterOrEqual(by, zero))
    found = _shift_bits(_wide(self), op.Where(fits, by, zero), "LEFT")
    return op.Cast(op.Where(fits, found, zero), to=kind)


def _shift_right(self: Any, other: Any) -> Any:
    """Of a number below 0 by what its bits are the opposite of."""
    kind = _promote(self, other)
    by, value, zero = _wide(other), _wide(self), op.Constant(value_int=0)
    most = op.Constant(value_int=min(kind.bitwidth, 63))
    by = op.Where(op.And(op.Less(by, most), op.GreaterOrEqual(by, zero)), by, most)
    below = op.Less(value, zero)
    found = _shift_bits(op.Where(below, op.BitwiseNot(value), value), by, "RIGHT")
    return op.Cast(op.Where(below, op.BitwiseNot(found), found), to=kind)


def _of_floats(translate: Callable[..., Any], otherwise: Callable[[Any], Any]) -> Callable[..., Any]:
    def translate_floats(self: Any) -> Any:
        whole = self.dtype is not None and self.dtype.is_integer()
        return otherwise(self) if whole else translate(self)

    return translate_floats


def _everywhere(answer: bool) -> Callable[[Any], Any]:
    return lambda self: op.Expand(op.Constant(value=ir.tensor(answer)), op.Shape(self))


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys((_ATEN.bitwise_left_shift.Tensor, _ATEN.__lshift__.Tensor, _ATEN.__lshift__.Scalar), _shift_left),
    **dict.fromkeys((_ATEN.bitwise_right_shift.Tensor, _ATEN.__rshift__.Tensor, _ATEN.__rshift__.Scalar), _shift_right),
    **{getattr(_ATEN, name).default: _of_floats(getattr(core, f"aten_{name}"), op.Identity) for name in _ROUNDED},
    _ATEN.isnan.default: _of_floats(core.aten_isnan, _everywhere(False)),
    _ATEN.isfinite.default: _of_floats(core.aten_isfinite, _everywhere(True)),
}
