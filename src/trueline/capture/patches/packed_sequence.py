"""Packed sequences in an exported program: padded tensors, with the length of each sequence beside them.

The shape of a packed sequence depends on the lengths, which no exporter follows. In a trace LSTM, GRU and RNN run over
all steps; outputs are 0 beyond a sequence's end, and the last state is taken there (an LSTM's cell keeps its value:
forget gate 1, input gate 0). Backward runs over the sequence reversed within its length. `pad_packed_sequence` without
`total_length` has a length that values choose, and is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import _VF, Tensor
from torch.nn.utils.rnn import PackedSequence

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="pytorch/pytorch#112044",
    versions="torch 2.13",
    cost="steps beyond each end are computed",
    helps=("PackedLstm", "PackedGru"),
)

_FUNCTIONS: Any = _VF
_LAYERS: tuple[Any, ...] = (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN)
_OPEN = 1e30
"""Makes a gate 1, and its negative 0, whatever its other inputs are."""


class _Lengths:
    """Takes the place of a PackedSequence's batch sizes."""

    device = torch.device("cpu")

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def size(self, dim: int) -> int:
        """The number of steps, which `pad_packed_sequence` reads: unknown."""
        return 0


@contextmanager
def keep_padded() -> Iterator[None]:
    """In the block, packed sequences stay padded."""
    originals = [layer.forward for layer in _LAYERS]
    try:
        _FUNCTIONS._pack_padded_sequence, _FUNCTIONS._pad_packed_sequence = _pack, _pad
        for layer in _LAYERS:
            layer.forward = _take_padded(layer.forward)
        yield
    finally:
        del _FUNCTIONS._pack_padded_sequence, _FUNCTIONS._pad_packed_sequence
        for layer, forward in zip(_LAYERS, originals, strict=True):
            layer.forward = forward


def _pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, _Lengths]:
    return (input.transpose(0, 1) if batch_first else input), _Lengths(lengths)


def _pad(data: Tensor, ends: _Lengths, batch_first: bool, padding: float, total: int) -> tuple[Tensor, Tensor]:
    if isinstance(total, int) and total == 0:
        raise RuntimeError("pad_packed_sequence without total_length: the length of its result depends on values")
    padded = torch.where(_inside(data, ends.lengths), data, padding)
    missing = total - padded.shape[0]
    if missing:
        padded = torch.cat([padded, padded.new_full((missing, *padded.shape[1:]), padding)])
    return (padded.transpose(0, 1) if batch_first else padded), ends.lengths


def _inside(data: Tensor, lengths: Tensor) -> Tensor:
    """[steps, batch, 1]: whether a step lies before the end of its sequence."""
    return (torch.arange(data.shape[0]).unsqueeze(1) < lengths).unsqueeze(-1)


def _take_padded(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: torch.nn.RNNBase, input: Any, hx: Any = None) -> Any:
        if not isinstance(input, PackedSequence) or not isinstance(input.batch_sizes, _Lengths):
            return original(self, input, hx)
        outputs, states = _run_layers(self, input.data, input.batch_sizes.lengths, _first_states(self, input, hx))
        order = input.unsorted_indices
        joined = (torch.stack(ones) for ones in zip(*states, strict=True))
        hidden = tuple(state if order is None else state.index_select(1, order) for state in joined)
        packed = PackedSequence(outputs, input.batch_sizes, input.sorted_indices, input.unsorted_indices)
        return packed, hidden if self.mode == "LSTM" else hidden[0]

    return forward


def _first_states(layer: torch.nn.RNNBase, input: PackedSequence, hx: Any) -> list[Tensor]:
    """Each [layers * directions, batch, hidden]."""
    if layer.proj_size:
        raise RuntimeError("a packed sequence in an LSTM with proj_size cannot be exported")
    if hx is None:
        directions = 2 if layer.bidirectional else 1
        size = (layer.num_layers * directions, input.data.shape[1], layer.hidden_size)
        return [input.data.new_zeros(size) for _ in range(2 if layer.mode == "LSTM" else 1)]
    given = hx if isinstance(hx, (tuple, list)) else [hx]
    order = input.sorted_indices
    return [state if order is None else state.index_select(1, order) for state in given]


def _run_layers(
    layer: torch.nn.RNNBase, data: Tensor, lengths: Tensor, states: list[Tensor]
) -> tuple[Tensor, list[list[Tensor]]]:
    """The outputs of the last layer, and the last states of each layer and direction."""
    last_states: list[list[Tensor]] = []
    steps = torch.arange(data.shape[0]).unsqueeze(1)
    inside = _inside(data, lengths)
    reverse = torch.where(steps < lengths, lengths - 1 - steps, steps).unsqueeze(-1)
    for number in range(layer.num_layers):
        outputs = []
        for backward in (False, True)[: 1 + layer.bidirectional]:
            given = data.gather(0, reverse.expand_as(data)) if backward else data
            at = number * (1 + layer.bidirectional) + backward
            weights = [getattr(layer, name) for name in layer._all_weights[at]]
            out, cell = _run_one(layer, given, inside, weights, [state[at : at + 1] for state in states])
            last = (lengths - 1).view(1, -1, 1).expand(1, -1, out.shape[2])
            last_states.append([out.gather(0, last)[0], *cell])
            out = torch.where(inside, out, 0.0)
            outputs.append(out.gather(0, reverse.expand_as(out)) if backward else out)
        data = torch.cat(outputs, -1)
    return data, last_states


def _run_one(
    layer: torch.nn.RNNBase, data: Tensor, inside: Tensor, weights: list[Tensor], states: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """One layer in one direction: its outputs at all steps, and an LSTM's cell at the end of each sequence."""
    rest = (layer.bias, 1, 0.0, False, False, False)
    if layer.mode == "GRU":
        return torch.gru(data, states[0], weights, *rest)[0], []
    if layer.mode != "LSTM":
        run = torch.rnn_tanh if layer.mode == "RNN_TANH" else torch.rnn_relu
        return run(data, states[0], weights, *rest)[0], []
    shut, open_, neither = (weights[0].new_full((layer.hidden_size, 1), n) for n in (-_OPEN, _OPEN, 0.0))
    column = torch.cat([shut, open_, neither, neither])  # input gate, forget gate, cell, output gate
    beyond = (~inside).to(data.dtype)
    widened = [torch.cat([weights[0], column], 1), *weights[1:]]
    out, _, cell = torch.lstm(torch.cat([data, beyond], -1), states, widened, *rest)
    return out, [cell[0]]
