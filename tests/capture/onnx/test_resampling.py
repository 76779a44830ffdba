"""Images of a free size are resized as by torch, at sizes that no probe has: 4,000 rows to 9."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.runtime.open import open_session

pytestmark = pytest.mark.slow


class Resized(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "cubic": F.interpolate(x, size=(9, 7), mode="bicubic"),
            "cubic_with_corners": F.interpolate(x, size=(9, 7), mode="bicubic", align_corners=True),
            "cubic_by_a_factor": F.interpolate(x, scale_factor=(0.31, 1.7), mode="bicubic"),
            "cubic_of_halves": F.interpolate(x.half(), size=(9, 7), mode="bicubic").float(),
            "linear": F.interpolate(x, size=(9, 7), mode="bilinear"),
            "linear_with_corners": F.interpolate(x, size=(9, 7), mode="bilinear", align_corners=True),
            "linear_of_doubles": F.interpolate(x.double(), scale_factor=0.3, mode="bilinear"),
        }


class Scaled(nn.Module):
    """0.58 * 50 is 29 in single precision, 28 in double; 1.1 leaves sizes below 10 as they are."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "linear": F.interpolate(x, scale_factor=(0.58, 1.1), mode="bilinear"),
            "linear_with_corners": F.interpolate(x, scale_factor=(0.58, 1.1), mode="bilinear", align_corners=True),
            "cubic": F.interpolate(x, scale_factor=(0.58, 1.1), mode="bicubic"),
            "twice": F.interpolate(x, scale_factor=2, mode="bilinear"),
            "sequence": F.interpolate(x[:, :, 0], scale_factor=1.1, mode="linear"),
            "sequence_with_corners": F.interpolate(x[:, 0], scale_factor=1.1, mode="linear", align_corners=True),
            "sequence_by_size": F.interpolate(x[:, 0], size=x.shape[2] // 2, mode="linear"),
            "volume": F.interpolate(x[:, :, None], scale_factor=(2.0, 0.58, 1.1), mode="trilinear"),
        }


def test_a_factor_that_is_no_power_of_two_makes_torchs_sizes_and_values(tmp_path: Path) -> None:
    example = torch.linspace(-1, 1, 2 * 20 * 16).reshape(2, 1, 20, 16)
    eager = EagerSession(Scaled().eval(), example, dynamic_shapes={"x": {2: "height", 3: "width"}})
    exported = torch_export.export(eager.module, eager.calling)
    session = open_session("onnx", emit.emit(exported, tmp_path), exported.claims[-1])
    for height, width in ((12, 9), (50, 6), (100, 31), (1450, 4), (200, 10)):
        x = {"x": np.random.default_rng(0).standard_normal((2, 1, height, width)).astype(np.float32)}
        found = session.run(x)
        for name, expected in eager.run(x).items():
            atol = 2e-5 if name == "twice" else 5e-6
            np.testing.assert_allclose(found[name], expected, rtol=0, atol=atol, err_msg=f"{name}, {height}")


@pytest.mark.jobs
def test_a_resized_image_is_torchs_at_any_size(tmp_path: Path) -> None:
    example = torch.linspace(-1, 1, 2 * 20 * 16).reshape(2, 1, 20, 16)
    eager = EagerSession(Resized().eval(), example, dynamic_shapes={"x": {2: "height", 3: "width"}})
    exported = torch_export.export(eager.module, eager.calling)
    session = open_session("onnx", emit.emit(exported, tmp_path), exported.claims[-1])
    for height, width in ((12, 9), (64, 40), (1000, 30), (4000, 20)):
        x = {"x": np.random.default_rng(0).standard_normal((2, 1, height, width)).astype(np.float32)}
        found = session.run(x)
        for name, expected in eager.run(x).items():
            atol = 5e-3 if name == "cubic_of_halves" else 1e-5
            np.testing.assert_allclose(found[name], expected, rtol=0, atol=atol, err_msg=f"{name}, {height}")
