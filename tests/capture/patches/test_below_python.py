"""Models that differentiate inside, or hold TorchScript, are traced beneath Python, for every batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit as onnx_emit
from trueline.capture.proof.probes import make_probes
from trueline.capture.proof.prove import prove
from trueline.errors import CaptureError
from trueline.runtime.open import open_session

pytestmark = pytest.mark.slow


class Force(nn.Module):
    """Energy and its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            energy = self.layer(x).sum(1)
            (gradient,) = torch.autograd.grad(energy.sum(), x)
        return energy.detach(), -gradient


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.jit.script(nn.Sequential(nn.Linear(3, 6), nn.ReLU()))
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]


class Deciding(Force):
    """Follows values, which no trace may freeze."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        energy, force = super().forward(x)
        if energy.sum() > 0:
            return energy, force
        return energy, 2 * force


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("kind", [Force, Scripted])
def test_what_python_hides_from_the_exporter_is_seen_beneath_it(kind: type[nn.Module], tmp_path: Path) -> None:
    model = kind().eval()
    eager = EagerSession(model, torch.randn(3, 3))
    exported = torch_export.export(model, eager.calling)
    assert exported.how == ""
    assert exported.signature.dims["batch"].max is None
    probes = make_probes(eager.example, signature=exported.signature, sizes=exported.boundaries)
    for format, emit in (("onnx", onnx_emit.emit), ("torch_export", torch_export.emit)):
        session = open_session(format, emit(exported, tmp_path / format), exported.signature)  # type: ignore[arg-type]
        proof = prove(session, eager, probes)
        assert proof.proven, proof.reason


def test_a_branch_on_values_is_refused_there_too() -> None:
    model = Deciding().eval()
    with pytest.raises(CaptureError, match="cannot follow the model"):
        torch_export.export(model, EagerSession(model, torch.randn(3, 3)).calling)
