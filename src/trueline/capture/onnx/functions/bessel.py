"""Modified Bessel functions of the first kind, of orders 0 and 1, as von Mises distributions and Kaiser windows have.

Each is a polynomial in the number up to 8, and beyond it one in its inverse over its square root, after Cephes (`i0.c`,
`i1.c`); the coefficients are those that meet torch's own function in double.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.polynomial import chebyshev
from onnxscript import ir
from onnxscript.onnx_opset import opset18

from trueline.capture.onnx.functions.gamma import hold, polynomial

_PRIMS = torch.ops.prims
_BORDER = 8.0
_DEGREES = (32, 26)
op: Any = opset18


@lru_cache(maxsize=2)
def _find_coefficients(order: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of a polynomial in x / 4 - 1 up to the border, and of one in 16 / x - 1 beyond it."""
    scaled = torch.special.i1e if order else torch.special.i0e

    def near(t: Any) -> Any:
        x = torch.from_numpy(np.asarray(_BORDER / 2 * (t + 1)))
        return (scaled(x) / x if order else scaled(x)).numpy()

    def far(t: Any) -> Any:
        x = torch.from_numpy(np.asarray(2 * _BORDER / (t + 1)))
        return (scaled(x) * x.sqrt()).numpy()

    found = (
        chebyshev.cheb2poly(chebyshev.chebinterpolate(function, degree))
        for function, degree in zip((near, far), _DEGREES, strict=True)
    )
    first, second = (tuple(map(float, one)) for one in found)
    return first, second


def _bessel(order: int, *, scaled: bool) -> Callable[..., Any]:
    def translate(self: Any) -> Any:
        kind = self.dtype if self.dtype.is_floating_point() else ir.DataType.FLOAT
        given = op.Cast(self, to=kind)
        x = op.Cast(given, to=ir.DataType.DOUBLE)
        size = op.Abs(x)
        low, high = _find_coefficients(order)
        inside = op.Min(size, hold(_BORDER))
        near = polynomial(op.Sub(op.Div(inside, hold(_BORDER / 2)), hold(1.0)), low)
        if order:
            near = op.Mul(near, inside)
        outside = op.Max(size, hold(_BORDER))
        far = op.Div(polynomial(op.Sub(op.Div(hold(2 * _BORDER), outside), hold(1.0)), high), op.Sqrt(outside))
        found = op.Where(op.LessOrEqual(size, hold(_BORDER)), near, far)
        if order:
            found = op.Where(op.Less(x, hold(0.0)), op.Neg(found), found)
        if not scaled:  # infinite where torch's factor is, in the dtype of the values
            found = op.Mul(found, op.Cast(op.Exp(op.Abs(given)), to=ir.DataType.DOUBLE))
        return op.Cast(found, to=kind)

    return translate


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _PRIMS.bessel_i0.default: _bessel(0, scaled=False),
    _PRIMS.bessel_i0e.default: _bessel(0, scaled=True),
    _PRIMS.bessel_i1.default: _bessel(1, scaled=False),
    _PRIMS.bessel_i1e.default: _bessel(1, scaled=True),
}
"""Operator of an exported program -> what writes it in ONNX."""
