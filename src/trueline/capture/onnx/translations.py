"""Operators that torch.onnx does not translate, or translates to what ONNX Runtime cannot run or computes less exactly.

Each is written in ONNX operators as the exporter's own are, and proven like them. Sources: torch's documentation of the
operator, and ONNX's of opset 18.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import INT64, ir
from onnxscript.function_libs.torch_lib.ops import core, special
from onnxscript.function_libs.torch_lib.ops import nn as resize
from onnxscript.onnx_opset import opset18
from torch.onnx._internal.exporter._torchlib.ops import hop

from trueline.capture.onnx import indices, integer_arithmetic, numerics, order_statistics, resampling
from trueline.capture.onnx.dtypes import complex_numbers, double_operators
from trueline.capture.onnx.functions import bessel, gamma, writes
from trueline.capture.onnx.signals import windows
from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="onnxscript 0.7.2, onnxruntime 1.31",
    cost="more operators",
    helps=("resnet", "mobilenet_v2"),
)

_ATEN = torch.ops.aten
_CHOSEN = re.compile(r"\bu\d+")
"""torch's name of a size that values choose."""
op: Any = opset18
"""Typed for tensors only; the exporter accepts Python's numbers and lists too."""


def _where(condition: Any, self: Any, other: Any) -> Any:
    """ONNX Runtime has no Where between booleans."""
    if self.dtype == ir.DataType.BOOL:
        return op.Or(op.And(condition, self), op.And(op.Not(condition), other))
    return op.Where(condition, self, other)


def _add(self: Any, other: Any, alpha: float = 1) -> Any:
    """ONNX adds numbers of one dtype, and the exporter leaves a boolean beside a whole number as it is."""
    kinds = [getattr(one, "dtype", None) for one in (self, other)]
    if None not in kinds and ir.DataType.BOOL in kinds and kinds[0] != kinds[1]:
        self, other = (
            (op.CastLike(self, other), other) if kinds[0] == ir.DataType.BOOL else (self, op.CastLike(other, self))
        )
    return core.aten_add(self, other, alpha)


