"""What the exporter's optimizer would join stays as the model has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.runtime.open import open_session

pytestmark = pytest.mark.slow


class TwoLimits(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.arange(12.0).reshape(6, 2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        one, row = torch.tensor([1.0]), x.sum(0)[:, None].expand(6, 2)
        return [
            x.clamp(0, 1).clamp(5, 9),
            x.clamp(max=4).clamp(min=-3),
            x.clamp(max=2).clamp(min=-5),
            x.clamp(-5, -1).relu(),
            x.relu().clamp(-3, 4),
            torch.minimum(torch.maximum(x.sum(), one), one * 4),
            x.long().clamp(0, 1).clamp(5, 9),
            x.long().clamp(-3, 3).relu(),
            self.table.index_put((torch.arange(6),), row, accumulate=True),
        ]


def test_limits_of_limits_and_sums_at_all_rows_are_as_in_the_model(tmp_path: Path) -> None:
    x = torch.linspace(-12, 12, 60).reshape(10, 6)
    eager = EagerSession(TwoLimits().eval(), x[:3])
    exported = torch_export.export(eager.module, eager.calling)
    session = open_session("onnx", emit.emit(exported, tmp_path), exported.signature)
    found = session.run({"x": x.numpy()})
    for name, expected in eager.run({"x": x.numpy()}).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, err_msg=name, strict=True)
