"""Images in another size, by torch's own coordinates.

ONNX Runtime rounds the coordinate of a new element in single precision, and otherwise than torch does: of 1,000 rows in
9, cubic, by 6e-5 of a row. Each digit that a length takes is one less for the place between two elements, so that no
probe at small sizes shows it. So where the size of an image is free, coordinates and weights are torch's to the last
bit; linear ones where the new size is a number of the code. Each is where a factor is no power of two: ONNX's factor is
in single precision (0.58 times 50 is 29 there, and 28 in torch), and of sequences the exporter divides sizes in its
place. Images of doubles have no other way to run. Source: torch's ATen/native/cpu/UpSampleKernel.cpp
(`HelperInterpCubic`, `HelperInterpLinear`) and UpSample.h.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from onnxscript import ir
from onnxscript.function_libs.torch_lib.ops import nn
from onnxscript.onnx_opset import opset18

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="onnxscript 0.7.2, onnxruntime 1.31",
    cost="some fifty operators for each axis, in place of one",
    helps=("a bicubic resize of 1,000 rows to 9", "a bilinear one"),
)
_ATEN = torch.ops.aten
_WHOLE, _DOUBLE = ir.DataType.INT64, ir.DataType.DOUBLE
op: Any = opset18

SHARPNESS = -0.75
"""The factor of torch's cubic convolution."""


def _hold(number: float, kind: ir.DataType) -> Any:
    return op.Constant(value=ir.tensor(number, dtype=kind))


def _resize(write_axis: Callable[..., Any], otherwise: Callable[..., Any], *, is_linear: bool) -> Callable[..., Any]:
    """Linear images: where the new size is computed from the old one, they are written as by the exporter, too."""

    def translate_resize(
        input: Any, output_size: Any = None, align_corners: bool = False, scale_factors: Sequence[float] | None = None
    ) -> Any:
        """One dimension after the other, the last one first; half precision in single precision, as torch's."""
        rank, is_double = len(input.shape), input.dtype == _DOUBLE
        is_free = not all(isinstance(size, int) for size in input.shape[2:])
        is_fixed = isinstance(output_size, list | tuple) and all(isinstance(size, int) for size in output_size)
        is_exact = scale_factors is None or all(math.log2(factor).is_integer() for factor in scale_factors)
        if not is_double and is_exact and (not is_free or (is_linear and rank > 3 and not is_fixed)):
            return otherwise(input, output_size, align_corners, scale_factors)
        kind = _DOUBLE if is_double else ir.DataType.FLOAT
        found, zero, one = op.Cast(input, to=kind), op.Constant(value_int=0), op.Constant(value_int=1)
        for at in reversed(range(rank - 2)):
            old = op.Gather(op.Shape(input), op.Constant(value_int=at + 2))
            factor = None if scale_factors is None else scale_factors[at]
            if factor is None:
                new = op.Gather(op.Cast(output_size, to=_WHOLE), op.Constant(value_int=at))
            else:
                new = op.Cast(op.Floor(op.Mul(op.Cast(old, to=_DOUBLE), _hold(factor, _DOUBLE))), to=_WHOLE)
            step = _step(old, new, factor, align_corners, kind)
            if is_linear:  # torch copies an axis that keeps its size, whatever the factor
                step = op.Where(op.Equal(old, new), _hold(1.0, kind), step)
            places = _places(step, op.Cast(op.Range(zero, new, one), to=_DOUBLE), align_corners, kind)
            shape = op.Constant(value_ints=[-1 if axis == at + 2 else 1 for axis in range(rank)])
            parts = [
                op.Mul(op.Gather(found, index, axis=at + 2), op.Reshape(weight, shape))
                for index, weight in write_axis(places, op.Sub(old, one), kind)
            ]
            found = parts[0]
            for part in parts[1:]:
                found = op.Add(found, part)
        return op.Cast(found, to=input.dtype)

    return translate_resize


