"""Operators for which ONNX Runtime has no kernel of doubles, or that keep their numbers in single precision.

Other dtypes are written as by the exporter. The formulas are right to a few units in the last place of a double.
Sources: W. J. Cody, Rational Chebyshev approximations for the error function, 1969; S. Moshier, Cephes, `atan.c`;
torch's documentation of each operator.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import ir
from onnxscript.function_libs.torch_lib.ops import core, linalg, nn, special
from onnxscript.onnx_opset import opset18

from trueline.capture.onnx import numerics
from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="onnxscript 0.7.2, onnxruntime 1.31",
    cost="more operators, of doubles alone",
    helps=("gelu of doubles", "softplus of doubles", "addmm of doubles with alpha"),
)
_ATEN = torch.ops.aten
_DOUBLE = ir.DataType.DOUBLE
op: Any = opset18

Table = dict[Callable[..., Any], Callable[..., Any]]
_NEAR = (
    (1.85777706184603153e-1, 3.16112374387056560, 1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)
"""Cody's quotients of polynomials, from the highest power: erf(x) / x in the square of x, below NEAR."""
_MIDDLE = (
    (
        *(2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1),
        *(2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3),
        1.23033935479799725e3,
    ),
    (
        *(1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3),
        *(3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3),
    ),
)
"""erfc(x) * exp(x * x) in x, below FAR."""
_FAR = (
    (
        *(1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1),
        *(1.60837851487422766e-2, 6.58749161529837803e-4),
    ),
    (
        *(1.0, 2.56852019228982242, 1.87295284992346725, 5.27905102951428412e-1, 6.05183413124413191e-2),
        2.33520497626869185e-3,
    ),
)
"""What erfc(x) * exp(x * x) * x is below 1 / sqrt(pi), divided by z: in z, one over the square of x."""
NEAR, FAR, ZERO = 0.46875, 4.0, 30.0
"""Beyond ZERO erfc is 0."""
_ARCTAN = (
    (
        *(-8.750608600031904122785e-1, -1.615753718733365076637e1, -7.500855792314704667340e1),
        *(-1.228866684490136173410e2, -6.485021904942025371773e1),
    ),
    (
        *(1.0, 2.485846490142306297962e1, 1.650270098316988542046e2, 4.328810604912902668951e2),
        *(4.853903996359136964868e2, 1.945506571482613964425e2),
    ),
)
_PI_REST = 6.123233995736765886130e-17
"""What half of pi is more than its double."""


def _hold(number: Any) -> Any:
    """A number of the code, or of a size, as a double."""
    if isinstance(number, ir.Value):
        return op.Cast(number, to=_DOUBLE)
    return op.Constant(value=ir.tensor(number, dtype=_DOUBLE))


