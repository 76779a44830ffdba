"""Operators on the order of values that torch.onnx does not translate: order statistics, running extremes, places; and
those that select some of them.

Where torch leaves open which of several equal values it takes, the rule is what it takes on the CPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import ir
from onnxscript.onnx_opset import opset18

from trueline.capture.onnx.numerics import MOST_DOUBLINGS, _is_float

_ATEN = torch.ops.aten
op: Any = opset18


def _number(value: int) -> Any:
    return op.Constant(value_ints=[value])


def _size(value: Any, dim: int) -> Any:
    """[1]; `dim` counts from the front: intermediate values have no known rank."""
    return op.Shape(value, start=dim, end=dim + 1)


def _places(value: Any, dim: int) -> Any:
    """[size of `dim`]."""
    one = op.Constant(value_int=1)
    return op.Range(op.Constant(value_int=0), op.Squeeze(_size(value, dim), _number(0)), one)


def _infinite(like: Any) -> Any:
    return op.CastLike(op.Constant(value_float=float("inf")), like)


def _order_keys(value: Any) -> Any:
    """Numbers in the order of `value`, with NaN above infinity."""
    most, nan = op.Constant(value=ir.tensor(1.7e308, dtype=ir.DataType.DOUBLE)), op.IsNaN(value)
    above = op.Constant(value=ir.tensor(float("inf"), dtype=ir.DataType.DOUBLE))
    return op.Where(nan, above, op.Min(op.Cast(value, to=ir.DataType.DOUBLE), most))


def _topk(self: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Any, Any]:
    """NaN is larger than all numbers. Numbers of float64 from 1.7e308 on count as equal."""
    if not len(self.shape):
        return op.Identity(self), op.Constant(value_int=0)
    dim %= len(self.shape)
    count = _number(k) if isinstance(k, int) else op.Reshape(k, _number(-1))
    keys = _order_keys(self) if _is_float(self) else self
    _, index = op.TopK(keys, count, axis=dim, largest=int(largest), sorted=int(sorted))
    return op.GatherElements(self, index, axis=dim), index


def _squeeze(results: tuple[Any, Any], dim: int, keepdim: bool) -> tuple[Any, Any]:
    value, index = results
    return results if keepdim else (op.Squeeze(value, _number(dim)), op.Squeeze(index, _number(dim)))


def _nth(value: Any, dim: int, count: Any, *, floats: bool) -> tuple[Any, Any]:
    """The `count`-th smallest ([1]) of a dimension, and its place; NaN comes after all numbers."""
    torn = op.IsNaN(value) if floats else None
    keys = op.Where(torn, _infinite(value), value) if floats else value
    _, indices = op.TopK(keys, count, axis=dim, largest=0)
    index = op.Gather(indices, op.Sub(count, _number(1)), axis=dim)
    if floats:
        known = op.ReduceSum(op.Cast(op.Not(torn), to=ir.DataType.INT64), _number(dim), keepdims=1)
        index = _part_infinite(value, dim, index, op.LessOrEqual(count, known))
    return op.GatherElements(value, index, axis=dim), index


def _part_infinite(value: Any, dim: int, index: Any, number: Any) -> Any:
    """`index` of a value among keys where NaN was infinity, or where it is a `number` that of infinity, else of NaN."""
    torn, whole = op.IsNaN(value), ir.DataType.INT64
    infinite = op.ArgMax(op.Cast(op.Equal(value, _infinite(value)), to=whole), axis=dim, keepdims=1)
    first_torn = op.ArgMax(op.Cast(torn, to=whole), axis=dim, keepdims=1)
    is_torn = op.IsNaN(op.GatherElements(value, index, axis=dim))
    return op.Where(number, op.Where(is_torn, infinite, index), op.Where(is_torn, index, first_torn))


def _kthvalue(self: Any, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    dim %= len(self.shape)
    count = _number(k) if isinstance(k, int) else op.Reshape(k, _number(-1))
    return _squeeze(_nth(self, dim, count, floats=_is_float(self)), dim, keepdim)


def _middle(value: Any, dim: int, *, floats: bool) -> tuple[Any, Any]:
    """The lower median, and its place; the first NaN if there is one."""
    count = op.Div(op.Add(_size(value, dim), _number(1)), _number(2))
    found, index = _nth(value, dim, count, floats=floats)
    if not floats:
        return found, index
    torn = op.Cast(op.IsNaN(value), to=ir.DataType.INT64)
    first = op.ArgMax(torn, axis=dim, keepdims=1)
    any_torn = op.Cast(op.GatherElements(torn, first, axis=dim), to=ir.DataType.BOOL)
    return op.Where(any_torn, op.GatherElements(value, first, axis=dim), found), op.Where(any_torn, first, index)


def _median_dim(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    dim %= len(self.shape)
    return _squeeze(_middle(self, dim, floats=_is_float(self)), dim, keepdim)


def _median(self: Any) -> Any:
    """Of no number, NaN."""
    values = op.Reshape(self, _number(-1))
    if _is_float(self):
        spare = op.Sub(_number(1), op.Min(_size(values, 0), _number(1)))
        nan = op.CastLike(op.Constant(value_floats=[float("nan")]), self)
        values = op.Concat(values, op.Slice(nan, _number(0), spare), axis=0)
    value, _ = _middle(values, 0, floats=_is_float(self))
    return op.Squeeze(value, _number(0))


def _nanmedian_dim(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """The lower median of the numbers; NaN where there is none."""
    dim %= len(self.shape)
    if not _is_float(self):
        return _median_dim(self, dim, keepdim)
    torn = op.IsNaN(self)
    count = op.ReduceSum(op.Cast(op.Not(torn), to=ir.DataType.INT64), _number(dim), keepdims=1)
    _, indices = op.TopK(op.Where(torn, _infinite(self), self), _size(self, dim), axis=dim, largest=0)
    at = op.Max(op.Div(op.Sub(count, _number(1)), _number(2)), _number(0))
    index = _part_infinite(self, dim, op.GatherElements(indices, at, axis=dim), op.Greater(count, _number(0)))
    return _squeeze((op.GatherElements(self, index, axis=dim), index), dim, keepdim)


def _mode(self: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """The smallest of the most frequent values, and its last place."""
    dim %= len(self.shape)
    equal = op.Equal(op.Unsqueeze(self, _number(dim + 1)), op.Unsqueeze(self, _number(dim)))
    times = op.ReduceSum(op.Cast(equal, to=ir.DataType.INT64), _number(dim + 1), keepdims=0)
    most = op.Equal(times, op.ReduceMax(times, _number(dim), keepdims=1))
    largest = op.ReduceMax(self, _number(dim), keepdims=1)
    value = op.ReduceMin(op.Where(most, self, largest), _number(dim), keepdims=1)
    here = op.Cast(op.Equal(self, value), to=ir.DataType.INT64)
    return _squeeze((value, op.ArgMax(here, axis=dim, keepdims=1, select_last_index=1)), dim, keepdim)


def _running(extreme: Callable[[Any, Any], Any], value: Any, dim: int, size: object) -> Any:
    """The extreme of all values up to each place: of twice as many at every step."""
    places = _places(value, dim)
    for step in range((size - 1).bit_length() if isinstance(size, int) else MOST_DOUBLINGS):
        before = op.Max(op.Sub(places, op.Constant(value_int=2**step)), op.Constant(value_int=0))
        value = extreme(value, op.Gather(value, before, axis=dim))
    return value


def _cumulative(extreme: Callable[[Any, Any], Any]) -> Callable[..., tuple[Any, Any]]:
    def extreme_or_nan(one: Any, other: Any) -> Any:
        return op.Where(op.IsNaN(one), one, op.Where(op.IsNaN(other), other, extreme(one, other)))

    def translate(self: Any, dim: int) -> tuple[Any, Any]:
        """The running extreme, and its last place so far. ONNX Runtime's extremes ignore NaN and take no booleans."""
        rank, floats, boolean = len(self.shape), _is_float(self), self.dtype == ir.DataType.BOOL
        dim %= rank
        size = self.shape[dim]
        self = op.Cast(self, to=ir.DataType.INT32) if boolean else self
        values = _running(extreme_or_nan if floats else extreme, self, dim, size)
        here = op.Equal(self, values)
        here = op.Or(here, op.IsNaN(self)) if floats else here
        shape = op.Constant(value_ints=[-1 if axis == dim else 1 for axis in range(rank)])
        met = op.Where(here, op.Reshape(_places(self, dim), shape), op.Constant(value_int=0))
        found = op.Cast(values, to=ir.DataType.BOOL) if boolean else values
        return found, _running(op.Max, met, dim, size)

    return translate


