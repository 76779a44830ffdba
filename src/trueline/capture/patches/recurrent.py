"""Layers of torch that loop over time (LSTM, GRU, RNN) stay one operator of an exported program.

torch.export keeps them as one, but to learn the shapes of their answers it runs their decomposition, a Python loop over
the steps, and the length becomes a constant. The shapes follow from those of the inputs: they are said here. Source:
torch.nn.LSTM's documentation ("Outputs").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch._subclasses.fake_impls import register_fast_op_impl
from torch._subclasses.fake_tensor import is_fake

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="https://github.com/pytorch/pytorch/issues/115092",
    versions="torch 2.13",
    cost="under 0.1 ms",
    helps=("bilstm", "char_gru", "elman_rnn", "crnn", "last_step", "pooled_lstm", "seq2seq", "deepar", "tagger"),
)

_ATEN = torch.ops.aten
LAYERS = (_ATEN.lstm.input, _ATEN.gru.input, _ATEN.rnn_tanh.input, _ATEN.rnn_relu.input)
_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
"""Where torch.export finds the decompositions while it traces."""


@contextmanager
def whole() -> Iterator[None]:
    """While a model is traced in the block, its recurrent layers are not taken apart."""
    _know_shapes()
    before = {layer: dict(layer.py_kernels) for layer in LAYERS}
    try:
        for layer in LAYERS:
            layer.py_kernels |= {key: _kept(layer.py_kernels[key]) for key in _KEYS if key in layer.py_kernels}
            layer._dispatch_cache.clear()
        yield
    finally:
        for layer, kernels in before.items():
            layer.py_kernels.clear()
            layer.py_kernels.update(kernels)
            layer._dispatch_cache.clear()


def _kept(decomposed: Callable[..., Any]) -> Callable[..., Any]:
    def answered(input: torch.Tensor, hx: Any, *rest: Any) -> Any:
        return _answer(input, hx, *rest) if is_fake(input) else decomposed(input, hx, *rest)

    return answered


def _know_shapes() -> None:
    """Tells torch the shapes, for good: whoever traces an exported program again finds the layer whole."""
    for layer in LAYERS:
        register_fast_op_impl(layer)(_within)  # asked before the decomposition, where sizes are symbols


def _within(mode: Any, *given: Any) -> Any:
    with mode:
        return _answer(*given)


def _answer(
    input: torch.Tensor,
    hx: torch.Tensor | Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Tensors of the shapes that the layer answers. With the batch first its steps are a transposed view, as it gives
    them: a `reshape` that follows has to copy."""
    states = (hx,) if isinstance(hx, torch.Tensor) else tuple(hx)
    width = states[0].shape[2] * (2 if bidirectional else 1)
    left = tuple(torch.empty_like(state, memory_format=torch.contiguous_format) for state in states)
    if not batch_first:
        return (input.new_empty((*input.shape[:2], width)), *left)
    return (input.new_empty((input.shape[1], input.shape[0], width)).transpose(0, 1), *left)
