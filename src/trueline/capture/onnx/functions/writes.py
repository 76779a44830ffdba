"""Writes at places that the model computes: `put`, `index_reduce`, `scatter` with a product, for which torch.onnx has
no translation. A place that torch refuses is beyond the end, which ONNX Runtime refuses."""

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import ir
from onnxscript.onnx_opset import opset18

from trueline.capture.onnx import indices
from trueline.capture.onnx.numerics import scatter_reduce

_ATEN = torch.ops.aten
_REDUCTIONS = {"add": "add", "multiply": "mul"}
op: Any = opset18


def _write_elements(self: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """Among all elements in a row; a negative index counts from the end, as torch's."""
    last = op.Constant(value_ints=[-1])
    places, values = (op.Reshape(one, last) for one in (index, source))
    reduction = "add" if accumulate else "none"
    return op.Reshape(op.ScatterElements(op.Reshape(self, last), places, values, reduction=reduction), op.Shape(self))


def _index_reduce(self: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> Any:
    """As `scatter_reduce` with an index for each element of the source."""
    if not len(self.shape) or len(self.shape) != len(source.shape):
        raise NotImplementedError("slices of a single number have no translation")
    axis = dim % len(self.shape)
    shape = [-1 if at == axis else 1 for at in range(len(self.shape))]
    places = op.Reshape(indices.refuse_negative(index, indices.size_of(self, dim)), op.Constant(value_ints=shape))
    places = op.Expand(op.Cast(places, to=ir.DataType.INT64), op.Shape(source))
    places.shape, places.type = source.shape, ir.TensorType(ir.DataType.INT64)
    return scatter_reduce(self, axis, places, source, reduce, include_self=include_self)


def _scatter_by(self: Any, dim: int, index: Any, src: Any, *, reduce: str) -> Any:
    if not len(self.shape):
        raise NotImplementedError("a scatter into a single number has no translation")
    rank = len(self.shape)
    places = indices.refuse_negative(index, indices.size_of(self, dim))
    if isinstance(src, int | float):
        values = op.Expand(op.CastLike(op.Constant(value_float=float(src)), self), op.Shape(index))
    else:  # torch uses only as much of the source as has an index
        corner = op.Constant(value_ints=[0] * rank), op.Shape(index), op.Constant(value_ints=list(range(rank)))
        values = op.Slice(src, *corner)
    return op.ScatterElements(self, places, values, axis=dim, reduction=_REDUCTIONS[reduce])


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _ATEN.put.default: _write_elements,
    _ATEN.index_reduce.default: _index_reduce,
    _ATEN.scatter.reduce: _scatter_by,
    _ATEN.scatter.value_reduce: _scatter_by,
}
"""Operator of an exported program -> what writes it in ONNX."""
