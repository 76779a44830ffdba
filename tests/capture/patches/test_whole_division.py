"""A sealed torch.export program answers where torch's truncated division would end the process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.runtime.open import open_session

SMALLEST = {torch.int32: -(2**31), torch.int64: -(2**63)}


class Truncating(nn.Module):
    def forward(self, x: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
        return torch.div(x, by, rounding_mode="trunc"), torch.div(x, -1, rounding_mode="trunc")


@pytest.mark.parametrize("kind", SMALLEST)
def test_the_smallest_number_divided_by_minus_one_is_what_floor_division_gives(
    kind: torch.dtype, tmp_path: Path
) -> None:
    example = (torch.tensor([[7], [-7], [8]], dtype=kind), torch.tensor([[2], [2], [-3]], dtype=kind))
    eager = EagerSession(Truncating().eval(), example)
    exported = torch_export.export(eager.module, eager.calling)
    path = torch_export.emit(exported, tmp_path)
    session = open_session("torch_export", path, exported.signature)
    x = torch.tensor([[SMALLEST[kind]], [SMALLEST[kind]], [-7], [7]], dtype=kind)
    by = torch.tensor([[-1], [2], [2], [-1]], dtype=kind)
    by_tensor, by_constant = session.run({"x": x.numpy(), "by": by.numpy()}).values()
    np.testing.assert_array_equal(by_tensor.reshape(-1), [SMALLEST[kind], SMALLEST[kind] // 2, -3, -7])
    np.testing.assert_array_equal(by_constant.reshape(-1), [SMALLEST[kind], SMALLEST[kind], 7, -7])