def _of_doubles(formula: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    def translate_doubles(self: Any) -> Any:
        return (formula if self.dtype == _DOUBLE else otherwise)(self)

    return translate_doubles


def _polynomial(x: Any, factors: Sequence[float]) -> Any:
    found = _hold(factors[0])
    for factor in factors[1:]:
        found = op.Add(op.Mul(found, x), _hold(factor))
    return found


def _quotient(x: Any, factors: Sequence[Sequence[float]]) -> Any:
    above, below = factors
    return op.Div(_polynomial(x, above), _polynomial(x, below))


def _erf_and_rest(self: Any) -> tuple[Any, Any]:
    """erf and erfc."""
    zero, one, two, size = _hold(0.0), _hold(1.0), _hold(2.0), op.Abs(self)
    is_near = op.Less(size, _hold(NEAR))
    near = op.Mul(self, _quotient(op.Mul(self, self), _NEAR))
    size = op.Where(op.Greater(size, _hold(ZERO)), _hold(ZERO), size)
    inverse = op.Div(one, op.Mul(size, size))
    far = op.Sub(_hold(1 / math.sqrt(math.pi)), op.Mul(inverse, _quotient(inverse, _FAR)))
    times = op.Where(op.Less(size, _hold(FAR)), _quotient(size, _MIDDLE), op.Div(far, size))
    # the square in two parts, so that its rounding error is not in the exponent
    coarse = op.Div(op.Floor(op.Mul(size, _hold(16.0))), _hold(16.0))
    fine = op.Mul(op.Sub(size, coarse), op.Add(size, coarse))
    rest = op.Mul(op.Mul(op.Exp(op.Neg(op.Mul(coarse, coarse))), op.Exp(op.Neg(fine))), times)
    below = op.Less(self, zero)
    found = op.Where(below, op.Sub(rest, one), op.Sub(one, rest))
    beyond = op.Where(below, op.Sub(two, rest), rest)
    return op.Where(is_near, near, found), op.Where(is_near, op.Sub(one, near), beyond)


def _gelu(self: Any, approximate: str = "none") -> Any:
    if self.dtype != _DOUBLE:
        return nn.aten_gelu(self, approximate)
    half, one = _hold(0.5), _hold(1.0)
    if approximate == "tanh":
        cubic = op.Add(self, op.Mul(_hold(0.044715), op.Mul(op.Mul(self, self), self)))
        share = op.Tanh(op.Mul(_hold(math.sqrt(2 / math.pi)), cubic))
    else:
        share = _erf_and_rest(op.Mul(self, _hold(math.sqrt(0.5))))[0]
    return op.Mul(op.Mul(half, self), op.Add(one, share))


def _arctan(self: Any) -> Any:
    one, size = _hold(1.0), op.Abs(self)
    is_large, is_small = op.Greater(size, _hold(1 + math.sqrt(2))), op.LessOrEqual(size, _hold(0.66))
    turned = op.Where(is_large, op.Div(_hold(-1.0), size), op.Div(op.Sub(size, one), op.Add(size, one)))
    infinite = op.IsInf(size)
    turned = op.Where(is_small, size, op.Where(infinite, _hold(0.0), turned))
    square = op.Mul(turned, turned)
    found = op.Add(op.Mul(turned, op.Mul(square, _quotient(square, _ARCTAN))), turned)
    start = op.Where(is_small, _hold(0.0), op.Where(is_large, _hold(math.pi / 2), _hold(math.pi / 4)))
    rest = op.Where(is_small, _hold(0.0), op.Where(is_large, _hold(_PI_REST), _hold(_PI_REST / 2)))
    found = op.Add(start, op.Add(found, rest))
    return op.Where(op.Less(self, _hold(0.0)), op.Neg(found), op.Where(op.Equal(size, _hold(0.0)), self, found))


def _arcsin(self: Any) -> Any:
    one = _hold(1.0)
    return _arctan(op.Div(self, op.Sqrt(op.Mul(op.Sub(one, self), op.Add(one, self)))))


def _arccos(self: Any) -> Any:
    one = _hold(1.0)
    return op.Mul(_hold(2.0), _arctan(op.Sqrt(op.Div(op.Sub(one, self), op.Add(one, self)))))


def _arctan2(self: Any, other: Any) -> Any:
    return numerics.write_arctan2(self, other, _arctan if self.dtype == _DOUBLE else op.Atan)


def _sinh(self: Any) -> Any:
    """Of twice the half of a number whose exponential alone is out of range."""
    less = numerics.expm1(op.Abs(self))
    found = op.Mul(_hold(0.5), op.Add(less, op.Div(less, op.Add(less, _hold(1.0)))))
    root = op.Exp(op.Mul(_hold(0.5), op.Abs(self)))
    found = op.Where(op.Greater(op.Abs(self), _hold(40.0)), op.Mul(op.Mul(_hold(0.5), root), root), found)
    return op.Where(op.Less(self, _hold(0.0)), op.Neg(found), found)


def _cosh(self: Any) -> Any:
    root = op.Exp(op.Mul(_hold(0.5), op.Abs(self)))
    large = op.Mul(op.Mul(_hold(0.5), root), root)
    return op.Add(large, op.Div(_hold(0.25), large))


def _arcsinh(self: Any) -> Any:
    size, one = op.Abs(self), _hold(1.0)
    inverse = op.Div(one, size)
    # x + x * x / (1 + sqrt(1 + x * x)), without the square of what is large
    part = op.Div(size, op.Add(inverse, op.Sqrt(op.Add(one, op.Mul(inverse, inverse)))))
    small = op.Div(op.Mul(size, size), op.Add(one, op.Sqrt(op.Add(one, op.Mul(size, size)))))
    found = numerics.log1p(op.Add(size, op.Where(op.Less(size, one), small, part)))
    found = op.Where(op.Greater(size, _hold(1e17)), op.Add(op.Log(size), _hold(math.log(2))), found)
    return op.Where(op.Less(self, _hold(0.0)), op.Neg(found), found)


def _arccosh(self: Any) -> Any:
    one, two = _hold(1.0), _hold(2.0)
    more = op.Sub(self, one)
    found = numerics.log1p(op.Add(more, op.Sqrt(op.Add(op.Mul(two, more), op.Mul(more, more)))))
    return op.Where(op.Greater(self, _hold(1e17)), op.Add(op.Log(self), _hold(math.log(2))), found)


def _arctanh(self: Any) -> Any:
    size, one, two = op.Abs(self), _hold(1.0), _hold(2.0)
    found = op.Mul(_hold(0.5), numerics.log1p(op.Div(op.Mul(two, size), op.Sub(one, size))))
    return op.Where(op.Less(self, _hold(0.0)), op.Neg(found), found)


def _logarithm(base: float, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    return _of_doubles(lambda self: op.Div(op.Log(self), _hold(math.log(base))), otherwise)


def _leaky_relu(self: Any, negative_slope: float = 0.01) -> Any:
    if self.dtype != _DOUBLE:
        return nn.aten_leaky_relu(self, negative_slope)
    return op.Where(op.Greater(self, _hold(0.0)), self, op.Mul(self, _hold(negative_slope)))


def _prelu(self: Any, weight: Any) -> Any:
    if self.dtype != _DOUBLE:
        return core.aten_prelu(self, weight)
    rank = len(self.shape)
    shape = [1, -1, *[1] * (rank - 2)] if rank > 1 else [-1] if rank else []
    weight = op.Reshape(weight, op.Constant(value=ir.tensor(shape, dtype=ir.DataType.INT64)))
    return op.Where(op.Greater(self, _hold(0.0)), self, op.Mul(self, weight))


def _softplus(self: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    if self.dtype != _DOUBLE:
        return nn.aten_softplus(self, beta, threshold)
    scaled = op.Mul(self, _hold(beta))
    is_large = op.Greater(scaled, _hold(threshold))
    found = numerics.log1p(op.Exp(op.Where(is_large, _hold(0.0), scaled)))
    return op.Where(is_large, self, op.Div(found, _hold(beta)))


def _mish(self: Any) -> Any:
    return op.Mul(self, op.Tanh(_softplus(self)))


def _hard_share(self: Any) -> Any:
    """Six times hardsigmoid."""
    return op.Min(op.Max(op.Add(self, _hold(3.0)), _hold(0.0)), _hold(6.0))


def _hardtanh(self: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    if self.dtype != _DOUBLE:
        return nn.aten_hardtanh(self, min_val, max_val)
    return op.Min(op.Max(self, _hold(min_val)), _hold(max_val))


def _matrix_sum(self: Any, first: Any, second: Any, beta: float = 1.0, alpha: float = 1.0) -> Any:
    """addmm: ONNX has its factors in single precision."""
    if self.dtype != _DOUBLE or (beta == 1 and alpha == 1):
        return core.aten_addmm(self, first, second, beta, alpha)
    return op.Add(op.Mul(self, _hold(beta)), op.Mul(op.MatMul(first, second), _hold(alpha)))


def _vector_sum(self: Any, matrix: Any, vector: Any, beta: float = 1.0, alpha: float = 1.0) -> Any:
    if self.dtype != _DOUBLE:
        return core.aten_addmv(self, matrix, vector, beta, alpha)
    return op.Add(op.Mul(self, _hold(beta)), op.Mul(op.MatMul(matrix, vector), _hold(alpha)))


def _batch_sum(self: Any, first: Any, second: Any, beta: float = 1.0, alpha: float = 1.0) -> Any:
    if self.dtype != _DOUBLE:
        return core.aten_addbmm(self, first, second, beta, alpha)
    total = op.ReduceSum(op.MatMul(first, second), op.Constant(value_ints=[0]), keepdims=0)
    return op.Add(op.Mul(self, _hold(beta)), op.Mul(total, _hold(alpha)))


def _add_product(self: Any, tensor1: Any, tensor2: Any, value: float = 1.0) -> Any:
    if self.dtype != _DOUBLE:
        return core.aten_addcmul(self, tensor1, tensor2, value)
    return op.Add(self, op.Mul(op.Mul(_hold(value), tensor1), tensor2))


def _add_quotient(self: Any, tensor1: Any, tensor2: Any, value: float = 1.0) -> Any:
    if self.dtype != _DOUBLE:
        return core.aten_addcdiv(self, tensor1, tensor2, value)
    return op.Add(self, op.Div(op.Mul(_hold(value), tensor1), tensor2))


def _fill(self: Any, value: Any) -> Any:
    return op.Expand(op.CastLike(value, self), op.Shape(self))


def _sinc(self: Any) -> Any:
    """The exporter has pi in single precision, and in half precision where the others are."""
    x = op.Cast(self, to=_DOUBLE)
    zero = op.Equal(x, _hold(0.0))
    angle = op.Mul(_hold(math.pi), op.Where(zero, _hold(1.0), x))
    return op.Cast(op.Where(zero, _hold(1.0), op.Div(op.Sin(angle), angle)), to=self.dtype)


def _arange(
    start: Any, end: Any, step: Any = 1, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False
) -> Any:
    """Each from its number, as torch's: not by adding steps."""
    if dtype not in (_DOUBLE, ir.DataType.FLOAT) or all(isinstance(one, int) for one in (start, end, step)):
        return core.aten_arange_start_step(start, end, step, dtype, layout, device, pin_memory)
    first, last, apart = (op.Cast(one, to=_DOUBLE) for one in (start, end, step))
    count = op.Cast(op.Ceil(op.Div(op.Sub(last, first), apart)), to=ir.DataType.INT64)
    numbers = op.Cast(op.Range(op.Constant(value_int=0), count, op.Constant(value_int=1)), to=_DOUBLE)
    return op.Cast(op.Add(first, op.Mul(apart, numbers)), to=dtype)


def _vector_norm(
    self: Any, ord: float = 2.0, dim: Any = None, keepdim: bool = False, *, dtype: int | None = None
) -> Any:
    kind = -1 if dtype is None else dtype
    if self.dtype != _DOUBLE or float(ord) in (0.0, 1.0, 2.0) or math.isinf(ord) or kind not in (-1, _DOUBLE):
        return linalg.aten_linalg_vector_norm(self, ord, dim, keepdim, kind)
    axes = op.Constant(value_ints=list(range(len(self.shape))) if dim is None else list(dim))
    total = op.ReduceSum(op.Pow(op.Abs(self), _hold(ord)), axes, keepdims=int(keepdim))
    return op.Pow(total, _hold(1 / ord))


TRANSLATIONS: Table = {
    _ATEN.erf.default: _of_doubles(lambda self: _erf_and_rest(self)[0], special.aten_special_erf),
    _ATEN.erfc.default: _of_doubles(lambda self: _erf_and_rest(self)[1], special.aten_special_erfc),
    _ATEN.gelu.default: _gelu,
    _ATEN.atan.default: _of_doubles(_arctan, core.aten_atan),
    _ATEN.asin.default: _of_doubles(_arcsin, core.aten_asin),
    _ATEN.acos.default: _of_doubles(_arccos, core.aten_acos),
    _ATEN.atan2.default: _arctan2,
    _ATEN.tan.default: _of_doubles(lambda self: op.Div(op.Sin(self), op.Cos(self)), core.aten_tan),
    _ATEN.sinh.default: _of_doubles(_sinh, core.aten_sinh),
    _ATEN.cosh.default: _of_doubles(_cosh, core.aten_cosh),
    _ATEN.asinh.default: _of_doubles(_arcsinh, core.aten_asinh),
    _ATEN.acosh.default: _of_doubles(_arccosh, core.aten_acosh),
    _ATEN.atanh.default: _of_doubles(_arctanh, core.aten_atanh),
    _ATEN.log2.default: _logarithm(2.0, core.aten_log2),
    _ATEN.log10.default: _logarithm(10.0, core.aten_log10),
    _ATEN.sinc.default: _sinc,
    _ATEN.arange.start_step: _arange,
    _ATEN.leaky_relu.default: _leaky_relu,
    _ATEN.prelu.default: _prelu,
    _ATEN.softplus.default: _softplus,
    _ATEN.mish.default: _of_doubles(_mish, nn.aten_mish),
    _ATEN.hardsigmoid.default: _of_doubles(lambda self: op.Div(_hard_share(self), _hold(6.0)), nn.aten_hardsigmoid),
    _ATEN.hardswish.default: _of_doubles(
        lambda self: op.Div(op.Mul(self, _hard_share(self)), _hold(6.0)), nn.aten_hardswish
    ),
    _ATEN.hardtanh.default: _hardtanh,
    _ATEN.fill.Scalar: _fill,
    _ATEN.addmm.default: _matrix_sum,
    _ATEN.addmv.default: _vector_sum,
    _ATEN.addbmm.default: _batch_sum,
    _ATEN.addcmul.default: _add_product,
    _ATEN.addcdiv.default: _add_quotient,
    _ATEN.linalg_vector_norm.default: _vector_norm,
}