def _step(old: Any, new: Any, factor: float | None, align_corners: bool, kind: ir.DataType) -> Any:
    """Old elements for each new one."""
    one = op.Constant(value_int=1)
    if align_corners:
        below = op.Max(op.Sub(new, one), one)
        apart = op.Div(op.Cast(op.Sub(old, one), to=kind), op.Cast(below, to=kind))
        return op.Where(op.Greater(new, one), apart, _hold(0.0, kind))
    if factor is not None:
        return _hold(1.0 / factor, kind)
    return op.Div(op.Cast(old, to=kind), op.Cast(new, to=kind))


def _places(step: Any, numbers: Any, align_corners: bool, kind: ir.DataType) -> Any:
    """Where new elements lie among the old: of one rounding, as the processor's multiplication with addition has."""
    step = op.Cast(step, to=_DOUBLE)
    half = _hold(0.5, _DOUBLE)
    exact = op.Mul(step, numbers) if align_corners else op.Sub(op.Mul(step, op.Add(numbers, half)), half)
    return op.Cast(exact, to=kind)


def _between(places: Any, last: Any, kind: ir.DataType) -> tuple[Any, Any, Any]:
    """The old element before each new one; how far the new one is after it, and before the next one."""
    one = _hold(1.0, kind)
    first = op.Min(op.Cast(op.Floor(places), to=_WHOLE), last)
    after = op.Min(op.Max(op.Sub(places, op.Cast(first, to=kind)), _hold(0.0, kind)), one)
    return first, after, op.Sub(one, after)


def _list_cubic(places: Any, last: Any, kind: ir.DataType) -> Iterator[tuple[Any, Any]]:
    """Indices and weights of the four elements of each."""
    first, after, before = _between(places, last, kind)
    one, zero = _hold(1.0, kind), op.Constant(value_int=0)
    inner, outer = (_cubic_part(kind, inner=inner) for inner in (True, False))
    weights = outer(op.Add(after, one)), inner(after), inner(before), outer(op.Add(before, one))
    for at, weight in enumerate(weights):
        yield op.Max(op.Min(op.Add(first, op.Constant(value_int=at - 1)), last), zero), weight


def _list_linear(places: Any, last: Any, kind: ir.DataType) -> Iterator[tuple[Any, Any]]:
    """Indices and weights of the two elements of each."""
    first, after, before = _between(op.Max(places, _hold(0.0, kind)), last, kind)
    yield first, before
    yield op.Min(op.Add(first, op.Constant(value_int=1)), last), after


def _cubic_part(kind: ir.DataType, *, inner: bool) -> Callable[[Any], Any]:
    """The polynomial of a cubic convolution up to a distance of 1, or from 1 to 2."""

    def weigh(x: Any) -> Any:
        if inner:
            found = op.Sub(op.Mul(_hold(SHARPNESS + 2, kind), x), _hold(SHARPNESS + 3, kind))
            return op.Add(op.Mul(op.Mul(found, x), x), _hold(1.0, kind))
        found = op.Sub(op.Mul(_hold(SHARPNESS, kind), x), _hold(5 * SHARPNESS, kind))
        found = op.Add(op.Mul(found, x), _hold(8 * SHARPNESS, kind))
        return op.Sub(op.Mul(found, x), _hold(4 * SHARPNESS, kind))

    return weigh


def _resize_sequence(input: Any, output_size: Any, align_corners: bool, scale_factors: Sequence[float] | None) -> Any:
    """As the exporter writes an image."""
    how = "linear", nn._get_upsample_align_corners_mode(align_corners)
    if scale_factors is not None:
        return nn._aten_upsample_scales(input, scale_factors, *how)
    return nn._aten_upsample_output_size(input, output_size, *how)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _ATEN.upsample_bicubic2d.vec: _resize(_list_cubic, nn.aten_upsample_bicubic2d_vec, is_linear=False),
    _ATEN.upsample_bilinear2d.vec: _resize(_list_linear, nn.aten_upsample_bilinear2d_vec, is_linear=True),
    _ATEN.upsample_linear1d.vec: _resize(_list_linear, _resize_sequence, is_linear=True),
    _ATEN.upsample_trilinear3d.vec: _resize(_list_linear, nn.aten_upsample_trilinear3d_vec, is_linear=True),
}
