"""torch's functions that join tensors of few dimensions are ONNX, at sizes other than those of the trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit as onnx_emit
from trueline.runtime.open import open_session
from worlds.cases import few

pytestmark = pytest.mark.slow


def side_by_side(x: Tensor) -> Tensor:
    return torch.hstack([x, x.exp(), torch.arange(3) * x[:, :1]])


def end_to_end(x: Tensor) -> Tensor:
    """Of one dimension, and of none."""
    return torch.hstack([x[:, 0], x.sum(), x.flatten()])


def columns(x: Tensor) -> Tensor:
    return torch.column_stack([x[:, 0], x, x.argmax(1)])


def rows(x: Tensor) -> Tensor:
    return torch.vstack([x.mean(0), x])


def deep(x: Tensor) -> Tensor:
    return torch.dstack([x, x * 2]) + torch.dstack([x[0], x[1]])


@pytest.mark.parametrize("function", few([side_by_side, end_to_end, columns, rows, deep], 2))
def test_tensors_are_joined_as_by_torch(function: Callable[[Tensor], Any], tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    eager = EagerSession(Model().eval(), torch.randn(4, 5))
    exported = torch_export.export(eager.module, eager.calling)
    session = open_session("onnx", onnx_emit.emit(exported, tmp_path), exported.signature)
    for batch in (2, 4, 9):
        x = {"x": torch.randn(batch, 5).numpy()}
        found, expected = session.run(x)["output"], eager.run(x)["output"]
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert np.allclose(found, expected, rtol=1e-5, atol=1e-6)
