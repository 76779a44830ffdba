"""Operators that torch.onnx translates by a formula that fails for some numbers: zeros of either sign, large ones, rows
that a mask hides completely, quotients near a whole number.

`7.0 // 0.7` is 10 when the quotient is rounded first, and 9 when the remainder is taken first, as in torch: 0.7 is a
little more than seven tenths in single precision. Sources: torch's documentation of each operator; IEEE 754 for zeros;
c10/util/generic_math.h (`div_floor_floating`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import ir
from onnxscript.function_libs.torch_lib.ops import core, nn
from onnxscript.onnx_opset import opset18

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="microsoft/onnxscript#2479",
    versions="onnxscript 0.7.2, onnxruntime 1.31",
    cost="more operators",
    helps=("bert", "gpt2"),
)

Table = dict[Callable[..., Any], Callable[..., Any]]
_ATEN, _PRIMS = torch.ops.aten, torch.ops.prims
MOST_DOUBLINGS = 40
"""Along a free size: no tensor has 2 ** 40 elements."""
_EXACT = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
_SELU = (1.6732632423543772848, 1.0507009873554804934)
"""Alpha and scale, by torch's documentation."""
op: Any = opset18


def _like(number: float, value: Any) -> Any:
    return op.CastLike(op.Constant(value_float=number), value)


def _alike(self: Any, other: Any) -> tuple[Any, Any]:
    """Both of one type: whole numbers become floats where the other is one."""
    if isinstance(self, int | float):
        return op.CastLike(self, other), other
    if self.dtype.is_integer() and (isinstance(other, float) or _is_float(other)):
        self = op.Cast(self, to=ir.DataType.FLOAT)
    return self, op.CastLike(other, self)


