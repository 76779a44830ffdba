"""The logarithm of the gamma function, its derivative, and quantiles of the normal distribution, which losses and
distributions are made of: torch.onnx has none of them.

They are computed in double: the logarithm of gamma is zero at 1, at 2 and between negative numbers, where nothing is
left of the digits of single precision. Sources: C. Lanczos, A Precision Approximation of the Gamma Function (1964),
with the coefficients of P. Godfrey for g = 7; Abramowitz and Stegun 6.1.33 and 6.3.18; M. J. Wichura, Algorithm AS 241
(1988).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import ir
from onnxscript.onnx_opset import opset18

_PRIMS = torch.ops.prims
_LANCZOS = (
    0.99999999999980993,
    676.5203681218851,
    -1259.1392167224028,
    771.32342877765313,
    -176.61502916214059,
    12.507343278686905,
    -0.13857109526572012,
    9.9843695780195716e-6,
    1.5056327351493116e-7,
)
_EULER = 0.57721566490153286061
_TERMS = 28
"""Of the series around 1 and 2, each a fourth of the one before."""
_SHIFT = 10
"""What the asymptotic series of the derivative is added at."""
_BERNOULLI = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
_CENTRE = (
    (
        3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
        4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3,
    ),
    (
        1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3, 2.1213794301586595867e4,
        3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3,
    ),
)  # fmt: skip
_NEAR = (
    (
        1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
        1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4,
    ),
    (
        1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1, 1.48103976427480074590e-1,
        1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9,
    ),
)  # fmt: skip
_FAR = (
    (
        6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
        2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7,
    ),
    (
        1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
        7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15,
    ),
)  # fmt: skip
op: Any = opset18


def hold(number: float) -> Any:
    """A constant in double."""
    return op.Constant(value=ir.tensor(number, dtype=ir.DataType.DOUBLE))


def polynomial(x: Any, coefficients: Sequence[float]) -> Any:
    """With the constant first."""
    found = hold(coefficients[-1])
    for one in reversed(coefficients[:-1]):
        found = op.Add(op.Mul(found, x), hold(one))
    return found


def in_double(compute: Callable[..., Any]) -> Callable[..., Any]:
    """`compute` of the values as doubles; of whole numbers torch answers in single precision."""

    def translate(self: Any) -> Any:
        kind = self.dtype if self.dtype.is_floating_point() else ir.DataType.FLOAT
        return op.Cast(compute(op.Cast(self, to=ir.DataType.DOUBLE)), to=kind)

    return translate


def _beyond_whole(x: Any) -> Any:
    """What is left of a number beside the nearest whole one: its sine times pi has the same size."""
    return op.Sub(x, op.Round(x))


def _lgamma(x: Any) -> Any:
    below = op.Less(x, hold(0.5))
    above = op.Where(below, op.Sub(hold(1.0), x), x)
    found = op.Where(op.Less(above, hold(2.5)), _log_gamma_near(above), _log_gamma_far(above))
    sine = op.Abs(op.Sin(op.Mul(_beyond_whole(x), hold(math.pi))))
    reflected = op.Sub(op.Log(op.Div(hold(math.pi), sine)), found)
    found = op.Where(below, reflected, found)
    return op.Where(op.IsInf(x), hold(math.inf), found)


def _log_gamma_near(x: Any) -> Any:
    """From 0.5 to 2.5, by the series around 2; below 1.5 one step from it."""
    low = op.Less(x, hold(1.5))
    z = op.Sub(x, op.Where(low, hold(1.0), hold(2.0)))
    terms = [0.0, 1 - _EULER, *((-1) ** k * (_zeta(k) - 1) / k for k in range(2, _TERMS))]
    found = polynomial(z, terms)
    return op.Where(low, op.Sub(found, op.Log(x)), found)


def _zeta(k: int) -> float:
    return float(torch.special.zeta(torch.tensor(float(k), dtype=torch.float64), torch.tensor(1.0)).item())


def _log_gamma_far(x: Any) -> Any:
    shifted = op.Sub(x, hold(1.0))
    total = hold(_LANCZOS[0])
    for number, one in enumerate(_LANCZOS[1:], 1):
        total = op.Add(total, op.Div(hold(one), op.Add(shifted, hold(float(number)))))
    reach = op.Add(shifted, hold(7.5))
    found = op.Sub(op.Mul(op.Add(shifted, hold(0.5)), op.Log(reach)), reach)
    return op.Add(op.Add(found, op.Log(total)), hold(0.5 * math.log(2 * math.pi)))


def _digamma(x: Any) -> Any:
    """Infinite at zero, by its sign, and NaN at negative whole numbers, as torch's."""
    below = op.Less(x, hold(0.5))
    above = op.Where(below, op.Sub(hold(1.0), x), x)
    far = op.Add(above, hold(float(_SHIFT)))
    square = op.Div(hold(1.0), op.Mul(far, far))
    found = op.Sub(op.Log(far), op.Div(hold(0.5), far))
    found = op.Sub(found, op.Mul(square, polynomial(square, _BERNOULLI)))
    for number in range(_SHIFT):
        found = op.Sub(found, op.Div(hold(1.0), op.Add(above, hold(float(number)))))
    beyond = _beyond_whole(x)
    angle = op.Mul(beyond, hold(math.pi))
    reflected = op.Sub(found, op.Div(op.Mul(hold(math.pi), op.Cos(angle)), op.Sin(angle)))
    pole = op.Where(op.Equal(x, hold(0.0)), op.Div(hold(-1.0), x), hold(math.nan))
    reflected = op.Where(op.Equal(beyond, hold(0.0)), pole, reflected)
    return op.Where(below, reflected, found)


def _erfinv(y: Any) -> Any:
    tail = op.Div(op.Sub(hold(1.0), op.Abs(y)), hold(2.0))
    return op.Div(_quantile(op.Div(y, hold(2.0)), tail), hold(math.sqrt(2)))


def _ndtri(p: Any) -> Any:
    return _quantile(op.Sub(p, hold(0.5)), op.Min(p, op.Sub(hold(1.0), p)))


def _quantile(from_half: Any, tail: Any) -> Any:
    """Of the normal distribution, by a probability less one half, and the smaller of it and what is left of one."""
    small = op.Sub(hold(0.180625), op.Mul(from_half, from_half))
    centre = op.Mul(from_half, _ratio(small, _CENTRE))
    root = op.Sqrt(op.Neg(op.Log(tail)))
    near, far = _ratio(op.Sub(root, hold(1.6)), _NEAR), _ratio(op.Sub(root, hold(5.0)), _FAR)
    outer = op.Where(op.LessOrEqual(root, hold(5.0)), near, far)
    outer = op.Where(op.Equal(tail, hold(0.0)), hold(math.inf), outer)
    outer = op.Where(op.Less(from_half, hold(0.0)), op.Neg(outer), outer)
    return op.Where(op.LessOrEqual(op.Abs(from_half), hold(0.425)), centre, outer)


def _ratio(x: Any, parts: Sequence[Sequence[float]]) -> Any:
    above, below = (polynomial(x, one) for one in parts)
    return op.Div(above, below)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _PRIMS.lgamma.default: in_double(_lgamma),
    _PRIMS.digamma.default: in_double(_digamma),
    _PRIMS.erf_inv.default: in_double(_erfinv),
    _PRIMS.ndtri.default: in_double(_ndtri),
}
"""Operator of an exported program -> what writes it in ONNX."""
