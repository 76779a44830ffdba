"""Parts and places of a tensor stay functions of its sizes while a model is traced, in both formats."""

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


def hide_itself(x: Tensor) -> Tensor:
    """The nearest other record."""
    alike = x[:, 0] @ x[:, 0].T
    alike.fill_diagonal_(-9.0)
    return alike.max(1).values


def hide_steps(x: Tensor) -> Tensor:
    alike = x @ x.mT
    alike.diagonal(dim1=-2, dim2=-1).fill_(0)
    return alike


def shift(x: Tensor) -> Tensor:
    """Beside the diagonal, below it, and of booleans."""
    alike, seen = x @ x.mT, (x @ x.mT) > 0
    alike.diagonal(-2, 1, 2).add_(alike[:, 2:, 0])
    seen.diagonal(1, 1, 2).fill_(True)
    return torch.where(seen, alike, -1.0)


def pool(x: Tensor) -> Tensor:
    return torch.stack([part.mean(1) for part in x.tensor_split(3, 1)], 1)


def split_at(x: Tensor) -> Tensor:
    first, _, last = torch.tensor_split(x, (1, x.shape[1] // 2), dim=1)
    return first.sum(1) + last.amax(1)


def find_peak(x: Tensor) -> Tensor:
    """Row and column of the largest number of each map."""
    return torch.stack(torch.unravel_index(x.flatten(1).argmax(1), x.shape[1:]), 1)


def rank(x: Tensor) -> Tensor:
    """How many of the first record's numbers are below each number."""
    return torch.bucketize(x, x[0, :, 0].sort().values)


@pytest.mark.jobs
@pytest.mark.parametrize("function", few([hide_itself, hide_steps, shift, pool, split_at, find_peak, rank], 3))
def test_parts_and_places_follow_the_sizes(function: Callable[[Tensor], Any], tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    eager = EagerSession(Model().eval(), torch.randn(3, 11, 4), dynamic_shapes={"x": {1: "length"}})
    exported = torch_export.export(eager.module, eager.calling)
    for format, emit in (("onnx", onnx_emit.emit), ("torch_export", torch_export.emit)):
        session = open_session(format, emit(exported, tmp_path / format), exported.signature)  # type: ignore[arg-type]
        for batch, length in ((1, 9), (7, 12), (5, 40)):
            x = {"x": torch.randn(batch, length, 4).numpy()}
            found, expected = session.run(x)["output"], eager.run(x)["output"]
            assert found.shape == expected.shape
            assert np.allclose(found, expected, rtol=1e-5, atol=1e-5)
