"""Complex numbers as pairs of a real and an imaginary part along one more dimension, the last, as the exporter has it.

The exporter knows sums, products and moves of them. Here are the functions (`torch.exp(1j * x)`), products of several
tensors (`torch.einsum` of a spectrum and weights), choices, indices and writes, and numbers of Python beside them: it
adds 1 to both parts. Each is written by its definition in real numbers. Sources: torch's documentation of each
operator; torch's c10/util/complex.h for divisions, which scale first; W. Kahan, Branch Cuts for Complex Elementary
Functions, for the square root.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from onnxscript import ir
from onnxscript.function_libs.torch_lib.ops import common, core
from onnxscript.onnx_opset import opset18
from torch.onnx._internal import _lazy_import

from trueline.capture.onnx.dtypes import double_operators

_ATEN, _PRIMS = torch.ops.aten, torch.ops.prims
_APIS: Any = vars(_lazy_import)["onnxscript_apis"]
_REAL = {ir.DataType.COMPLEX64: ir.DataType.FLOAT, ir.DataType.COMPLEX128: ir.DataType.DOUBLE}
MOST_FACTORS = 4
"""Of one product: it has a term for each choice of a part of each."""
op: Any = opset18


def _take_part(pairs: Any, number: int) -> Any:
    """The real parts (0) or the imaginary ones (1)."""
    return op.Gather(pairs, op.Constant(value_int=number), axis=-1)


def _parts(pairs: Any) -> tuple[Any, Any]:
    return _take_part(pairs, 0), _take_part(pairs, 1)


def _pair(real: Any, imaginary: Any) -> Any:
    return op.Concat(*(op.Unsqueeze(one, op.Constant(value_ints=[-1])) for one in (real, imaginary)), axis=-1)


def _like(number: float, value: Any) -> Any:
    return op.CastLike(op.Constant(value_float=number), value)


def _as_pair(value: Any, like: Any) -> Any:
    """A number of Python's beside pairs; torch makes complex tensors of others first."""
    if isinstance(value, int | float | complex):
        return op.CastLike(op.Constant(value_floats=[complex(value).real, complex(value).imag]), like)
    return value


def _axis(pairs: Any, dim: int, more: int = 0) -> int:
    """`dim` counted from the front among the dimensions that torch sees, and `more`."""
    return dim % max(1, len(pairs.shape) - 1 + more)


def _multiply(self: Any, other: Any) -> Any:
    (a, b), (c, d) = _parts(self), _parts(_as_pair(other, self))
    return _pair(op.Sub(op.Mul(a, c), op.Mul(b, d)), op.Add(op.Mul(a, d), op.Mul(b, c)))


def _divide(self: Any, other: Any) -> Any:
    """Divided first by the larger part of the divisor, whose square may be out of range."""
    (a, b), (c, d) = _parts(self), _parts(_as_pair(other, self))
    size = op.Max(op.Abs(c), op.Abs(d))
    none = op.Equal(size, _like(0.0, size))
    size = op.Where(none, _like(1.0, size), size)
    e, f = op.Div(c, size), op.Div(d, size)
    total = op.Add(op.Mul(c, e), op.Mul(d, f))
    real = op.Div(op.Add(op.Mul(a, e), op.Mul(b, f)), total)
    imaginary = op.Div(op.Sub(op.Mul(b, e), op.Mul(a, f)), total)
    real, imaginary = (op.Where(none, op.Div(one, c), two) for one, two in ((a, real), (b, imaginary)))
    return _pair(real, imaginary)


def _exp(self: Any) -> Any:
    a, b = _parts(self)
    size, flat = op.Exp(a), op.Equal(b, _like(0.0, b))
    return _pair(op.Mul(size, op.Cos(b)), op.Where(flat, b, op.Mul(size, op.Sin(b))))


def _log(self: Any) -> Any:
    return _pair(op.Log(_abs(self)), _angle(self))


def _abs(self: Any) -> Any:
    return op.ReduceL2(self, op.Constant(value_ints=[-1]), keepdims=0)


def _angle(self: Any) -> Any:
    a, b = _parts(self)
    a.dtype = b.dtype = self.dtype
    return double_operators.TRANSLATIONS[_ATEN.atan2.default](b, a)


def _sqrt(self: Any) -> Any:
    a, b = _parts(self)
    zero = _like(0.0, a)
    larger = op.Sqrt(op.Div(op.Add(_abs(self), op.Abs(a)), _like(2.0, a)))
    nothing = op.Equal(larger, zero)
    smaller = op.Div(op.Abs(b), op.Mul(_like(2.0, a), op.Where(nothing, _like(1.0, a), larger)))
    before = op.Less(a, zero)
    real, size = op.Where(before, smaller, larger), op.Where(before, larger, smaller)
    return _pair(real, op.Where(op.Less(b, zero), op.Neg(size), size))


