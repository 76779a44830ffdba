"""What torch.onnx lacks, or translates so that ONNX Runtime cannot run it or computes it less exactly, is proven."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trueline.runtime import export, onnx_emit
from trueline.runtime.eager import EagerSession
from trueline.runtime.probes import make_probes
from trueline.runtime.prove import Proof, prove
from trueline.runtime.session import open_session

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def proven(module: nn.Module, *example: Tensor, free: dict[str, dict[int, str]] | None = None, folder: Path) -> Proof:
    eager = EagerSession(module.eval(), example, dynamic_shapes=free)
    exported = export.export(eager.module, eager.calling)
    session = open_session("onnx", onnx_emit.emit(exported, folder), exported.signature)
    return prove(session, eager, make_probes(eager.example, signature=exported.signature))


class Chosen(nn.Module):
    """A choice between booleans."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.where(x.sum(1, keepdim=True) > 0, x > 0.5, x < -0.5)


class Normed(nn.Module):
    """Of a constant image each channel is constant: its deviation is nothing but what the mean is off by."""

    def __init__(self, *, stored: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=stored)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.conv(x))
        return found


@pytest.mark.parametrize("module", [Chosen(), Normed(), Normed(stored=True)], ids=["where", "norm", "stored norm"])
def test_it_answers_as_the_model_does(module: nn.Module, tmp_path: Path) -> None:
    example = torch.randn(3, 5) if isinstance(module, Chosen) else torch.randn(2, 3, 31, 31)
    assert proven(module, example, folder=tmp_path).reason == ""
