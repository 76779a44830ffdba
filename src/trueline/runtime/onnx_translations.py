"""Operators that torch.onnx does not translate, or so that ONNX Runtime cannot run them or computes them less exactly.

Each is written in ONNX operators as the exporter's own are, and is handed to it beside them; what comes of it is proven
as any other program. Sources: torch's documentation of the operator, and the ONNX operators' of opset 18.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import ir
from onnxscript.function_libs.torch_lib.ops import core
from onnxscript.onnx_opset import opset18 as op

_ATEN = torch.ops.aten


def _where(condition: Any, self: Any, other: Any) -> Any:
    """ONNX Runtime has no Where between booleans."""
    if self.dtype == ir.DataType.BOOL:
        return op.Or(op.And(condition, self), op.And(op.Not(condition), other))
    return op.Where(condition, self, other)


def _instance_norm(input: Any, *rest: Any) -> Any:
    """Centred before it is normalised. ONNX Runtime adds up the elements of a channel one after the other; what that
    mean is off by is divided by the deviation, and where a channel is nearly constant that is a large number."""
    use_input_stats = rest[4]
    if use_input_stats:
        axes: Any = op.Constant(value_ints=list(range(2, len(input.shape))))
        input = op.Sub(input, op.ReduceMean(input, axes, keepdims=1))
    return core.aten_instance_norm(input, *rest)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _ATEN.where.self: _where,
    _ATEN.instance_norm.default: _instance_norm,
}
"""Operator of an exported program -> what writes it in ONNX."""