def _power(self: Any, exponent: complex) -> Any:
    if exponent == 0.5:
        return _sqrt(self)
    if exponent in (2, 3):
        squared = _multiply(self, self)
        return squared if exponent == 2 else _multiply(squared, self)
    return _power_of_pairs(self, _as_pair(exponent, self))


def _power_of_pairs(self: Any, exponent: Any) -> Any:
    """Of zero: one to the power of zero, and nothing else. torch leaves a power that is a whole number as it is."""
    if exponent.dtype is not None and exponent.dtype.is_integer():
        exponent = op.CastLike(common.cast_to(exponent, ir.DataType.COMPLEX128), self)
    zero = _like(0.0, self)
    last = op.Constant(value_ints=[-1])
    is_zero, is_one = (op.Equal(op.ReduceMax(op.Abs(one), last, keepdims=1), zero) for one in (self, exponent))
    base = op.Where(is_zero, _as_pair(1, self), self)
    base.dtype = exponent.dtype if self.dtype is None else self.dtype
    of_zero = op.Where(is_one, _as_pair(1, self), _as_pair(0, self))
    return op.Where(is_zero, of_zero, _exp(_multiply(exponent, _log(base))))


def _power_of_number(self: complex, exponent: Any) -> Any:
    return _power_of_pairs(op.Expand(_as_pair(self, exponent), op.Shape(exponent)), exponent)


def _product(multiply: Callable[..., Any], *factors: Any) -> Any:
    """What is linear in each of the factors, from the products of their parts."""
    if len(factors) > MOST_FACTORS:
        raise NotImplementedError(f"a product of {len(factors)} complex tensors; of up to {MOST_FACTORS} it has one")
    sums: list[Any] = [None, None]
    for chosen in itertools.product((0, 1), repeat=len(factors)):
        found = multiply(*(_take_part(one, number) for one, number in zip(factors, chosen, strict=True)))
        at, signed = sum(chosen) % 2, op.Neg(found) if sum(chosen) % 4 > 1 else found
        sums[at] = signed if sums[at] is None else op.Add(sums[at], signed)
    return _pair(*sums)


def _einsum(equation: str, tensors: Sequence[Any], path: Any = None) -> Any:
    return _product(lambda *parts: op.Einsum(*parts, equation=equation), *tensors)


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    rank = len(weight.shape) - 1
    order = [*range(rank - 2), rank - 1, rank - 2]
    found = _product(lambda one, two: op.MatMul(one, op.Transpose(two, perm=order)), input, weight)
    return found if bias is None else op.Add(found, bias)


def _matmul(self: Any, other: Any) -> Any:
    return _product(op.MatMul, self, other)


def _matrix_sum(self: Any, first: Any, second: Any, beta: complex = 1, alpha: complex = 1) -> Any:
    return op.Add(_scale(self, beta), _scale(_matmul(first, second), alpha))


def _scale(pairs: Any, number: complex) -> Any:
    return pairs if number == 1 else _multiply(pairs, number)


def _where(condition: Any, self: Any, other: Any) -> Any:
    return op.Where(op.Unsqueeze(condition, op.Constant(value_ints=[-1])), self, other)


def _masked_fill(self: Any, mask: Any, value: Any) -> Any:
    return _where(mask, _as_pair(value, self), self)


def _both(test: str) -> Callable[..., Any]:
    """A test that both parts pass; `not` before it where one is enough to fail."""

    def translate(self: Any, *others: Any) -> Any:
        negated, name = test.startswith("not "), test.removeprefix("not ")
        found = getattr(op, name)(self, *(_as_pair(one, self) for one in others))
        least = op.ReduceMin(op.Cast(found, to=ir.DataType.INT32), op.Constant(value_ints=[-1]), keepdims=0)
        kept = op.Cast(least, to=ir.DataType.BOOL)
        return op.Not(kept) if negated else kept

    return translate


def _is_finite(self: Any) -> Any:
    """A number minus itself is zero, but for those that are not finite."""
    return _both("Equal")(op.Sub(self, self), 0)


def _is_nan(self: Any) -> Any:
    return op.Not(_both("Equal")(self, self))


def _cast(self: Any, dtype: int = -1, *rest: Any, **options: Any) -> Any:
    if dtype == -1:
        return op.Identity(self)
    kind = ir.DataType(dtype)
    return op.Cast(self, to=_REAL[kind]) if kind in _REAL else op.Cast(_take_part(self, 0), to=kind)