def _is_float(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and dtype.is_floating_point()


def _is_whole(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and dtype.is_integer()


def _are_whole(*numbers: Any) -> bool:
    return all(isinstance(one, int) or _is_whole(one) for one in numbers)


def _fmod(self: Any, other: Any) -> Any:
    whole = _are_whole(self, other)
    return _left_of(*_alike(self, other), whole=whole)


def _left_of(self: Any, other: Any, *, whole: bool) -> Any:
    """What C's fmod leaves of two of one type; of whole numbers by a division, since ONNX Runtime's Mod passes through
    double."""
    return op.Sub(self, op.Mul(op.Div(self, other), other)) if whole else op.Mod(self, other, fmod=1)


def _remainder_parts(self: Any, other: Any, *, whole: bool = False) -> tuple[Any, Any]:
    """What C's fmod leaves, which has the sign of the first; and where that is not the sign of the second."""
    left = _left_of(self, other, whole=whole)
    zero = op.CastLike(0.0, left)
    unlike = op.Xor(op.Less(other, zero), op.Less(left, zero))
    return left, op.And(op.Not(op.Equal(left, zero)), unlike)


def _remainder(self: Any, other: Any) -> Any:
    self, other = _alike(self, other)
    if self.dtype not in _EXACT:
        return core.aten_remainder(self, other)
    left, unlike = _remainder_parts(self, other)
    return op.Where(unlike, op.Add(left, other), left)


def _floor_divide(self: Any, other: Any) -> Any:
    whole = _are_whole(self, other)
    kind = (other if isinstance(self, int | float) else self).dtype
    self, other = _alike(self, other)
    if not whole and kind not in _EXACT and not kind.is_integer():
        return core.aten_floor_divide(self, other)
    left, unlike = _remainder_parts(self, other, whole=whole)
    if whole:
        return op.Sub(op.Div(self, other), op.CastLike(unlike, self))
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
    return core.aten_div_mode(*_alike(self, other), rounding_mode)


def _signbit(self: Any) -> Any:
    """Of a zero too, by the sign of one over it."""
    zero = op.CastLike(op.Constant(value_int=0), self)
    below = op.Less(self, zero)
    if not self.dtype.is_floating_point():
        return below
    return op.Or(below, op.And(op.Equal(self, zero), op.Less(op.Div(_like(1.0, self), self), zero)))


def write_arctan2(self: Any, other: Any, arctan: Callable[[Any], Any]) -> Any:
    """atan2, in all four quadrants and on their borders; the exporter's is -pi straight to the left, and 0 for NaN."""
    zero, pi = _like(0.0, self), _like(math.pi, self)
    turned, far = (_signbit(one) for one in (self, other)), op.And(op.IsInf(self), op.IsInf(other))
    self, other = (op.Where(far, op.Sign(one), one) for one in (self, other))
    nowhere = op.And(op.Equal(self, zero), op.Equal(other, zero))
    slope = op.Where(nowhere, self, arctan(op.Div(self, op.Where(nowhere, _like(1.0, self), other))))
    below, left = turned
    return op.Where(left, op.Add(slope, op.Where(below, op.Neg(pi), pi)), slope)


def _hypot(self: Any, other: Any) -> Any:
    """By the larger one, so that no square is out of range."""
    larger, smaller = (extreme(op.Abs(self), op.Abs(other)) for extreme in (op.Max, op.Min))
    plain = op.Or(op.Equal(larger, _like(0.0, self)), op.IsInf(larger))
    ratio = op.Div(smaller, op.Where(plain, _like(1.0, self), larger))
    return op.Where(plain, larger, op.Mul(larger, op.Sqrt(op.Add(_like(1.0, self), op.Mul(ratio, ratio)))))


def _extreme_of_numbers(extreme: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def translate(self: Any, other: Any) -> Any:
        """NaN only where both are."""
        return op.Where(op.IsNaN(self), other, op.Where(op.IsNaN(other), self, extreme(self, other)))

    return translate


def _in_double(translate: Callable[..., Any]) -> Callable[..., Any]:
    """Of floats: parts that all but cancel lose in single precision what torch's logarithm of 1 + x keeps."""

    def translate_wide(self: Any, *others: Any) -> Any:
        if self.dtype != ir.DataType.FLOAT:
            return translate(self, *others)
        wide = (op.Cast(one, to=ir.DataType.DOUBLE) if hasattr(one, "dtype") else one for one in (self, *others))
        return op.Cast(translate(*wide), to=ir.DataType.FLOAT)

    return translate_wide


def _logaddexp(self: Any, other: Any) -> Any:
    """From the larger one: what it is the exponential of may be out of range."""
    apart = op.Where(op.Equal(self, other), _like(0.0, self), op.Abs(op.Sub(self, other)))  # equal infinities, too
    return op.Add(op.Max(self, other), op.Log(op.Add(_like(1.0, self), op.Exp(op.Neg(apart)))))


def _logaddexp2(self: Any, other: Any) -> Any:
    """The same of powers of two."""
    apart = op.Where(op.Equal(self, other), _like(0.0, self), op.Abs(op.Sub(self, other)))
    two = op.CastLike(op.Constant(value=ir.tensor(math.log(2), dtype=ir.DataType.DOUBLE)), self)
    return op.Add(op.Max(self, other), op.Div(log1p(op.Exp(op.Mul(op.Neg(apart), two))), two))


def _logcumsumexp(self: Any, dim: int) -> Any:
    """The logarithm of a running sum of exponentials: of twice as many at every step, from the larger ones, so that
    nothing is out of range. In double, as `logaddexp`."""
    rank, single = len(self.shape), self.dtype == ir.DataType.FLOAT
    if not rank:
        return self
    dim %= rank
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    length = op.Squeeze(op.Shape(self, start=dim, end=dim + 1), op.Constant(value_ints=[0]))
    places, size = op.Range(zero, length, one), self.shape[dim]
    along = op.Constant(value_ints=[-1 if axis == dim else 1 for axis in range(rank)])
    self = op.Cast(self, to=ir.DataType.DOUBLE) if single else self
    for step in range((size - 1).bit_length() if isinstance(size, int) else MOST_DOUBLINGS):
        before = op.Sub(places, op.Constant(value_int=2**step))
        earlier = op.Gather(self, op.Max(before, zero), axis=dim)
        self = op.Where(op.Reshape(op.GreaterOrEqual(before, zero), along), _logaddexp(self, earlier), self)
    return op.Cast(self, to=ir.DataType.FLOAT) if single else self


def _log_sigmoid(self: Any) -> Any:
    """The logarithm of a sigmoid that may be too small for a float."""
    return op.Sub(op.Min(self, _like(0.0, self)), log1p(op.Exp(op.Neg(op.Abs(self)))))


def log1p(self: Any) -> Any:
    """log(1 + x), also of an x that is lost in 1 + x: the logarithm of the rounded sum, times the quotient of what was
    added and what arrived. Source: HP-15C Advanced Functions Handbook, page 193."""
    one = _like(1.0, self)
    rounded = op.Add(one, self)
    added = op.Sub(rounded, one)
    found = op.Mul(op.Log(rounded), op.Div(self, added))
    large = op.Where(op.Equal(rounded, self), op.Log(rounded), found)
    return op.Where(op.Equal(added, _like(0.0, self)), self, large)


def expm1(self: Any) -> Any:
    """exp(x) - 1, also of an x whose exponential is nearly 1. Source: Higham, Accuracy and Stability, 1.14.1."""
    one = _like(1.0, self)
    power = op.Exp(self)
    less = op.Sub(power, one)
    found = op.Mul(less, op.Div(self, op.Log(power)))
    return op.Where(op.Less(op.Abs(self), one), op.Where(op.Equal(power, one), self, found), less)


def _elu(self: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    below = op.Mul(expm1(op.Mul(self, _like(input_scale, self))), _like(alpha, self))
    return op.Mul(op.Where(op.Greater(self, _like(0.0, self)), self, below), _like(scale, self))


def _celu(self: Any, alpha: float = 1.0) -> Any:
    return _elu(self, alpha, 1.0, 1.0 / alpha)


def _selu(self: Any) -> Any:
    return _elu(self, *_SELU)


def _quotient(self: Any, above: Any) -> Any:
    """`above` times the sigmoid: ONNX Runtime's is a polynomial, off by 2 % at -12 and by all of it at -18."""
    return op.Div(above, op.Add(_like(1.0, self), op.Exp(op.Neg(self))))


def _sigmoid(self: Any) -> Any:
    return _quotient(self, _like(1.0, self))


def _silu(self: Any) -> Any:
    return _quotient(self, self)


def _glu(self: Any, dim: int = -1) -> Any:
    return _quotient(*reversed(op.Split(self, axis=dim, num_outputs=2)))


def _deviation(root: bool) -> Callable[..., Any]:
    def translate(self: Any, dim: Sequence[int] | None = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        """In double, as torch's own: the square of 1e-30 is 0 in single precision, and that of 1e30 is out of range."""
        wide, rank = op.Cast(self, to=ir.DataType.DOUBLE), len(self.shape)
        axes = op.Constant(value_ints=[axis % rank for axis in dim] if dim else list(range(rank)))
        apart = op.Sub(wide, op.ReduceMean(wide, axes, keepdims=1))
        count = op.Cast(op.ReduceProd(op.Gather(op.Shape(self), axes), keepdims=0), to=ir.DataType.DOUBLE)
        less = 1.0 if correction is None else float(correction)
        left = op.Max(op.Sub(count, op.CastLike(less, count)), op.CastLike(0.0, count))
        found = op.Div(op.ReduceSum(op.Mul(apart, apart), axes, keepdims=int(keepdim)), left)
        return op.CastLike(op.Sqrt(found) if root else found, self)

    return translate


def _deviation_and_mean(root: bool) -> Callable[..., Any]:
    deviation = _deviation(root)

    def translate(self: Any, dim: Sequence[int] | None = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        axes = op.Constant(value_ints=[axis % len(self.shape) for axis in dim or range(len(self.shape))])
        mean = op.ReduceMean(op.Cast(self, to=ir.DataType.DOUBLE), axes, keepdims=int(keepdim))
        return deviation(self, dim, correction=correction, keepdim=keepdim), op.CastLike(mean, self)

    return translate


def _roll(self: Any, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Any:
    """By sizes too; the exporter's is for numbers."""
    if all(isinstance(shift, int) for shift in shifts):
        return core.aten_roll(self, shifts, dims)
    shape, rank = None, len(self.shape)
    if not dims:
        shape, self, dims, rank = op.Shape(self), op.Reshape(self, op.Constant(value_ints=[-1])), [0], 1
    for shift, dim in zip(shifts, dims, strict=True):
        axis = dim % rank
        size = op.Shape(self, start=axis, end=axis + 1)
        zero, along, flat = (op.Constant(value_ints=[number]) for number in (0, axis, -1))
        number = isinstance(shift, int)
        by = op.Constant(value_ints=[shift]) if number else op.Reshape(op.Cast(shift, to=ir.DataType.INT64), flat)
        start = op.Sub(size, op.Mod(by, size))
        self = op.Concat(op.Slice(self, start, size, along), op.Slice(self, zero, start, along), axis=axis)
    return self if shape is None else op.Reshape(self, shape)


def scatter_reduce(self: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Any:
    """A mean is a sum over a count; the exporter takes the last value."""
    if reduce != "mean":
        return core.aten_scatter_reduce(self, dim, index, src, reduce, include_self)
    if not self.dtype.is_floating_point() or not len(self.shape):
        raise NotImplementedError("the mean of integers or of one number has no translation; use floats")
    zeros, ones = op.Mul(self, _like(0.0, self)), op.Expand(_like(1.0, self), op.Shape(index))
    count = op.ScatterElements(zeros, index, ones, axis=dim, reduction="add")
    rank = len(index.shape)  # torch uses only as much of the source as has an index
    corner = op.Constant(value_ints=[0] * rank), op.Shape(index), op.Constant(value_ints=list(range(rank)))
    start = self if include_self else zeros
    total = op.ScatterElements(start, index, op.Slice(src, *corner), axis=dim, reduction="add")
    count = op.Add(count, _like(1.0, self)) if include_self else count
    met = op.Greater(count, _like(0.0, self))
    return op.Where(met, op.Div(total, op.Where(met, count, _like(1.0, self))), self)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """With any number of dimensions, and zeros where the mask hides everything, by False or by minus infinity; the
    exporter's is the mean there, or NaN. It also turns the key by its shape, which no runtime joins to other moves."""
    rank = len(query.shape)
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key, value = nn._attention_repeat_kv_for_group_query(query, key, value)
    turned = op.Transpose(key, perm=[*range(rank - 2), rank - 1, rank - 2])
    weights = op.MatMul(op.Mul(query, _scale_of(query, scale)), turned)
    zero, lowest = (op.Constant(value=ir.tensor(number, dtype=query.dtype)) for number in (0.0, float(query.dtype.min)))
    if is_causal:
        weights = op.Add(weights, op.Where(_hides_later(query, key), lowest, zero))
    if attn_mask is None:
        return op.MatMul(op.Softmax(weights, axis=-1), value)
    last = op.Constant(value_ints=[-1])
    if attn_mask.dtype == ir.DataType.BOOL:
        weights = op.Add(weights, op.Where(attn_mask, zero, lowest))
        shown = op.Cast(op.ReduceMax(op.Cast(attn_mask, to=ir.DataType.INT32), last, keepdims=1), to=ir.DataType.BOOL)
    else:
        weights = op.Add(weights, attn_mask)
        shown = op.Not(op.Equal(op.ReduceMax(attn_mask, last, keepdims=1), _like(float("-inf"), attn_mask)))
    return op.Where(shown, op.MatMul(op.Softmax(weights, axis=-1), value), _like(0.0, query))


def _scale_of(query: Any, scale: float | None) -> Any:
    if scale is None and not isinstance(query.shape[-1], int):
        size = op.CastLike(op.Squeeze(op.Shape(query, start=-1)), query)
        return op.Div(_like(1.0, query), op.Sqrt(size))
    return op.Constant(value=ir.tensor(query.shape[-1] ** -0.5 if scale is None else float(scale), dtype=query.dtype))


def _hides_later(query: Any, key: Any) -> Any:
    """[queries, keys]: whether the key comes after the query."""
    zero, one = (op.Constant(value_int=number) for number in (0, 1))
    asks, asked = (op.Range(zero, op.Squeeze(op.Shape(each, start=-2, end=-1)), one) for each in (query, key))
    return op.Greater(asked, op.Unsqueeze(asks, op.Constant(value_ints=[1])))


TRANSLATIONS: Table = {
    _ATEN.remainder.Scalar: _remainder,
    _ATEN.remainder.Tensor: _remainder,
    _ATEN.fmod.Scalar: _fmod,
    _ATEN.fmod.Tensor: _fmod,
    _ATEN.floor_divide.default: _floor_divide,
    _ATEN.floor_divide.Scalar: _floor_divide,
    _ATEN.div.Tensor_mode: _div_mode,
    _ATEN.div.Scalar_mode: _div_mode,
    _ATEN.signbit.default: _signbit,
    _PRIMS.signbit.default: _signbit,
    _PRIMS.hypot.default: _hypot,
    _PRIMS.fmax.default: _extreme_of_numbers(op.Max),
    _PRIMS.fmin.default: _extreme_of_numbers(op.Min),
    _ATEN.logaddexp.default: _in_double(_logaddexp),
    _ATEN.logaddexp2.default: _in_double(_logaddexp2),
    _ATEN.logcumsumexp.default: _logcumsumexp,
    _ATEN.log_sigmoid.default: _log_sigmoid,
    _ATEN.log1p.default: log1p,
    _ATEN.expm1.default: expm1,
    _ATEN.elu.default: _elu,
    _ATEN.celu.default: _celu,
    _ATEN.selu.default: _selu,
    _ATEN.var.correction: _deviation(root=False),
    _ATEN.std.correction: _deviation(root=True),
    _ATEN.var_mean.correction: _deviation_and_mean(root=False),
    _ATEN.std_mean.correction: _deviation_and_mean(root=True),
    _ATEN.roll.default: _roll,
    _ATEN.scaled_dot_product_attention.default: _attention,
}
EXACT_TAILS: Table = {_ATEN.sigmoid.default: _sigmoid, _ATEN.silu.default: _silu, _ATEN.glu.default: _glu}
"""Twice as slow as ONNX Runtime's own: for a program that is refused with those."""
