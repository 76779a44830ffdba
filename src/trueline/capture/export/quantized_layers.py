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
from torch._higher_order_ops import scan
from torch.ao.nn.intrinsic.quantized.dynamic import LinearReLU
from torch.ao.nn.quantized.dynamic import GRU, LSTM, Linear

from trueline.errors import CaptureError, join_names

_REDUCED_SINCE = 4
"""Version of the layer from which its input takes 7 bits, so that sums of two products fit 16."""
_STEPS = 127.0
_MOST = 255.0
"""A number on the border of the range may be rounded beyond 7 bits."""
_LEAST_STEP = float(torch.tensor(6.1e-5))
"""A smaller scale becomes this one, and the range is stretched to it."""
_FLAT = 0.1
"""Scale of an input that is 0 everywhere, or as near to it as makes no step."""


class UnpackedLinear(nn.Module):
    """A linear layer on steps: float32 in and out, of shape (..., inputs) and (..., outputs)."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor
    zero: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, *, steps: float, rectified: bool = False) -> None:
        """`steps`: between the least and the largest number of an input."""
        super().__init__()
        self.rectified, self.steps, self.whole = rectified, steps, weight.is_quantized
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
        if self.whole:
            found = self._multiply(x)
        else:
            found = x @ self.weight.float().mT
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
        # the kernel multiplies and adds in one instruction, which rounds once, here and below
        moved = (x.double() * (1.0 / step).double() + zero).float()
        whole = moved.round().clamp(0.0, _MOST) - zero.float()
        found = (whole @ (self.weight.float() - self.zero).mT).double() * (step * self.scale).double()
        return (found if self.bias is None else found + self.bias.double()).float()


class UnpackedRecurrent(nn.Module):
    """A `torch.ao.nn.quantized.dynamic.LSTM` or `GRU`, called as torch.nn's, with tensors. As in torch's kernel, the
    inputs of a whole sequence become steps together, and the hidden values of each place by themselves."""

    def __init__(self, packed: Any) -> None:
        super().__init__()
        self.keeps_cells = isinstance(packed, LSTM)
        self.layers, self.size, self.batch_first = packed.num_layers, packed.hidden_size, packed.batch_first
        self.directions = 2 if packed.bidirectional else 1
        self.inputs, self.hidden = nn.ModuleList(), nn.ModuleList()
        for one in packed._all_weight_values:
            _, _, _, reduced, weights = one.param.__getstate__()[0]
            steps = _STEPS if reduced and reduced[0] else _MOST
            for into, part in zip((self.inputs, self.hidden), weights, strict=True):
                into.append(UnpackedLinear(*part.unpack(), steps=steps))

    def forward(self, x: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        x = x.transpose(0, 1) if self.batch_first else x
        zeros = x.new_zeros(self.layers * self.directions, x.shape[1], self.size)
        first = (hx if self.keeps_cells else (hx,)) if hx is not None else (zeros,) * (2 if self.keeps_cells else 1)
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(self.layers):
            found = []
            for direction in range(self.directions):
                at = layer * self.directions + direction
                given = self.inputs[at](x)
                given = given.flip(0) if direction else given
                end, answers = self._run(at, given, tuple(one[at] for one in first))
                ends.append(end)
                found.append(answers.flip(0) if direction else answers)
            x = torch.cat(found, -1) if len(found) > 1 else found[0]
        last = tuple(torch.stack(one) for one in zip(*ends, strict=True))
        return x.transpose(0, 1) if self.batch_first else x, last if self.keeps_cells else last[0]

    def _run(self, at: int, given: Tensor, first: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        def step(carried: tuple[Tensor, ...], one: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
            advance = self._step_lstm if self.keeps_cells else self._step_gru
            after = advance(self.hidden[at](carried[0]), one, *carried)
            return tuple(value.clone() for value in after), after[0].clone()

        if torch.compiler.is_exporting():
            end, answers = scan(step, tuple(one.clone() for one in first), given)
            return tuple(end), answers
        found = []
        for one in given:
            first, answer = step(first, one)
            found.append(answer)
        return first, torch.stack(found)

    @staticmethod
    def _step_lstm(own: Tensor, given: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        enters, stays, new, leaves = (own + given).chunk(4, 1)
        cell = stays.sigmoid() * cell + enters.sigmoid() * new.tanh()
        return leaves.sigmoid() * cell.tanh(), cell

    @staticmethod
    def _step_gru(own: Tensor, given: Tensor, hidden: Tensor) -> tuple[Tensor]:
        resets, updates, _ = (own + given).chunk(3, 1)  # as in the kernel: a part of a tensor is rounded otherwise
        new = (given.chunk(3, 1)[2] + resets.sigmoid() * own.chunk(3, 1)[2]).tanh()
        return ((hidden - new) * updates.sigmoid() + new,)


def unpack_layer(layer: nn.Module) -> nn.Module:
    """The same layer in plain operators."""
    if isinstance(layer, LSTM | GRU):
        return UnpackedRecurrent(layer)
    packed: Any = layer
    steps = _STEPS if (packed.version or 0) >= _REDUCED_SINCE else _MOST
    return UnpackedLinear(*packed._weight_bias(), steps=steps, rectified=isinstance(layer, LinearReLU))


@contextmanager
def unpack(module: nn.Module) -> Iterator[str]:
    """In the block, such layers of `module` are unpacked ones. Yields why only torch's kernels round as they do: what a
    recurrent one carries is rounded to steps at each place, and a last digit beside torch's makes another step."""
    held = [
        (parent, name, layer)
        for parent in module.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, Linear | LSTM | GRU)
    ]
    unpacked = {id(layer): unpack_layer(layer).eval() for _, _, layer in held}
    for parent, name, _ in held:
        parent._modules[name] = unpacked[id(parent._modules[name])]
    recurrent = [*dict.fromkeys(name for _, name, layer in held if isinstance(layer, LSTM | GRU))]
    why = f"what {join_names(recurrent)} carries is rounded to steps at each place, as only torch's kernels do"
    try:
        yield why if recurrent else ""
    finally:
        for parent, name, layer in held:
            parent._modules[name] = layer


def refuse_packed(error: Exception, flat: torch.nn.Module) -> None:
    """Raises CaptureError if torch's `error` is of the packed weights of a quantized layer."""
    if "__obj_flatten__" not in str(error):
        return
    layers = [
        f"{name.removeprefix('module.')} ({type(part).__name__})"
        for name, part in flat.named_modules()
        if any(isinstance(one, torch.ScriptObject) for one in vars(part).values())
    ]
    raise CaptureError(
        f"weights of quantized layers are packed for this machine, and no format can hold them: {join_names(layers)}",
        hint="capture the model as it is before it is quantized, and quantize the bundle: trueline compress BUNDLE",
    ) from error
