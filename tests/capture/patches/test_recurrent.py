"""A layer that loops over time is captured as one operator, for every length, and proven against the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trueline.bundle.signature import Dim
from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.capture.patches import recurrent
from trueline.capture.proof.probes import make_probes
from trueline.capture.proof.prove import prove
from trueline.runtime.open import open_session

pytestmark = pytest.mark.slow


class Model(nn.Module):
    """Reshapes what the layer answers: as a view, that would need its steps to lie one after the other."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, left = self.layer(x)
        state = left if isinstance(left, Tensor) else torch.cat(left, -1)
        return out.reshape(out.shape[0] * out.shape[1], -1).tanh(), state.transpose(0, 1).flatten(1)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(4, 3, batch_first=True, num_layers=2, bidirectional=True),
    "lstm without biases": lambda: nn.LSTM(4, 3, batch_first=True, bias=False),
    "gru": lambda: nn.GRU(4, 3, batch_first=True, num_layers=2, bidirectional=True),
    "tanh rnn": lambda: nn.RNN(4, 3, batch_first=True, num_layers=2, bidirectional=True),
    "relu rnn": lambda: nn.RNN(4, 3, batch_first=True, nonlinearity="relu", bias=False),
    "time first": lambda: nn.Sequential(Turned(), nn.RNN(4, 3)),
}


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


NEAR = ("lstm without biases", "tanh rnn")  # the others have no biases and a tanh, too


@pytest.mark.jobs
@pytest.mark.parametrize("layer", [pytest.param(one, marks=pytest.mark.long) if one in NEAR else one for one in LAYERS])
def test_a_layer_over_time_is_one_operator_that_holds_for_every_length(layer: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    eager = EagerSession(Model(LAYERS[layer]()).eval(), torch.randn(3, 5, 4), dynamic_shapes={"x": {1: "length"}})
    exported = torch_export.export(eager.module, eager.calling)
    assert exported.signature.dims["length"] == Dim()
    probes = make_probes(eager.example, signature=exported.signature)
    assert {one.inputs["x"].shape[1] for one in probes} >= {1, 4, 6, 10}
    paths = {"onnx": emit.emit(exported, tmp_path), "torch_export": torch_export.emit(exported, tmp_path)}
    for format, path in paths.items():
        session = open_session(format, path, exported.signature)  # type: ignore[arg-type]
        proof = prove(session, eager, probes)
        assert (format, proof.reason) == (format, "")
        assert {one.verdict for one in proof.evidence} == {"agrees"}


def test_torch_takes_a_layer_apart_as_before_once_the_model_is_traced() -> None:
    before = {layer: dict(layer.py_kernels) for layer in recurrent.LAYERS}
    with recurrent.keep_layers_whole():
        assert all(dict(layer.py_kernels) != before[layer] for layer in recurrent.LAYERS)
    assert {layer: dict(layer.py_kernels) for layer in recurrent.LAYERS} == before
