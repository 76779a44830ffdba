"""Fake-quantized values (quantization-aware training) as torch's exporter can follow them, and as every runtime rounds
them.

torch has no rule for the sizes of `fake_quantize_per_tensor_affine`, so a free batch was a constant and a model ran one
record after the other; and ONNX's QuantizeLinear divides by the scale where torch multiplies by its inverse, so that
a value between two steps went to the other one. Values that are quantized and at once dequantized by the model have no
rule either, and are computed the same way. Source: torch's aten/src/ATen/native/quantized/cpu/kernels
(`fake_quantize_tensor_cachemask_kernel`), fbgemm's QuantUtils.h (`Quantize`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13, onnxscript 0.7.2",
    cost="under 0.1 ms; six operators in place of one",
    helps=("fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"),
)


_LIMITS = {torch.qint8: (-128, 127, torch.int8), torch.quint8: (0, 255, torch.uint8)}
"""The least and the largest step of a dtype, and the whole numbers that hold them."""


@contextmanager
def keep_steps() -> Iterator[None]:
    """In the block, torch fake-quantizes float32 by its formula, in plain operators."""
    per_tensor, per_channel = torch.fake_quantize_per_tensor_affine, torch.fake_quantize_per_channel_affine

    def quantize(
        input: torch.Tensor, scale: Any, zero_point: Any, quant_min: int, quant_max: int, *rest: Any
    ) -> torch.Tensor:
        if input.dtype != torch.float32:
            return per_tensor(input, scale, zero_point, quant_min, quant_max, *rest)
        return _quantize(input, scale, zero_point, quant_min, quant_max)

    def quantize_channels(
        input: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, axis: int, quant_min: int, quant_max: int
    ) -> torch.Tensor:
        if input.dtype != torch.float32:
            return per_channel(input, scale, zero_point, axis, quant_min, quant_max)
        shape = [-1 if at == axis % input.ndim else 1 for at in range(input.ndim)]
        return _quantize(input, scale.reshape(shape), zero_point.reshape(shape), quant_min, quant_max)

    torch.fake_quantize_per_tensor_affine = quantize
    torch.fake_quantize_per_channel_affine = quantize_channels
    try:
        yield
    finally:
        torch.fake_quantize_per_tensor_affine, torch.fake_quantize_per_channel_affine = per_tensor, per_channel


def _quantize(value: torch.Tensor, scale: Any, zero_point: Any, least: int, most: int) -> torch.Tensor:
    """As the kernel does: NaN becomes the least step."""
    single, inverse = _invert(scale)
    inside = _keep_between(torch.round(value * inverse) + zero_point, least, most)
    found: torch.Tensor = (inside - zero_point) * single
    return found


def _invert(scale: Any) -> tuple[Any, Any]:
    """`scale` in single precision, and its inverse."""
    if isinstance(scale, torch.Tensor):
        return scale.float(), 1.0 / scale.float()
    return float(np.float32(scale)), float(np.float32(1.0) / np.float32(scale))


def _keep_between(steps: torch.Tensor, least: int, most: int) -> torch.Tensor:
    return torch.where(steps > least, steps, float(least)).clamp(max=most)


@final
class _Steps:
    """Stands for a quantized tensor in a trace. It has these two methods alone: other operators fail on it."""

    def __init__(self, steps: torch.Tensor, scale: Any, zero_point: Any, dtype: torch.dtype) -> None:
        least, most, self._kind = _LIMITS[dtype]
        self._scale, self._zero_point = scale, zero_point
        self._inside = _keep_between(torch.round(steps), least, most)

    def dequantize(self) -> torch.Tensor:
        found: torch.Tensor = (self._inside - self._zero_point) * self._scale
        return found

    def int_repr(self) -> torch.Tensor:
        return self._inside.to(self._kind)


def may_help(message: str) -> bool:
    """Whether torch.export failed with `message` on a model that quantizes values itself."""
    return any(f"aten.{name}" in message for name in ("dequantize", "int_repr", "quantize_per"))


@contextmanager
def keep_values() -> Iterator[None]:
    """In the block, torch quantizes float32 to 8 bits by its formula, for a model that takes the values back."""
    per_tensor, per_channel, dequantize = torch.quantize_per_tensor, torch.quantize_per_channel, torch.dequantize

    def quantize(input: torch.Tensor, scale: Any, zero_point: Any, dtype: torch.dtype) -> Any:
        if input.dtype != torch.float32 or dtype not in _LIMITS:
            return per_tensor(input, scale, zero_point, dtype)
        single, inverse = _invert(scale)
        steps = (input.double() * inverse + zero_point).float()  # a fused multiply-add: rounded once
        return _Steps(steps, single, zero_point, dtype)

    def quantize_channels(
        input: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, axis: int, dtype: torch.dtype
    ) -> Any:
        if input.dtype != torch.float32 or dtype not in _LIMITS:
            return per_channel(input, scales, zero_points, axis, dtype)
        shape = [-1 if at == axis % input.ndim else 1 for at in range(input.ndim)]
        single, inverse = _invert(scales.reshape(shape))
        zeros = zero_points.reshape(shape)
        return _Steps(input * inverse + zeros, single, zeros, dtype)

    torch.quantize_per_tensor, torch.quantize_per_channel = quantize, quantize_channels  # type: ignore[assignment]
    torch.dequantize = lambda of: of.dequantize() if isinstance(of, _Steps) else dequantize(of)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.quantize_per_tensor, torch.quantize_per_channel = per_tensor, per_channel
        torch.dequantize = dequantize
