"""Division to whole numbers and its remainder, as torch computes them.

`7.0 // 0.7` is 10 when the quotient is rounded first, and 9 when the remainder is taken first, as torch does: 0.7 is a
little more than seven tenths in single precision. The exporter's own rounds the quotient, and divides whole numbers as
floats, which are exact up to 2**24 only. Source: c10/util/generic_math.h (`div_floor_floating`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import ir
from onnxscript.function_libs.torch_lib.ops import core
from onnxscript.onnx_opset import opset18

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="microsoft/onnxscript#989", versions="onnxscript 0.7.2", cost="more operators", helps=("mixtral", "dlrm")
)

_ATEN = torch.ops.aten
op: Any = opset18
_EXACT = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def _alike(self: Any, other: Any) -> tuple[Any, Any]:
    """Both of one type: whole numbers become floats where the other is one."""
    if self.dtype.is_integer() and (isinstance(other, float) or _is_float(other)):
        self = op.Cast(self, to=ir.DataType.FLOAT)
    return self, op.CastLike(other, self)


def _is_float(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and dtype.is_floating_point()


def _remainder_parts(self: Any, other: Any) -> tuple[Any, Any]:
    """What C's fmod leaves, which has the sign of the first; and where that is not the sign of the second."""
    left = op.Mod(self, other, fmod=1)
    zero = op.CastLike(0.0, left)
    unlike = op.Xor(op.Less(other, zero), op.Less(left, zero))
    return left, op.And(op.Not(op.Equal(left, zero)), unlike)


def _remainder(self: Any, other: Any) -> Any:
    """Of numbers and of sizes too, which are none of Python's."""
    self, other = _alike(self, other)
    if self.dtype not in _EXACT:
        return core.aten_remainder(self, other)
    left, unlike = _remainder_parts(self, other)
    return op.Where(unlike, op.Add(left, other), left)


def _floor_divide(self: Any, other: Any) -> Any:
    self, other = _alike(self, other)
    if self.dtype not in _EXACT:
        return core.aten_floor_divide(self, other)
    left, unlike = _remainder_parts(self, other)
    one = op.CastLike(1.0, self)
    found = op.Div(op.Sub(self, left), other)
    found = op.Where(unlike, op.Sub(found, one), found)
    whole = op.Floor(found)
    whole = op.Where(op.Greater(op.Sub(found, whole), op.CastLike(0.5, self)), op.Add(whole, one), whole)
    return op.Where(op.Equal(other, op.CastLike(0.0, self)), op.Div(self, other), whole)


def _div_mode(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return _floor_divide(self, other)
    whole = self.dtype.is_integer() and not (isinstance(other, float) or _is_float(other))
    if rounding_mode == "trunc" and whole:
        return op.Div(self, op.CastLike(other, self))
    self, other = _alike(self, other)
    return core.aten_div_mode(self, other, rounding_mode)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _ATEN.remainder.Scalar: _remainder,
    _ATEN.remainder.Tensor: _remainder,
    _ATEN.floor_divide.default: _floor_divide,
    _ATEN.div.Tensor_mode: _div_mode,
    _ATEN.div.Scalar_mode: _div_mode,
}
