"""Fake-quantized values (quantization-aware training) as torch's exporter can follow them, and as every runtime rounds
them.

torch has no rule for the sizes of `fake_quantize_per_tensor_affine`, so a free batch was a constant and a model ran one
record after the other; and ONNX's QuantizeLinear divides by the scale where torch multiplies by its inverse, so that
a value between two steps went to the other one. Source: torch's aten/src/ATen/native/quantized/cpu/kernels
(`fake_quantize_tensor_cachemask_kernel`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13, onnxscript 0.7.2",
    cost="under 0.1 ms; six operators in place of one",
    helps=("fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"),
)


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
    single = scale.float() if isinstance(scale, torch.Tensor) else np.float32(scale)
    inverse: Any = 1.0 / single if isinstance(single, torch.Tensor) else float(np.float32(1.0) / single)
    steps = torch.round(value * inverse) + zero_point
    inside = torch.where(steps > least, steps, float(least)).clamp(max=most)
    found: torch.Tensor = (inside - zero_point) * (single if isinstance(single, torch.Tensor) else float(single))
    return found
