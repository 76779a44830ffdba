"""Layers of `torch.ao.quantization.quantize_dynamic` as plain operators, which every exporter can follow.

Such a layer packs its weights for the kernels of one machine, and no format can hold them. Its arithmetic needs no
kernel of its own: the input becomes steps between its least and its largest number, the products of whole numbers are
added exactly, and the sum is scaled once. Source: `ChooseQuantizationParams` in torch's QuantUtils.h, to the last
digit: with a zero point beside it, all answers are others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn.intrinsic.quantized.dynamic import LinearReLU
from torch.ao.nn.quantized.dynamic import Linear

_REDUCED_SINCE = 4
"""Version of the layer from which its input takes 7 bits, so that sums of two products fit 16."""
_MOST = 255.0
"""A number on the border of the range may be rounded beyond 7 bits."""
_LEAST_STEP = float(torch.tensor(6.1e-5))
"""A smaller scale becomes this one, and the range is stretched to it."""
_FLAT = 0.1
"""Scale of an input that is 0 everywhere, or as near to it as makes no step."""


class UnpackedLinear(nn.Module):
    """A `torch.ao.nn.quantized.dynamic.Linear`: float32 in and out, of shape (..., inputs) and (..., outputs)."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor
    zero: Tensor

    def __init__(self, packed: Any) -> None:
        super().__init__()
        weight, bias = packed._weight_bias()
        self.rectified = isinstance(packed, LinearReLU)
        self.steps = 127.0 if (packed.version or 0) >= _REDUCED_SINCE else 255.0
        self.whole = weight.is_quantized
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        if not self.whole:  # of dtype float16, and computed in float32
            self.register_buffer("weight", weight.detach().to(torch.float16))
            return
        per_channel = weight.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric)
        scale = weight.q_per_channel_scales() if per_channel else torch.tensor(weight.q_scale())
        zero = weight.q_per_channel_zero_points() if per_channel else torch.tensor(weight.q_zero_point())
        self.register_buffer("weight", weight.int_repr())
        self.register_buffer("scale", scale.float())
        self.register_buffer("zero", zero.float().reshape(-1, 1))

    def forward(self, x: Tensor) -> Tensor:
        found = self._multiply(x) if self.whole else x @ self.weight.float().mT
        found = found if self.bias is None else found + self.bias
        return found.relu() if self.rectified else found

    def _multiply(self, x: Tensor) -> Tensor:
        low, high = x.min().clamp(max=0.0), x.max().clamp(min=0.0)
        scale = (high.double() - low.double()) / self.steps
        scale = torch.where(torch.isinf(1.0 / scale.float()), _FLAT, scale)
        small = scale < _LEAST_STEP
        stretch = torch.where(small, _LEAST_STEP / scale.float(), 1.0)
        wide = torch.full_like(low, _LEAST_STEP * self.steps)
        low, high = (
            torch.where(small & (high == 0), -wide, low * stretch),
            torch.where(small & (low == 0), wide, high * stretch),
        )
        scale = torch.where(small, _LEAST_STEP, scale)
        below, above = -low / scale, high / scale
        zero = torch.where(-below < self.steps - above, below, self.steps - above).clamp(0.0, self.steps).round()
        step = scale.float()
        # the kernel multiplies and adds in one instruction, which rounds once
        moved = (x.double() * (1.0 / step).double() + zero).float()
        whole = moved.round().clamp(0.0, _MOST) - zero.float()
        return (whole @ (self.weight.float() - self.zero).mT) * (step * self.scale)


@contextmanager
def unpack(module: nn.Module) -> Iterator[None]:
    """In the block, such layers of `module` are `UnpackedLinear`."""
    held = [
        (parent, name, layer)
        for parent in module.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, Linear)
    ]
    unpacked = {id(layer): UnpackedLinear(layer).eval() for _, _, layer in held}
    for parent, name, layer in held:
        parent._modules[name] = unpacked[id(layer)]
    try:
        yield
    finally:
        for parent, name, layer in held:
            parent._modules[name] = layer
