"""Indices that the model computes: ONNX counts negative ones from the end, where torch raises an IndexError.

A negative index becomes one beyond the end, which ONNX Runtime refuses. Indices that are an input as they are need no
check: the range that the model answers is part of the signature (`capture/proof/value_ranges.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import ir
from onnxscript.function_libs.torch_lib.ops import core
from onnxscript.onnx_opset import opset18

_ATEN = torch.ops.aten
op: Any = opset18


def _refuse_negative(index: Any, size: Any) -> Any:
    """`index`, with `size` in place of each negative one."""
    if index.is_graph_input():
        return index
    zero = op.CastLike(op.Constant(value_int=0), index)
    found = op.Where(op.Less(index, zero), op.CastLike(size, index), index)
    found.shape, found.type = index.shape, index.type
    return found


def _size(self: Any, dim: int) -> Any:
    axis = dim % len(self.shape)
    return op.Squeeze(op.Shape(self, start=axis, end=axis + 1), op.Constant(value_ints=[0]))


def _embedding(weight: Any, indices: Any, *rest: Any, **options: Any) -> Any:
    return op.Gather(weight, _refuse_negative(indices, _size(weight, 0)))


def _along(translate: Callable[..., Any]) -> Callable[..., Any]:
    """Of an operator that takes a tensor, a dimension and indices along it."""

    def refusing(self: Any, dim: int, index: Any, *rest: Any, **options: Any) -> Any:
        if len(self.shape):
            index = _refuse_negative(index, _size(self, dim))
        return translate(self, dim, index, *rest, **options)

    return refusing


def _one_hot(self: Any, num_classes: int = -1) -> Any:
    """Each class is looked up among all of them first: one that is not there is refused."""
    if num_classes < 0:
        raise NotImplementedError("one_hot without a number of classes: its shape would depend on values")
    classes = op.Range(*(op.Constant(value_int=number) for number in (0, num_classes, 1)))
    found = op.Gather(classes, _refuse_negative(self, op.Constant(value_int=num_classes)))
    return op.Cast(op.Equal(op.Unsqueeze(found, op.Constant(value_ints=[-1])), classes), to=ir.DataType.INT64)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _ATEN.embedding.default: _embedding,
    _ATEN.index_select.default: _along(core.aten_index_select),
    _ATEN.gather.default: _along(core.aten_gather),
    _ATEN.scatter.src: _along(core.aten_scatter_src),
    _ATEN.scatter.value: _along(core.aten_scatter_value),
    _ATEN.scatter_add.default: _along(core.aten_scatter_add),
    _ATEN.one_hot.default: _one_hot,
}
"""Operator of an exported program -> what writes it in ONNX."""