def _copy(self: Any, src: Any, non_blocking: bool = False) -> Any:
    """Into all of a tensor: it has the shape of that."""
    return op.Expand(_as_pair(src, self), op.Shape(self))


def _gather(self: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    pairs = op.Concat(op.Shape(index), op.Constant(value_ints=[2]), axis=0)
    places = op.Expand(op.Unsqueeze(index, op.Constant(value_ints=[-1])), pairs)
    return op.GatherElements(self, places, axis=_axis(self, dim))


def _index_put(self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    return core.aten_index_put(self, indices, _as_pair(values, self), accumulate)


def _pad(self: Any, pad: Sequence[Any], *rest: Any, **options: Any) -> Any:
    """Of each part alone; the exporter pads the last dimensions, and the pairs are one."""
    mode = (rest[0] if rest and isinstance(rest[0], str) else options.get("mode")) or "constant"
    value = rest[-1] if rest and not isinstance(rest[-1], str) else options.get("value")
    if value or mode not in _MODES:
        raise NotImplementedError(f"a pad of complex numbers with {value or mode} has no translation")
    dims = len(self.shape) - 1
    sides = [*pad, *[0] * (2 * dims - len(pad))]
    before, after = ([sides[2 * (dims - 1 - at) + side] for at in range(dims)] for side in (0, 1))
    return op.Pad(self, common.merge_dims([*before, 0, *after, 0]), mode=_MODES[mode])


_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _along(translate: Callable[..., Any], more: int = 0) -> Callable[..., Any]:
    """Of an operator that takes a tensor and a dimension (of the answer, with `more` of them)."""

    def translate_pairs(self: Any, dim: int = 0, *rest: Any, **options: Any) -> Any:
        return translate(self, _axis(self, dim, more), *rest, **options)

    return translate_pairs


def _split(translate: Callable[..., Any]) -> Callable[..., Any]:
    def translate_pairs(self: Any, sizes: Any, dim: int = 0) -> Any:
        return translate(self, sizes, _axis(self, dim))

    return translate_pairs


def _scatter(translate: Callable[..., Any]) -> Callable[..., Any]:
    def translate_pairs(self: Any, src: Any, dim: int = 0, *rest: Any, **options: Any) -> Any:
        return translate(self, src, _axis(self, dim), *rest, **options)

    return translate_pairs


def _take_sizes(translate: Callable[..., Any], last: int) -> Callable[..., Any]:
    """Of an operator that takes a tensor and a number for each dimension, which is `last` for the pairs."""

    def translate_pairs(self: Any, sizes: Sequence[Any], *rest: Any, **options: Any) -> Any:
        return translate(self, [*sizes, last])

    return translate_pairs


def _cumulate(self: Any, dim: int, dtype: int = -1) -> Any:
    return op.CumSum(self, op.Constant(value_int=_axis(self, dim)))


def _fill_like(number: complex | None) -> Callable[..., Any]:
    """As many as there are of another tensor; with None the number comes second."""

    def translate(self: Any, *rest: Any, dtype: int = -1, **options: Any) -> Any:
        kind = self.dtype if dtype == -1 else ir.DataType(dtype)
        shape = op.Shape(self, end=len(self.shape) - 1)
        return _fill_shape(shape, rest[0] if number is None else number, kind, pairs=dtype == -1 or kind in _REAL)

    return translate


def _fill_new(number: complex | None) -> Callable[..., Any]:
    """Of sizes of its own, as `new_zeros`."""

    def translate(self: Any, size: Sequence[Any], *rest: Any, dtype: int = -1, **options: Any) -> Any:
        kind = self.dtype if dtype == -1 else ir.DataType(dtype)
        return _fill_shape(
            _shape(size), rest[0] if number is None else number, kind, pairs=dtype == -1 or kind in _REAL
        )

    return translate


def _shape(size: Sequence[Any]) -> Any:
    return common.merge_dims(list(size)) if len(size) else op.Constant(value=ir.tensor([], dtype=ir.DataType.INT64))


def _fill_shape(shape: Any, value: Any, kind: ir.DataType, *, pairs: bool) -> Any:
    kind = _REAL.get(kind, kind)
    if isinstance(value, int | float | complex):
        numbers = [complex(value).real, complex(value).imag] if pairs else complex(value).real
        value = op.Constant(value=ir.tensor(numbers, dtype=kind))
    return op.Expand(value, op.Concat(shape, op.Constant(value_ints=[2]), axis=0) if pairs else shape)


def fill(number: complex | None, translate: Callable[..., Any]) -> Callable[..., Any]:
    """Of an operator that makes a tensor of a size, complex by its dtype; `translate` makes those of real numbers."""

    def translate_filled(size: Sequence[Any], *rest: Any, dtype: int = -1, **options: Any) -> Any:
        if dtype == -1 and rest and isinstance(rest[0], complex):
            dtype = ir.DataType.COMPLEX64
        if dtype == -1 or ir.DataType(dtype) not in _REAL:
            return translate(size, *rest, dtype=dtype, **options)
        return _fill_shape(_shape(size), rest[0] if number is None else number, ir.DataType(dtype), pairs=True)

    return translate_filled


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _ATEN.zeros.default: fill(0, core.aten_zeros),
    _ATEN.ones.default: fill(1, core.aten_ones),
    _ATEN.full.default: fill(None, core.aten_full),
}
"""Operator of an exported program that makes complex numbers of real ones -> what writes it in ONNX."""
OF_PAIRS: dict[Any, Callable[..., Any]] = {
    _ATEN.angle.default: _angle,
    _ATEN.exp.default: _exp,
    _ATEN.log.default: _log,
    _ATEN.sqrt.default: _sqrt,
    _ATEN.pow.Tensor_Scalar: _power,
    _ATEN.pow.Scalar: _power_of_number,
    _ATEN.pow.Tensor_Tensor: _power_of_pairs,
    _ATEN.isfinite.default: _is_finite,
    _ATEN.isnan.default: _is_nan,
    _ATEN.where.self: _where,
    _ATEN.einsum.default: _einsum,
    _ATEN.linear.default: _linear,
    _ATEN.addmm.default: _matrix_sum,
    _ATEN.sym_size.int: _along(core.aten_sym_size),
    **dict.fromkeys((_ATEN.copy.default, _ATEN.fill.Tensor, _ATEN.fill.Scalar), _copy),
    _ATEN.gather.default: _gather,
    _ATEN.index.Tensor: core.aten_index,
    _ATEN.index_put.default: _index_put,
    _ATEN.select.int: _along(core.aten_select),
    _ATEN.index_select.default: _along(core.aten_index_select),
    _ATEN.unsqueeze.default: _along(core.aten_unsqueeze, 1),
    _ATEN.unbind.int: _along(core.aten_unbind),
    _ATEN.cumsum.default: _cumulate,
    _ATEN.expand.default: _take_sizes(core.aten_expand, 2),
    _ATEN.repeat.default: _take_sizes(core.aten_repeat, 1),
    _ATEN.zeros_like.default: _fill_like(0),
    _ATEN.ones_like.default: _fill_like(1),
    _ATEN.full_like.default: _fill_like(None),
    _ATEN.new_zeros.default: _fill_new(0),
    _ATEN.new_ones.default: _fill_new(1),
    _ATEN.new_full.default: _fill_new(None),
    _ATEN.constant_pad_nd.default: _pad,
    _ATEN.pad.default: _pad,
    _ATEN._to_copy.default: _cast,
    _PRIMS.convert_element_type.default: _cast,
    _ATEN.mul.Scalar: _multiply,
    **dict.fromkeys((_ATEN.div.Tensor, _ATEN.div.Scalar, _ATEN.divide.Tensor), _divide),
    **dict.fromkeys((_ATEN.eq.Tensor, _ATEN.eq.Scalar), _both("Equal")),
    **dict.fromkeys((_ATEN.ne.Tensor, _ATEN.ne.Scalar), _both("not Equal")),
    **dict.fromkeys((_ATEN.mm.default, _ATEN.bmm.default, _ATEN.mv.default, _ATEN.dot.default), _matmul),
    **dict.fromkeys((_ATEN.masked_fill.Scalar, _ATEN.masked_fill.Tensor), _masked_fill),
    **dict.fromkeys((_ATEN.split.Tensor, _ATEN.split_with_sizes.default), _split(core.aten_split)),
    _ATEN.slice_scatter.default: _scatter(core.aten_slice_scatter),
    _ATEN.select_scatter.default: _scatter(core.aten_select_scatter),
    **dict.fromkeys((_ATEN.alias.default, _ATEN.detach.default), core.aten_alias),
}
"""Operator with a complex tensor -> what writes it in ONNX."""


@contextmanager
def translate_pairs() -> Iterator[None]:
    """In the block, torch.onnx translates operators of complex tensors by `OF_PAIRS` before its own."""
    list_ops = _APIS.get_torchlib_ops
    own = [
        SimpleNamespace(qualified_name=operator.name(), function=translate, is_complex=True)
        for operator, translate in OF_PAIRS.items()
    ]
    _APIS.get_torchlib_ops = lambda: [*own, *list_ops()]
    try:
        yield
    finally:
        _APIS.get_torchlib_ops = list_ops
