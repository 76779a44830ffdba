"""Indices that the model computes: ONNX counts negative ones from the end, where torch raises an IndexError.

A negative index becomes one beyond the end, which ONNX Runtime refuses. Indices that are an input as they are need no
check: the range that the model answers is part of the signature (`capture/proof/value_ranges.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import ir
from onnxscript.function_libs.torch_lib.ops import core
from onnxscript.function_libs.torch_lib.ops import nn as losses
from onnxscript.onnx_opset import opset18

from trueline.capture.onnx.numerics import scatter_reduce

_ATEN = torch.ops.aten
op: Any = opset18


def refuse_negative(index: Any, size: Any) -> Any:
    """`index`, with `size` in place of each negative one."""
    if index.is_graph_input():
        return index
    zero = op.CastLike(op.Constant(value_int=0), index)
    found = op.Where(op.Less(index, zero), op.CastLike(size, index), index)
    found.shape, found.type = index.shape, index.type
    return found


def size_of(self: Any, dim: int) -> Any:
    axis = dim % len(self.shape)
    return op.Squeeze(op.Shape(self, start=axis, end=axis + 1), op.Constant(value_ints=[0]))


def _embedding(weight: Any, indices: Any, *rest: Any, **options: Any) -> Any:
    return op.Gather(weight, refuse_negative(indices, size_of(weight, 0)))


def _along(translate: Callable[..., Any]) -> Callable[..., Any]:
    """Of an operator that takes a tensor, a dimension and indices along it."""

    def refusing(self: Any, dim: int, index: Any, *rest: Any, **options: Any) -> Any:
        if len(self.shape):
            index = refuse_negative(index, size_of(self, dim))
        return translate(self, dim, index, *rest, **options)

    return refusing


def _classes(translate: Callable[..., Any]) -> Callable[..., Any]:
    """Of a loss whose target is an index of a class, or the number that is ignored."""

    def refusing(
        self: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100, *rest: Any
    ) -> Any:
        if target.dtype.is_integer():
            zero, ignored = (op.CastLike(op.Constant(value_int=number), target) for number in (0, ignore_index))
            outside = op.And(op.Less(target, zero), op.Not(op.Equal(target, ignored)))
            checked = op.Where(outside, op.CastLike(size_of(self, min(1, len(self.shape) - 1)), target), target)
            checked.shape, checked.type = target.shape, target.type
            target = checked
        return translate(self, target, weight, reduction, ignore_index, *rest)

    return refusing


def _cross_entropy(
    self: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """With smoothed labels and with a probability of each class, which the exporter leaves out."""
    if not target.dtype.is_integer():
        return _of_probabilities(self, target, weight, reduction, label_smoothing)
    found = _classes(losses.aten_cross_entropy_loss)(self, target, weight, reduction, ignore_index)
    if not label_smoothing:
        return found
    zero, ignored = (op.CastLike(op.Constant(value_int=number), target) for number in (0, ignore_index))
    left_out, nothing = op.Equal(target, ignored), op.CastLike(op.Constant(value_int=0), self)
    smooth = op.Where(left_out, nothing, _sum_classes(self, op.LogSoftmax(self, axis=_class_dim(self)), weight))
    if reduction == 1:
        counts = op.Expand(op.CastLike(op.Constant(value_int=1), self), op.Shape(target))
        counts = counts if weight is None else op.Gather(weight, op.Where(left_out, zero, target))
        counts = op.ReduceSum(op.Where(left_out, nothing, counts), keepdims=0)
        smooth = op.Div(op.ReduceSum(smooth, keepdims=0), counts)
    elif reduction == 2:
        smooth = op.ReduceSum(smooth, keepdims=0)
    kept, share = (op.CastLike(op.Constant(value_float=one), self) for one in (1 - label_smoothing, label_smoothing))
    share = op.Div(share, op.CastLike(size_of(self, _class_dim(self)), self))
    return op.Add(op.Mul(found, kept), op.Mul(smooth, share))


def _of_probabilities(self: Any, target: Any, weight: Any, reduction: int, label_smoothing: float) -> Any:
    dim = _class_dim(self)
    if label_smoothing:
        kept, share = (
            op.CastLike(op.Constant(value_float=one), self) for one in (1 - label_smoothing, label_smoothing)
        )
        target = op.Add(op.Mul(target, kept), op.Div(share, op.CastLike(size_of(self, dim), self)))
    found = _sum_classes(self, op.Mul(op.LogSoftmax(self, axis=dim), target), weight)
    if reduction == 0:
        return found
    total = op.ReduceSum(found, keepdims=0)
    return total if reduction == 2 else op.Div(total, op.CastLike(op.Size(found), self))


def _class_dim(self: Any) -> int:
    return min(1, len(self.shape) - 1)


def _sum_classes(self: Any, logs: Any, weight: Any) -> Any:
    """What is left of the classes of `self`, each times its weight, less than zero."""
    dim = _class_dim(self)
    if weight is not None:
        shape = [-1 if at == dim else 1 for at in range(len(self.shape))]
        logs = op.Mul(logs, op.Reshape(weight, op.Constant(value_ints=shape)))
    return op.Neg(op.ReduceSum(logs, op.Constant(value_ints=[dim]), keepdims=0))


def _bags(translate: Callable[..., Any]) -> Callable[..., Any]:
    """Ids are beyond the table, which ONNX Runtime refuses, where torch refuses the offsets: they begin at 0, grow, and
    end among the ids. A bag between others would be empty."""

    def refusing(weight: Any, indices: Any, offsets: Any, *rest: Any, **options: Any) -> Any:
        size, zero, one = size_of(weight, 0), op.Constant(value_ints=[0]), op.Constant(value_ints=[1])
        checked = refuse_negative(indices, size)
        first, last = op.CastLike(zero, offsets), op.CastLike(op.Shape(indices, start=0, end=1), offsets)
        bounds = op.Concat(first, offsets, last, axis=0)
        after, before = op.Slice(bounds, one, op.Shape(bounds), zero), op.Slice(bounds, zero, op.Neg(one), zero)
        begins = op.Greater(op.Slice(offsets, zero, one, zero), first)
        wrong = op.Cast(op.Concat(op.Less(after, before), begins, axis=0), to=ir.DataType.INT64)
        refused = op.Greater(op.ReduceMax(wrong, keepdims=0), op.Constant(value_int=0))
        found = op.Where(refused, op.CastLike(size, checked), checked)
        found.shape, found.type = indices.shape, indices.type
        return translate(weight, found, offsets, *rest, **options)

    return refusing


def _index_add(self: Any, dim: int, index: Any, source: Any, *, alpha: float = 1) -> Any:
    """The exporter puts the source at indices that count from the end."""
    if alpha != 1:
        source = op.Mul(source, op.CastLike(op.Constant(value_float=float(alpha)), source))
    return _put_along(self, dim, index, source, reduction="add")


def _index_copy(self: Any, dim: int, index: Any, source: Any) -> Any:
    return _put_along(self, dim, index, source, reduction="none")


def _put_along(self: Any, dim: int, index: Any, source: Any, *, reduction: str) -> Any:
    """Slices of the source at places of one dimension."""
    if not len(self.shape):
        raise NotImplementedError("slices of a single number have no translation")
    axis = dim % len(self.shape)
    shape = [-1 if at == axis else 1 for at in range(len(self.shape))]
    places = op.Reshape(refuse_negative(index, size_of(self, dim)), op.Constant(value_ints=shape))
    places = op.Expand(op.Cast(places, to=ir.DataType.INT64), op.Shape(source))
    return op.ScatterElements(self, places, source, axis=axis, reduction=reduction)


def _one_hot(self: Any, num_classes: int = -1) -> Any:
    """Each class is looked up among all of them first: one that is not there is refused."""
    if num_classes < 0:
        raise NotImplementedError("one_hot without a number of classes: its shape would depend on values")
    classes = op.Range(*(op.Constant(value_int=number) for number in (0, num_classes, 1)))
    found = op.Gather(classes, refuse_negative(self, op.Constant(value_int=num_classes)))
    return op.Cast(op.Equal(op.Unsqueeze(found, op.Constant(value_ints=[-1])), classes), to=ir.DataType.INT64)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _ATEN.embedding.default: _embedding,
    _ATEN.index_select.default: _along(core.aten_index_select),
    _ATEN.gather.default: _along(core.aten_gather),
    _ATEN.scatter.src: _along(core.aten_scatter_src),
    _ATEN.scatter.value: _along(core.aten_scatter_value),
    _ATEN.scatter_add.default: _along(core.aten_scatter_add),
    _ATEN.scatter_reduce.two: _along(scatter_reduce),
    _ATEN.index_add.default: _index_add,
    _ATEN.index_copy.default: _index_copy,
    _ATEN.nll_loss.default: _classes(losses.aten_nll_loss),
    _ATEN.nll_loss_nd.default: _classes(losses.aten_nll_loss),
    _ATEN.cross_entropy_loss.default: _cross_entropy,
    _ATEN.embedding_bag.default: _bags(core.aten_embedding_bag),
    _ATEN.embedding_bag.padding_idx: _bags(core.aten_embedding_bag_padding_idx),
    _ATEN.one_hot.default: _one_hot,
}
"""Operator of an exported program -> what writes it in ONNX."""
