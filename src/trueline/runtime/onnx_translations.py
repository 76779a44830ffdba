"""Operators that torch.onnx does not translate, or so that ONNX Runtime cannot run them or computes them less exactly.

Each is written in ONNX operators as the exporter's own are, and is handed to it beside them; what comes of it is proven
as any other program. Sources: torch's documentation of the operator, and the ONNX operators' of opset 18.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import ir
from onnxscript.function_libs.torch_lib.ops import core
from onnxscript.onnx_opset import opset18

_ATEN = torch.ops.aten
op: Any = opset18
"""Typed for tensors only; the exporter takes Python's numbers and lists too."""


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
        axes = op.Constant(value_ints=list(range(2, len(input.shape))))
        input = op.Sub(input, op.ReduceMean(input, axes, keepdims=1))
    return core.aten_instance_norm(input, *rest)


def _rnn(activation: str) -> Callable[..., Any]:
    """A layer of a plain RNN after the other, each as one operator."""

    def written(
        input: Any,
        hx: Any,
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        ways, each = (2 if bidirectional else 1), (4 if has_biases else 2)
        steps, left = (op.Transpose(input, perm=[1, 0, 2]) if batch_first else input), []
        for layer in range(num_layers):
            own = [params[(layer * ways + way) * each :][:each] for way in range(ways)]
            given, held = (op.Concat(*(op.Unsqueeze(p[at], [0]) for p in own), axis=0) for at in (0, 1))
            biases = [op.Unsqueeze(op.Concat(p[2], p[3], axis=0), [0]) for p in own if has_biases]
            found, last = op.RNN(
                steps,
                given,
                held,
                op.Concat(*biases, axis=0) if biases else None,
                None,
                op.Slice(hx, [layer * ways], [(layer + 1) * ways], [0]),
                activations=[activation] * ways,
                direction="bidirectional" if bidirectional else "forward",
                hidden_size=hx.shape[2],
            )
            steps = op.Reshape(op.Transpose(found, perm=[0, 2, 1, 3]), op.Constant(value_ints=[0, 0, -1]))
            left.append(last)
        steps = op.Transpose(steps, perm=[1, 0, 2]) if batch_first else steps
        return steps, op.Concat(*left, axis=0)

    return written


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _ATEN.where.self: _where,
    _ATEN.instance_norm.default: _instance_norm,
    _ATEN.rnn_tanh.input: _rnn("Tanh"),
    _ATEN.rnn_relu.input: _rnn("Relu"),
}
"""Operator of an exported program -> what writes it in ONNX."""
