"""A model that differentiates inside `forward`, or holds TorchScript, is traced as the operators that it calls.

torch.export follows Python and fails on both; make_fx records the operators, those of the backward pass and of
TorchScript's interpreter included, in a graph that torch.export then follows.
"""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from trueline.capture.model.dynamic_dims import resize_tensor
from trueline.capture.model.signature import Calling
from trueline.capture.patches import Patch, keep_weights

PATCH = Patch(
    issue="pytorch/pytorch#125984",
    versions="torch 2.13",
    cost="a second export",
    helps=("force fields", "models with torch.jit parts"),
)

_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


def may_help(module: torch.nn.Module, message: str) -> bool:
    """Whether torch.export failed with such a `message`, or `module` holds TorchScript."""
    scripted = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
    words = ("fake tensor in the exported program constant", "has no attribute 'constant'", "requires_grad", "autograd")
    return scripted or any(word in message for word in words)


def trace_operators(flat: torch.nn.Module, calling: Calling) -> torch.nn.Module:
    """A module of the operators that `flat` calls, with symbols for its free sizes. Raises what torch raises."""
    specs = calling.presumed.inputs
    fixed = {size for spec in specs for size in spec.shape if isinstance(size, int)}
    unlike = iter([prime for prime in _PRIMES if prime not in fixed])  # torch takes equal sizes for one symbol
    sizes = {
        symbol: next(unlike) for symbol in dict.fromkeys(s for spec in specs for s in spec.shape if isinstance(s, str))
    }
    example = [
        resize_tensor(tensor, {axis: sizes[size] for axis, size in enumerate(spec.shape) if isinstance(size, str)})
        for tensor, spec in zip(calling.example, specs, strict=True)
    ]
    with keep_weights(flat):
        return _Operators(make_fx(flat, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example))


class _Operators(torch.nn.Module):
    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__()
        self.operators = graph

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.operators(*tensors))
