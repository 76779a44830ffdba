"""Packed sequences are exported padded, and answer what the packed ones do, at every length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import _get_current_function_mode_stack

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.capture.proof import value_ranges
from trueline.capture.proof.probes import make_probes
from trueline.capture.proof.prove import prove
from trueline.errors import CaptureError
from trueline.runtime.open import open_session

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")]


class States(nn.Module):
    """The last states of a deep LSTM in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (h, c) = self.rnn(packed)
        return h.transpose(0, 1), c.transpose(0, 1)


class Outputs(nn.Module):
    """The outputs of each layer, with a state to begin with."""

    def __init__(self, kind: type[nn.RNNBase] = nn.GRU) -> None:
        super().__init__()
        self.rnn = kind(4, 3, batch_first=True)  # type: ignore[call-arg, arg-type]
        self.begin = nn.Parameter(torch.randn(1, 1, 3))

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.rnn(packed, self.begin.expand(1, x.shape[0], 3).contiguous())
        return pad_packed_sequence(out, batch_first=True, padding_value=-1.0, total_length=x.shape[1])  # type: ignore[no-any-return]


class AsLong(nn.Module):
    """As long as the longest sequence of the request."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 3, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found: Tensor = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]  # as long
        return found


class Branch(AsLong):
    """Decides by the numbers in its answer."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        found = super().forward(x, lengths)
        return found * 2 if found.sum() > 0 else found


class Projected(nn.Module):
    """Outputs and states of an LSTM with projections, from a first state, over packed and whole sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True, proj_size=2)
        self.begin = nn.Parameter(torch.randn(4, 1, 2))

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, (h, c) = self.rnn(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        first = self.begin.expand(4, x.shape[0], 2), x.new_ones(4, x.shape[0], 5)
        whole, (last, cell) = self.rnn(x, first)
        return padded, h.transpose(0, 1), c.transpose(0, 1), whole, last.transpose(0, 1), cell.transpose(0, 1)


def observed(module: nn.Module) -> EagerSession:
    torch.manual_seed(0)
    example = (torch.randn(4, 6, 4), torch.tensor([3, 6, 1, 4]))
    return EagerSession(module.eval(), example, dynamic_shapes={"x": {1: "length"}})


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(States(), marks=pytest.mark.jobs),
        *(pytest.param(each, marks=pytest.mark.long) for each in (Outputs(), AsLong(), Projected(), Outputs(nn.RNN))),
    ],
    ids=["lstm", "gru", "as-long", "projected", "rnn"],
)
def test_a_packed_layer_is_proven_in_both_formats_for_every_length(tmp_path: Path, module: nn.Module) -> None:
    eager = observed(module)
    exported = torch_export.export(eager.module, eager.calling)
    signature = value_ranges.settle(eager, exported.signature)
    probes = make_probes(eager.example, signature=signature)
    assert {probe.inputs["x"].shape[1] for probe in probes} >= {1, 6, 12}
    for format, path in (
        ("torch_export", torch_export.emit(exported, tmp_path / "e")),
        ("onnx", emit.emit(exported, tmp_path / "o")),
    ):
        proof = prove(open_session(format, path, signature), eager, probes)
        assert proof.reason == ""
        assert sum(one.verdict == "agrees" for one in proof.evidence) >= 15


@pytest.mark.jobs
def test_an_export_that_ends_at_a_branch_leaves_no_mode_behind() -> None:
    eager = observed(Branch())
    with pytest.raises(CaptureError, match="data-dependent"):
        torch_export.export(eager.module, eager.calling)
    assert _get_current_function_mode_stack() == []  # what is traced next is traced as it stands


def test_the_layers_of_torch_are_as_before_after_an_export() -> None:
    before = (nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward)
    eager = observed(States())
    torch_export.export(eager.module, eager.calling)
    assert (nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward) == before
    x = pack_padded_sequence(torch.randn(2, 3, 4), torch.tensor([3, 2]), batch_first=True)
    assert x.batch_sizes.tolist() == [2, 2, 1]
