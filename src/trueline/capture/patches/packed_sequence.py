"""Packed sequences in an exported program: padded tensors, with the length of each sequence beside them.

The shape of a packed sequence depends on the lengths, which no exporter follows. In a trace LSTM, GRU and RNN run over
all steps; outputs are 0 beyond a sequence's end, and the last state is taken there (an LSTM's cell keeps its value:
forget gate 1, input gate 0). Backward runs over the sequence reversed within its length. `pad_packed_sequence` without
`total_length` is as long as the longest sequence: it has a length that values choose.

An LSTM with `proj_size`, which ONNX has no operator for, is an LSTM without, packed or not: a step sees W P h where it
saw W (P h), and its outputs are projected afterwards. The first state enters with the first step's input.
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
    helps=("PackedLstm", "PackedGru", "LSTM(proj_size)"),
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
    if isinstance(total, int) and total == 0:  # as long as the longest sequence
        longest: Any = ends.lengths.max().item()
        torch._check(longest >= 1)  # type: ignore[no-untyped-call]
        torch._check(longest <= data.shape[0])  # type: ignore[no-untyped-call]
        data, total = data.narrow(0, 0, longest), longest
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
        if self.proj_size and isinstance(input, Tensor) and input.dim() == 3:
            return _project_whole(self, input, hx)
        if not isinstance(input, PackedSequence) or not isinstance(input.batch_sizes, _Lengths):
            return original(self, input, hx)
        outputs, states = _run_layers(self, input.data, input.batch_sizes.lengths, _first_states(self, input, hx))
        order = input.unsorted_indices
        joined = (torch.stack(ones) for ones in zip(*states, strict=True))
        hidden = tuple(state if order is None else state.index_select(1, order) for state in joined)
        packed = PackedSequence(outputs, input.batch_sizes, input.sorted_indices, input.unsorted_indices)
        return packed, hidden if self.mode == "LSTM" else hidden[0]

    return forward


def _project_whole(layer: torch.nn.RNNBase, input: Tensor, hx: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """An LSTM with projections over sequences of one length."""
    data = input.transpose(0, 1) if layer.batch_first else input
    whole = PackedSequence(data, torch.empty(0, dtype=torch.int64), None, None)
    outputs, states = _run_layers(layer, data, None, _first_states(layer, whole, hx))
    hidden = tuple(torch.stack(ones) for ones in zip(*states, strict=True))
    return (outputs.transpose(0, 1) if layer.batch_first else outputs), hidden


def _first_states(layer: torch.nn.RNNBase, input: PackedSequence, hx: Any) -> list[Tensor]:
    """Each [layers * directions, batch, hidden]; of an LSTM with projections the first [..., projected]."""
    if hx is None:
        directions = 2 if layer.bidirectional else 1
        widths = [layer.proj_size or layer.hidden_size, layer.hidden_size][: 2 if layer.mode == "LSTM" else 1]
        leading = (layer.num_layers * directions, input.data.shape[1])
        return [input.data.new_zeros((*leading, width)) for width in widths]
    given = hx if isinstance(hx, (tuple, list)) else [hx]
    order = input.sorted_indices
    return [state if order is None else state.index_select(1, order) for state in given]


def _run_layers(
    layer: torch.nn.RNNBase, data: Tensor, lengths: Tensor | None, states: list[Tensor]
) -> tuple[Tensor, list[list[Tensor]]]:
    """The outputs of the last layer, and the last states of each layer and direction; without `lengths` all sequences
    take all steps."""
    last_states: list[list[Tensor]] = []
    ends = _Ends(data, lengths)
    for number in range(layer.num_layers):
        outputs = []
        for backward in (False, True)[: 1 + layer.bidirectional]:
            given = ends.reverse(data) if backward else data
            at = number * (1 + layer.bidirectional) + backward
            weights = [getattr(layer, name) for name in layer._all_weights[at]]
            out, cell = _run_one(layer, given, ends.inside, weights, [state[at : at + 1] for state in states])
            last_states.append([ends.take_last(out), *cell])
            out = out if ends.inside is None else torch.where(ends.inside, out, 0.0)
            outputs.append(ends.reverse(out) if backward else out)
        data = torch.cat(outputs, -1)
    return data, last_states


class _Ends:
    """Where sequences end in `data` [steps, batch, width]; without `lengths` at its end."""

    def __init__(self, data: Tensor, lengths: Tensor | None) -> None:
        self.inside = None if lengths is None else _inside(data, lengths)
        if lengths is not None:
            steps = torch.arange(data.shape[0]).unsqueeze(1)
            self._order = torch.where(steps < lengths, lengths - 1 - steps, steps).unsqueeze(-1)
            self._last = (lengths - 1).view(1, -1, 1)

    def reverse(self, data: Tensor) -> Tensor:
        return data.flip(0) if self.inside is None else data.gather(0, self._order.expand_as(data))

    def take_last(self, data: Tensor) -> Tensor:
        return data[-1] if self.inside is None else data.gather(0, self._last.expand(1, -1, data.shape[2]))[0]


def _run_one(
    layer: torch.nn.RNNBase, data: Tensor, inside: Tensor | None, weights: list[Tensor], states: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """One layer in one direction: its outputs at all steps, and an LSTM's cell at the end of each sequence."""
    rest = (layer.bias, 1, 0.0, False, False, False)
    if layer.mode == "GRU":
        return torch.gru(data, states[0], weights, *rest)[0], []
    if layer.mode != "LSTM":
        run = torch.rnn_tanh if layer.mode == "RNN_TANH" else torch.rnn_relu
        return run(data, states[0], weights, *rest)[0], []
    project = None
    if layer.proj_size:
        *weights, project = weights
        data, weights, states = _unproject(data, weights, project, states)
    if inside is not None:
        shut, open_, neither = (weights[0].new_full((layer.hidden_size, 1), n) for n in (-_OPEN, _OPEN, 0.0))
        column = torch.cat([shut, open_, neither, neither])  # input gate, forget gate, cell, output gate
        data = torch.cat([data, (~inside).to(data.dtype)], -1)
        weights = [torch.cat([weights[0], column], 1), *weights[1:]]
    out, _, cell = torch.lstm(data, states, weights, *rest)
    return (out if project is None else out @ project.t()), [cell[0]]


def _unproject(
    data: Tensor, weights: list[Tensor], project: Tensor, states: list[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """What an LSTM without projections computes the same from."""
    given, held, *biases = weights
    begun = torch.cat([states[0], states[0].new_zeros(1).expand(data.shape[0], *states[0].shape[1:])])[:-1]
    joined = (held.double() @ project.double()).to(held.dtype)
    zero = states[1].new_zeros(states[1].shape)
    return torch.cat([data, begun], -1), [torch.cat([given, held], 1), joined, *biases], [zero, states[1]]
