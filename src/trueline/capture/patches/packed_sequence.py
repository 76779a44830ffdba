"""Packed sequences in an exported program: padded as they came, each layer told where every sequence ends.

`pack_padded_sequence` makes of a batch a shape that depends on the lengths, which no exporter follows. While a model is
traced here, a packed sequence is the padded one with its lengths; LSTM, GRU and RNN go over all steps and

    outputs          0 beyond a sequence's end
    last state       taken at its end; an LSTM's cell stays as it is there: forget gate 1, input gate 0
    backwards        over the sequence turned around within its length

A packed sequence that is padded to no `total_length` has a length of its values' choosing, and is refused. The eager
model runs as it is; that the program answers the same is for the proof. Source: torch.nn.utils.rnn's documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import _VF, Tensor
from torch.nn.utils.rnn import PackedSequence

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="https://github.com/pytorch/pytorch/issues/112044",
    versions="torch 2.13",
    cost="under 0.1 ms; steps beyond a sequence's end are computed",
    helps=("PackedLstm", "PackedGru"),
)

_FUNCTIONS: Any = _VF
_LAYERS: tuple[Any, ...] = (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN)
_ALWAYS = 1e30
"""What a gate is given to be open, or shut, whatever else it is given."""


class _Lengths:
    """Stands where a PackedSequence has the sizes of its steps."""

    device = torch.device("cpu")

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def size(self, dim: int) -> int:
        """The number of steps, as `pad_packed_sequence` asks for it: not known."""
        return 0


@contextmanager
def padded() -> Iterator[None]:
    """While a model is traced in the block, its packed sequences stay padded."""
    forwards = [layer.forward for layer in _LAYERS]
    try:
        _FUNCTIONS._pack_padded_sequence, _FUNCTIONS._pad_packed_sequence = _packed, _unpacked
        for layer in _LAYERS:
            layer.forward = _masked(layer.forward)
        yield
    finally:
        del _FUNCTIONS._pack_padded_sequence, _FUNCTIONS._pad_packed_sequence
        for layer, forward in zip(_LAYERS, forwards, strict=True):
            layer.forward = forward


def _packed(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, _Lengths]:
    return (input.transpose(0, 1) if batch_first else input), _Lengths(lengths)


def _unpacked(data: Tensor, ends: _Lengths, batch_first: bool, padding: float, total: int) -> tuple[Tensor, Tensor]:
    if isinstance(total, int) and total == 0:
        raise RuntimeError("pad_packed_sequence without total_length: how long its answer is depends on values")
    found = torch.where(_inside(data, ends.lengths), data, padding)
    missing = total - found.shape[0]
    if missing:
        found = torch.cat([found, found.new_full((missing, *found.shape[1:]), padding)])
    return (found.transpose(0, 1) if batch_first else found), ends.lengths


def _inside(data: Tensor, lengths: Tensor) -> Tensor:
    """[steps, batch, 1]: whether a step lies before the end of its sequence."""
    return (torch.arange(data.shape[0]).unsqueeze(1) < lengths).unsqueeze(-1)


def _masked(forward: Callable[..., Any]) -> Callable[..., Any]:
    def answered(self: torch.nn.RNNBase, input: Any, hx: Any = None) -> Any:
        if not isinstance(input, PackedSequence) or not isinstance(input.batch_sizes, _Lengths):
            return forward(self, input, hx)
        found, states = _over(self, input.data, input.batch_sizes.lengths, _begun(self, input, hx))
        back = input.unsorted_indices
        hidden = tuple(state if back is None else state.index_select(1, back) for state in _joined(states))
        packed = PackedSequence(found, input.batch_sizes, input.sorted_indices, input.unsorted_indices)
        return packed, hidden if self.mode == "LSTM" else hidden[0]

    return answered


def _begun(layer: torch.nn.RNNBase, input: PackedSequence, hx: Any) -> list[Tensor]:
    """The states to begin with, each [layers * ways, batch, hidden]."""
    count = 2 if layer.mode == "LSTM" else 1
    if layer.proj_size:
        raise RuntimeError("a packed sequence in an LSTM with proj_size cannot be exported")
    if hx is None:
        ways = 2 if layer.bidirectional else 1
        size = (layer.num_layers * ways, input.data.shape[1], layer.hidden_size)
        return [input.data.new_zeros(size) for _ in range(count)]
    given = hx if isinstance(hx, (tuple, list)) else [hx]
    order = input.sorted_indices
    return [state if order is None else state.index_select(1, order) for state in given]


def _joined(states: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(ones) for ones in zip(*states, strict=True)]


def _over(
    layer: torch.nn.RNNBase, data: Tensor, lengths: Tensor, begun: list[Tensor]
) -> tuple[Tensor, list[list[Tensor]]]:
    """The outputs of the last layer, and the states that each layer and way ends with."""
    ends: list[list[Tensor]] = []
    steps = torch.arange(data.shape[0]).unsqueeze(1)
    inside = _inside(data, lengths)
    turned = torch.where(steps < lengths, lengths - 1 - steps, steps).unsqueeze(-1)
    for number in range(layer.num_layers):
        found = []
        for backwards in (False, True)[: 1 + layer.bidirectional]:
            given = data.gather(0, turned.expand_as(data)) if backwards else data
            at = number * (1 + layer.bidirectional) + backwards
            weights = [getattr(layer, name) for name in layer._all_weights[at]]
            out, left = _one(layer, given, inside, weights, [state[at : at + 1] for state in begun])
            last = (lengths - 1).view(1, -1, 1).expand(1, -1, out.shape[2])
            ends.append([out.gather(0, last)[0], *left])
            out = torch.where(inside, out, 0.0)
            found.append(out.gather(0, turned.expand_as(out)) if backwards else out)
        data = torch.cat(found, -1)
    return data, ends


def _one(
    layer: torch.nn.RNNBase, data: Tensor, inside: Tensor, weights: list[Tensor], begun: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """One layer one way: its outputs at all steps, and of an LSTM the cell at the end of each sequence."""
    rest = (layer.bias, 1, 0.0, False, False, False)
    if layer.mode == "GRU":
        return torch.gru(data, begun[0], weights, *rest)[0], []
    if layer.mode != "LSTM":
        run = torch.rnn_tanh if layer.mode == "RNN_TANH" else torch.rnn_relu
        return run(data, begun[0], weights, *rest)[0], []
    shut, open_, neither = (weights[0].new_full((layer.hidden_size, 1), n) for n in (-_ALWAYS, _ALWAYS, 0.0))
    column = torch.cat([shut, open_, neither, neither])  # input gate, forget gate, cell, output gate
    beyond = (~inside).to(data.dtype)
    widened = [torch.cat([weights[0], column], 1), *weights[1:]]
    out, _, cell = torch.lstm(torch.cat([data, beyond], -1), begun, widened, *rest)
    return out, [cell[0]]
