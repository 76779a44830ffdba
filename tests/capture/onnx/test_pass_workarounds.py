"""A check of values that a model makes is made in its ONNX program, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.errors import TruelineError
from trueline.runtime.open import open_program
from worlds.recipes import untrained

pytestmark = pytest.mark.slow


class Checks(nn.Module):
    """Refuses single numbers that no range leaves out, and gives outputs of several dtypes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        torch._assert_async((x != 0.7312).all(), "0.7312 marks a missing value")
        torch._assert_async((x != 3.25).any())
        return x * 2, x > 0, x.long()


@pytest.mark.jobs
@pytest.mark.parametrize("format", ["onnx", "torch_export"])
def test_a_value_that_a_check_refuses_is_refused_and_all_others_are_answered(format: str, tmp_path: Path) -> None:
    example = torch.randn(3, 4)
    bundle = open_bundle(capture(untrained(Checks, examples=lambda: example), None, tmp_path / "b").path)
    session = open_program(bundle, format)
    answer = session.run({"x": example.numpy()})
    for found, want in zip(answer.values(), Checks()(example), strict=True):
        assert np.array_equal(found, want.numpy())
    refused = example.clone()
    refused[1, 2] = 0.7312
    for wrong in (refused, torch.full((2, 4), 3.25)):
        with pytest.raises(TruelineError):
            session.run({"x": wrong.numpy()})