def _search_positions(
    sorted_sequence: Any,
    self: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """The number of values in a row before each value: all are compared with all."""
    row = sorted_sequence if sorter is None else op.GatherElements(sorted_sequence, sorter, axis=-1)
    row = row if len(sorted_sequence.shape) == 1 else op.Unsqueeze(row, _number(-2))
    values = op.Unsqueeze(self, _number(-1)) if len(self.shape) else self
    not_before = op.Greater(row, values) if right or side == "right" else op.GreaterOrEqual(row, values)
    before = op.Not(not_before)  # all numbers are before NaN
    kind = ir.DataType.INT32 if out_int32 else ir.DataType.INT64
    return op.ReduceSum(op.Cast(before, to=kind), _number(-1), keepdims=0)


def _sort_stable(self: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """By TopK, which keeps equal values in their order; NaN comes after all numbers."""
    if not len(self.shape):
        return self, op.Constant(value_int=0)
    dim %= len(self.shape)
    size, largest, index = _size(self, dim), int(descending), None
    keys = op.Cast(self, to=ir.DataType.INT32) if self.dtype == ir.DataType.BOOL else self
    if _is_float(self):
        torn = op.IsNaN(self)
        keys = op.Where(torn, _infinite(self), self)
    _, index = op.TopK(keys, size, axis=dim, largest=largest)
    if _is_float(self):  # infinity and NaN were equal
        torn = op.GatherElements(op.Cast(torn, to=ir.DataType.INT32), index, axis=dim)
        _, apart = op.TopK(torn, size, axis=dim, largest=largest)
        index = op.GatherElements(index, apart, axis=dim)
    return op.GatherElements(self, index, axis=dim), index


def _sort(self: Any, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    return _sort_stable(self, dim=dim, descending=descending)


def _unique_consecutive(
    self: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Any, Any, Any]:
    """One of each run of equal values or slices, the run of each, and the lengths. The exporter takes whole numbers of
    one dimension only, and loses a first one of 2 ** 31 - 1."""
    rows = op.Reshape(self, _number(-1)) if dim is None else self
    axis = 0 if dim is None else dim % len(self.shape)
    size, along = _size(rows, axis), _number(axis)
    before = op.Slice(rows, _number(0), _number(-1), along)
    after = op.Slice(rows, _number(1), size, along)
    unlike = op.Cast(op.Not(op.Equal(after, before)), to=ir.DataType.INT64)
    others = [at for at in range(1 if dim is None else len(self.shape)) if at != axis]
    unlike = op.ReduceMax(unlike, op.Constant(value_ints=others), keepdims=0) if others else unlike
    begins = op.Slice(op.Concat(_number(1), unlike, axis=0), _number(0), size)  # nothing begins where there is nothing
    chosen = op.Cast(begins, to=ir.DataType.BOOL)
    number = op.Sub(op.CumSum(begins, op.Constant(value_int=0)), _number(1))
    starts = op.Compress(_places(rows, axis), chosen, axis=0)
    ends = op.Concat(op.Slice(starts, _number(1), size, _number(0)), size, axis=0)
    ends = op.Slice(ends, _number(0), op.Shape(starts))
    inverse = op.Reshape(number, op.Shape(self)) if dim is None else number
    return op.Compress(rows, chosen, axis=axis), inverse, op.Sub(ends, starts)


def _masked_select(self: Any, mask: Any) -> Any:
    """The elements under a mask, of what both are broadcast to."""
    values = op.Expand(self, op.Shape(mask))
    shown = op.Expand(mask, op.Shape(values))
    return op.Compress(op.Reshape(values, _number(-1)), op.Reshape(shown, _number(-1)), axis=0)


def _place_of(extreme: str) -> Callable[..., Any]:
    """`ArgMax` or `ArgMin`, where the first NaN wins; ONNX Runtime ignores NaN."""

    def translate(self: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        rank = len(self.shape)
        value = op.Reshape(self, _number(-1)) if dim is None or not rank else self
        axis = dim % rank if dim is not None and rank else 0
        found = getattr(op, extreme)(value, axis=axis, keepdims=1)
        if _is_float(self):
            torn = op.Cast(op.IsNaN(value), to=ir.DataType.INT64)
            first = op.ArgMax(torn, axis=axis, keepdims=1)
            any_torn = op.Cast(op.GatherElements(torn, first, axis=axis), to=ir.DataType.BOOL)
            found = op.Where(any_torn, first, found)
        if not rank or (dim is None and not keepdim):
            return op.Squeeze(found, _number(0))
        if dim is None:
            return op.Reshape(found, op.Constant(value_ints=[1] * rank))
        return found if keepdim else op.Squeeze(found, _number(axis))

    return translate


def _extreme(reduced: str) -> Callable[..., Any]:
    """Over all dimensions where `dim` is not given; the exporter requires it."""

    def translate(self: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        axes = op.Constant(value_ints=list(dim)) if dim else None
        return getattr(op, reduced)(self, axes, keepdims=int(keepdim))

    return translate


def _adaptive_max_pool2d(self: Any, output_size: Sequence[int]) -> tuple[Any, Any]:
    """The largest of each part, and its first place in the plane. Parts may overlap: bin i of n goes from
    floor(i * size / n) up to ceil((i + 1) * size / n). One dimension after the other."""
    rank = len(self.shape)
    sizes, zero, one = op.Shape(self, start=rank - 2), op.Constant(value_int=0), op.Constant(value_int=1)
    numbers = op.Reshape(op.Range(zero, op.ReduceProd(sizes, keepdims=0), one), sizes)
    value, places = self, op.Expand(numbers, op.Shape(self))
    for at, bins in zip((rank - 2, rank - 1), output_size, strict=True):
        parts = [_largest_in(value, places, at, number, bins) for number in range(bins)]
        value, places = (op.Concat(*each, axis=at) for each in zip(*parts, strict=True))
    return value, places


def _largest_in(value: Any, places: Any, axis: int, number: int, bins: int) -> tuple[Any, Any]:
    """The largest element of a part of a dimension, and its first place; NaN is the largest."""
    size, along = _size(places, axis), _number(axis)
    start = op.Div(op.Mul(size, _number(number)), _number(bins))
    end = op.Div(op.Add(op.Mul(size, _number(number + 1)), _number(bins - 1)), _number(bins))
    inside, at = op.Slice(value, start, end, along), op.Slice(places, start, end, along)
    torn = op.Cast(op.IsNaN(inside), to=ir.DataType.INT64)
    is_torn = op.Cast(op.ReduceMax(torn, along, keepdims=1), to=ir.DataType.BOOL)
    most = op.ReduceMax(op.Where(op.IsNaN(inside), op.Neg(_infinite(inside)), inside), along, keepdims=1)
    here = op.Or(op.And(is_torn, op.IsNaN(inside)), op.And(op.Not(is_torn), op.Equal(inside, most)))
    beyond = op.Constant(value_int=2**62)
    nan = op.CastLike(op.Constant(value_float=float("nan")), most)
    return op.Where(is_torn, nan, most), op.ReduceMin(op.Where(here, at, beyond), along, keepdims=1)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _ATEN.argmax.default: _place_of("ArgMax"),
    _ATEN.argmin.default: _place_of("ArgMin"),
    _ATEN.amax.default: _extreme("ReduceMax"),
    _ATEN.amin.default: _extreme("ReduceMin"),
    _ATEN.kthvalue.default: _kthvalue,
    _ATEN.topk.default: _topk,
    _ATEN.median.dim: _median_dim,
    _ATEN.median.default: _median,
    _ATEN.nanmedian.dim: _nanmedian_dim,
    _ATEN.mode.default: _mode,
    _ATEN.cummax.default: _cumulative(op.Max),
    _ATEN.cummin.default: _cumulative(op.Min),
    _ATEN.searchsorted.Tensor: _search_positions,
    _ATEN.sort.default: _sort,
    _ATEN.sort.stable: _sort_stable,
    _ATEN.unique_consecutive.default: _unique_consecutive,
    _ATEN.masked_select.default: _masked_select,
    _ATEN.adaptive_max_pool2d.default: _adaptive_max_pool2d,
}