def _diagonal_scatter(self: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """What is written into a diagonal. The exporter takes it apart into a copy into a view, which it then refuses."""
    rank = len(self.shape)
    order = [axis for axis in range(rank) if axis not in (dim1 % rank, dim2 % rank)] + [dim1 % rank, dim2 % rank]
    moved = op.Transpose(self, perm=order)
    zero, one = (op.Constant(value_int=number) for number in (0, 1))
    rows, columns = (
        op.Range(zero, op.Squeeze(op.Shape(moved, start=rank + at, end=rank + at + 1)), one) for at in (-2, -1)
    )
    column = op.Unsqueeze(op.Add(rows, op.Constant(value_int=offset)), op.Constant(value_ints=[1]))
    first = op.Constant(value_ints=[max(-offset, 0)])
    left = op.Sub(op.Sub(op.Shape(rows), first), op.Shape(src, start=-1))
    pads = op.Concat(first, op.Max(left, op.Constant(value_ints=[0])), axis=0)
    nothing = op.CastLike(op.Constant(value_int=0), src)
    values = op.Pad(src, pads, nothing, op.Constant(value_ints=[-1]))  # one for each row
    values = op.CastLike(op.Unsqueeze(values, op.Constant(value_ints=[-1])), self)
    values.dtype = self.dtype
    inverse = sorted(range(rank), key=order.__getitem__)
    moved.dtype = self.dtype
    return op.Transpose(_where(op.Equal(column, columns), values, moved), perm=inverse)


def _instance_norm(input: Any, *rest: Any) -> Any:
    """Centred first: ONNX Runtime sums a channel's elements one by one, and divides the mean's rounding error by the
    deviation, which is large for a nearly constant channel."""
    use_input_stats = rest[4]
    if use_input_stats:
        axes = op.Constant(value_ints=list(range(2, len(input.shape))))
        input = op.Sub(input, op.ReduceMean(input, axes, keepdims=1))
    return core.aten_instance_norm(input, *rest)


def _rnn(activation: str) -> Callable[..., Any]:
    """The layers of a plain RNN, each as one operator."""

    def translate(input: Any, hx: Any, params: Sequence[Any], has_biases: bool, num_layers: int, *rest: Any) -> Any:
        _, _, bidirectional, batch_first = rest
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

    return translate


def _repeat_interleave(self: Any, repeats: Any, dim: int | None = None, *, output_size: Any = None) -> Any:
    """Each element `repeats` times in place; the exporter repeats another dimension where `repeats` is a size."""
    rank = 1 if dim is None else len(self.shape)
    if dim is None:
        self, dim = op.Reshape(self, op.Constant(value_ints=[-1])), 0
    at = dim % rank + 1
    times = op.Constant(value_ints=[repeats]) if isinstance(repeats, int) else op.Reshape(repeats, [-1])
    ones, others = op.Constant(value_ints=[1] * at), op.Constant(value_ints=[1] * (rank - at))
    each = op.Tile(op.Unsqueeze(self, op.Constant(value_ints=[at])), op.Concat(ones, times, others, axis=0))
    before, after = op.Shape(self, start=0, end=at - 1), op.Shape(self, start=at)
    return op.Reshape(each, op.Concat(before, op.Constant(value_ints=[-1]), after, axis=0))


def _prod(inp: Any, dims: Sequence[int], *, output_dtype: int | None = None) -> Any:
    """A cumulative product decomposes into it. In double, as torch's own: what is out of range may come back."""
    kind, axes = (inp.dtype if output_dtype is None else output_dtype), op.Constant(value_ints=list(dims))
    if kind == ir.DataType.FLOAT:
        wide = op.ReduceProd(op.Cast(inp, to=ir.DataType.DOUBLE), axes, keepdims=0)
        return op.Cast(wide, to=ir.DataType.FLOAT)
    return op.ReduceProd(inp if kind == inp.dtype else op.Cast(inp, to=kind), axes, keepdims=0)


def _cdist(x1: Any, x2: Any, p: float, compute_mode: int | None) -> Any:
    """The distance of each row to each, by its definition."""
    apart = op.Sub(op.Unsqueeze(x1, [-2]), op.Unsqueeze(x2, [-3]))
    if p == 2:
        return op.ReduceL2(apart, [-1], keepdims=0)
    if p == 1:
        return op.ReduceL1(apart, [-1], keepdims=0)
    if p == math.inf:
        return op.ReduceMax(op.Abs(apart), [-1], keepdims=0)
    raise NotImplementedError(f"cdist with p={p} has no translation; p=1, p=2 and p=inf have")


def _pdist(self: Any, p: float = 2) -> Any:
    """The distances of each row to each later one."""
    far, count = _cdist(self, self, p, None), op.Squeeze(op.Shape(self, start=0, end=1))
    numbers = op.Range(op.Constant(value_int=0), count, op.Constant(value_int=1))
    later = op.Less(op.Unsqueeze(numbers, [1]), op.Unsqueeze(numbers, [0]))
    row = op.Constant(value_ints=[-1])
    return op.Compress(op.Reshape(far, row), op.Reshape(later, row))


def _frexp(self: Any) -> tuple[Any, Any]:
    """Fractions from a half up to one, and powers of two. The logarithm may be off by one, which the fraction shows."""
    x, zero = op.Cast(self, to=ir.DataType.DOUBLE), gamma.hold(0.0)
    none = op.Or(op.Equal(x, zero), op.Or(op.IsInf(x), op.IsNaN(x)))
    size = op.Where(none, gamma.hold(1.0), op.Abs(x))
    power = op.Add(op.Floor(op.Div(op.Log(size), gamma.hold(math.log(2)))), gamma.hold(1.0))
    part = op.Div(size, op.Pow(gamma.hold(2.0), power))
    power = op.Where(op.GreaterOrEqual(part, gamma.hold(1.0)), op.Add(power, gamma.hold(1.0)), power)
    power = op.Where(op.Less(part, gamma.hold(0.5)), op.Sub(power, gamma.hold(1.0)), power)
    power = op.Where(none, zero, power)
    return op.Cast(op.Div(x, op.Pow(gamma.hold(2.0), power)), to=self.dtype), op.Cast(power, to=ir.DataType.INT32)


def _adaptive_avg_pool2d(self: Any, output_size: Sequence[int]) -> Any:
    """By a matrix of weights for each dimension, computed at run time: the exporter's translation is for one size."""
    if all(size == 1 for size in output_size):
        return op.ReduceMean(self, [-2, -1], keepdims=1)
    rank = len(self.shape)
    rows, columns = (_bins(op.Shape(self, start=rank + at, end=rank + at + 1), output_size[at]) for at in (-2, -1))
    return op.MatMul(op.CastLike(rows, self), op.MatMul(self, op.Transpose(op.CastLike(columns, self), perm=[1, 0])))


def _bins(size: Any, bins: int) -> Any:
    """Weights [bins, size]: bin i is the mean from floor(i * size / bins) up to ceil((i + 1) * size / bins)."""
    length = op.Squeeze(size, [0])
    number = op.Unsqueeze(op.Range(op.Constant(value_int=0), bins, op.Constant(value_int=1)), [1])
    places = op.Unsqueeze(op.Range(op.Constant(value_int=0), length, op.Constant(value_int=1)), [0])
    start = op.Div(op.Mul(number, length), bins)
    end = op.Div(op.Add(op.Mul(op.Add(number, 1), length), bins - 1), bins)
    inside = op.And(op.GreaterOrEqual(places, start), op.Less(places, end))
    weights = op.Cast(inside, to=ir.DataType.DOUBLE.value)
    return op.Div(weights, op.Cast(op.Sub(end, start), to=ir.DataType.DOUBLE.value))


def _multinomial(self: Any, num_samples: Any, replacement: bool = False) -> Any:
    """Without replacement: the largest logarithms of the weights plus Gumbel noise. ONNX's own operator draws with
    replacement, and the exporter uses it anyway."""
    if replacement:
        return core.aten_multinomial(self, num_samples, replacement)
    noise = op.Neg(op.Log(op.Neg(op.Log(op.RandomUniformLike(self, low=1e-30, high=1.0)))))
    count = op.Constant(value_ints=[num_samples]) if isinstance(num_samples, int) else op.Reshape(num_samples, [-1])
    _, drawn = op.TopK(op.Add(op.Log(self), noise), count, axis=-1)
    return drawn


def _map(body: Any, xs: Sequence[Any], pos_args: Sequence[Any]) -> Any:
    """A scan without a carried value."""
    return hop.higher_order_scan(body, [], xs, pos_args)


def _nearest(input: Any, output_size: INT64 | None = None, scale_factors: Sequence[float] | None = None) -> Any:
    """By torch's index, floor(step * (old / new)) in floats. ONNX Runtime divides by (new / old), and where an index is
    a whole number it is rounded to another one."""
    if scale_factors is not None and all(math.log2(factor).is_integer() for factor in scale_factors):
        return resize.aten_upsample_nearestnd_vec(input, output_size, scale_factors)  # exact either way
    axes, one = len(input.shape) - 2, op.Constant(value_int=1)
    sizes = None if output_size is None else op.Cast(output_size, to=ir.DataType.INT64)
    for at in range(axes):
        old = op.Squeeze(op.Gather(op.Shape(input), op.Constant(value_ints=[at + 2])))
        if scale_factors is None:
            new = op.Squeeze(op.Gather(sizes, op.Constant(value_ints=[at])))
            scale = op.Div(*(op.Cast(size, to=ir.DataType.FLOAT) for size in (old, new)))
        else:
            factor = op.Constant(value=ir.tensor(scale_factors[at], dtype=ir.DataType.DOUBLE))
            new = op.Cast(op.Floor(op.Mul(op.Cast(old, to=ir.DataType.DOUBLE), factor)), to=ir.DataType.INT64)
            scale = op.Constant(value_float=1.0 / scale_factors[at])
        steps = op.Cast(op.Range(op.Constant(value_int=0), new, one), to=ir.DataType.FLOAT)
        index = op.Cast(op.Floor(op.Mul(steps, scale)), to=ir.DataType.INT64)
        input = op.Gather(input, op.Min(index, op.Sub(old, one)), axis=at + 2)
    return input


def _round_size(size: Any, digits: None = None) -> Any:
    """`round` of a share of a size, half to even as ONNX's."""
    if digits is not None:
        raise NotImplementedError("round() of a size to decimal places")
    return op.Cast(op.Round(size), to=ir.DataType.INT64)


def _cast_first(translate: Callable[..., Any]) -> Callable[..., Any]:
    """In the dtype of the answer before anything is added: the exporter casts a share that it has rounded."""

    def translate_softmax(self: Any, dim: int, dtype: int | None = None) -> Any:
        if dtype in (None, -1, self.dtype) or not len(self.shape):
            return translate(self, dim, -1 if dtype is None else dtype)
        return (op.Softmax if translate is core.aten_softmax else op.LogSoftmax)(op.Cast(self, to=dtype), axis=dim)

    return translate_softmax


def _promote(translate: Callable[..., Any]) -> Callable[..., Any]:
    """Of a float and a whole number, as torch does for all names of an operator: the exporter does so for `div`, and
    writes `divide` of both as they are."""

    def translate_alias(self: Any, other: Any, *rest: Any) -> Any:
        kinds = [getattr(one, "dtype", None) for one in (self, other)]
        floats = [kind for kind in kinds if kind is not None and kind.is_floating_point()]
        if None not in kinds and len(floats) < 2 and (floats or translate is core.aten_div):
            kind = floats[0] if floats else ir.DataType.FLOAT
            self, other = (one if one.dtype == kind else op.Cast(one, to=kind.value) for one in (self, other))
        return translate(self, other, *rest)

    return translate_alias


def _power(self: Any, exponent: Any) -> Any:
    """ONNX returns the dtype of the base, and torch the wider one, or that of the other beside one without axes."""
    pair = (self, exponent)
    scalars = [one.shape is not None and not len(one.shape) for one in pair]
    kinds = [one.dtype for one in pair]
    floats = None not in kinds and all(kind.is_floating_point() for kind in kinds)
    if floats and kinds[0] != kinds[1]:
        kind = kinds[scalars[0]] if scalars[0] != scalars[1] else max(kinds, key=lambda one: one.itemsize)
        self, exponent = (op.Cast(one, to=kind.value) for one in pair)
    return core.aten_pow(self, exponent)


def _mean_along(self: Any, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: int | None = None) -> Any:
    axes = _axes(self, dim)
    if dtype in (None, -1, self.dtype) or not len(self.shape):
        found = core.aten_mean_dim(self, axes, keepdim, -1 if dtype is None else dtype)
    else:
        found = op.ReduceMean(op.Cast(self, to=dtype), axes, keepdims=int(keepdim))
    return _nan_of_none(found, self, axes)


def _mean(self: Any, dtype: int = -1) -> Any:
    return _nan_of_none(core.aten_mean(self, dtype), self, None)


def _nan_of_none(found: Any, self: Any, axes: Any) -> Any:
    """The mean `found`; NaN, where ONNX Runtime has 0, of what may be no values: a part that values choose."""
    if not any(_CHOSEN.search(str(size)) for size in self.shape):
        return found
    sizes = op.Shape(self) if axes is None else op.Gather(op.Shape(self), axes)
    none = op.Equal(op.ReduceProd(sizes, keepdims=0), op.Constant(value_int=0))
    return op.Where(none, op.CastLike(op.Constant(value_float=math.nan), found), found)


def _axes(self: Any, dim: Sequence[int] | None) -> Any:
    return op.Constant(value_ints=list(dim or range(len(self.shape))))


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    **integer_arithmetic.TRANSLATIONS,
    **indices.TRANSLATIONS,
    **numerics.TRANSLATIONS,
    **double_operators.TRANSLATIONS,
    **complex_numbers.TRANSLATIONS,
    **resampling.TRANSLATIONS,
    **order_statistics.TRANSLATIONS,
    **windows.TRANSLATIONS,
    **gamma.TRANSLATIONS,
    **bessel.TRANSLATIONS,
    **writes.TRANSLATIONS,
    _ATEN.add.Tensor: _add,
    _ATEN.divide.Tensor: _promote(core.aten_div),
    _ATEN.multiply.Tensor: _promote(core.aten_mul),
    _ATEN.subtract.Tensor: _promote(core.aten_sub),
    _ATEN.pow.Tensor_Tensor: _power,
    _ATEN.where.self: _where,
    _ATEN.softmax.int: _cast_first(core.aten_softmax),
    _ATEN.log_softmax.int: _cast_first(special.aten_special_log_softmax),
    _ATEN.mean.default: _mean,
    _ATEN.mean.dim: _mean_along,
    _ATEN.diagonal_scatter.default: _diagonal_scatter,
    _ATEN.instance_norm.default: _instance_norm,
    _ATEN.rnn_tanh.input: _rnn("Tanh"),
    _ATEN.rnn_relu.input: _rnn("Relu"),
    _ATEN.repeat_interleave.self_int: _repeat_interleave,
    torch.ops.prims.prod.default: _prod,
    _ATEN._cdist_forward.default: _cdist,
    _ATEN._pdist_forward.default: _pdist,
    torch.ops.prims.frexp.default: _frexp,
    _ATEN.adaptive_avg_pool2d.default: _adaptive_avg_pool2d,
    _ATEN.upsample_nearest1d.vec: _nearest,
    _ATEN.upsample_nearest2d.vec: _nearest,
    _ATEN.upsample_nearest3d.vec: _nearest,
    _ATEN.multinomial.default: _multinomial,
    torch.ops.higher_order.map_impl: _map,
    round: _round_size,
}
"""Operator of an exported program -> what writes it in ONNX."""
