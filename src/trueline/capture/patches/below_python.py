"""A model that differentiates inside its own `forward`, or holds parts that are TorchScript: traced beneath Python.

torch.export follows the calls of Python and stumbles over both. Beneath it only operators are seen: those of the
backward pass too, and those that TorchScript's interpreter calls. What was seen is a graph of them, which torch.export
then follows. Source: torch.fx.experimental.proxy_tensor.make_fx, symbolic mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from trueline.capture.model.dynamic_dims import resize_tensor
from trueline.capture.model.signature import Calling
from trueline.capture.patches import Patch

PATCH = Patch(
    issue="https://github.com/pytorch/pytorch/issues/125984",
    versions="torch 2.13",
    cost="a second export, after the first one failed",
    helps=("force fields", "models with torch.jit parts"),
)

_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


def may_help(module: torch.nn.Module, said: str) -> bool:
    """Whether torch.export failed, with the message `said`, over something of that kind."""
    scripted = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
    words = ("fake tensor in the exported program constant", "has no attribute 'constant'", "requires_grad", "autograd")
    return scripted or any(word in said for word in words)


def graph(flat: torch.nn.Module, calling: Calling) -> torch.nn.Module:
    """`flat` as a module of the operators that it calls, its free sizes symbols. Raises what torch raises."""
    sizes = _unlike(calling)
    example = [
        resize_tensor(tensor, {axis: sizes[size] for axis, size in enumerate(spec.shape) if isinstance(size, str)})
        for tensor, spec in zip(calling.example, calling.presumed.inputs, strict=True)
    ]
    return Operators(make_fx(flat, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example))


class Operators(torch.nn.Module):
    """A graph of operators with flat tensors in and out."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__()
        self.operators = graph

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.operators(*tensors))


def _unlike(calling: Calling) -> Mapping[str, int]:
    """A size for each symbol that no other size of the inputs has: torch takes equal ones for one."""
    shapes: Sequence[Sequence[int | str]] = [spec.shape for spec in calling.presumed.inputs]
    symbols = dict.fromkeys(size for shape in shapes for size in shape if isinstance(size, str))
    taken = {size for shape in shapes for size in shape if isinstance(size, int)}
    free = iter([prime for prime in _PRIMES if prime not in taken])
    return {symbol: next(free) for symbol in symbols}
