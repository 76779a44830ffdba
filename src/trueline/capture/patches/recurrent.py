"""LSTM, GRU and RNN layers stay one operator of an exported program.

torch.export runs their decomposition, a Python loop over the steps, to learn the shapes of their outputs, and the
length becomes a constant. Here the shapes follow from those of the inputs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch._subclasses.fake_impls import register_fast_op_impl
from torch._subclasses.fake_tensor import is_fake

from trueline.capture.patches import Patch

PATCH = Patch(issue="pytorch/pytorch#115092", versions="torch 2.13", cost="under 0.1 ms", helps=("bilstm", "char_gru"))

_ATEN = torch.ops.aten
LAYERS = (_ATEN.lstm.input, _ATEN.gru.input, _ATEN.rnn_tanh.input, _ATEN.rnn_relu.input)
_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
"""Where torch.export finds the decompositions while it traces."""


@contextmanager
def keep_layers_whole() -> Iterator[None]:
    """In the block, recurrent layers are traced as one operator."""
    for layer in LAYERS:  # for good: an exported program that is traced again keeps the layer whole
        register_fast_op_impl(layer)(_shapes_in)  # used before the decomposition where sizes are symbols
    originals = {layer: dict(layer.py_kernels) for layer in LAYERS}
    try:
        for layer in LAYERS:
            layer.py_kernels |= {key: _whole(layer.py_kernels[key]) for key in _KEYS if key in layer.py_kernels}
            layer._dispatch_cache.clear()
        yield
    finally:
        for layer, kernels in originals.items():
            layer.py_kernels.clear()
            layer.py_kernels.update(kernels)
            layer._dispatch_cache.clear()


def _whole(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    return lambda input, *rest: (_shapes if is_fake(input) else decomposition)(input, *rest)


def _shapes_in(mode: Any, *args: Any) -> Any:
    with mode:
        return _shapes(*args)


def _shapes(input: torch.Tensor, hx: torch.Tensor | Sequence[torch.Tensor], *rest: Any) -> tuple[torch.Tensor, ...]:
    """Empty tensors of the layer's output shapes. With the batch first, its steps are a transposed view, as the layer
    returns them: a `reshape` that follows has to copy."""
    *_, bidirectional, batch_first = rest
    states = (hx,) if isinstance(hx, torch.Tensor) else tuple(hx)
    width = states[0].shape[2] * (2 if bidirectional else 1)
    left = tuple(torch.empty_like(state, memory_format=torch.contiguous_format) for state in states)
    if not batch_first:
        return (input.new_empty((*input.shape[:2], width)), *left)
    return (input.new_empty((input.shape[1], input.shape[0], width)).transpose(0, 1), *left)
