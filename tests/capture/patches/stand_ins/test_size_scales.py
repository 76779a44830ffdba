"""`interpolate` by factors that are made of sizes leaves the sizes free, and answers what torch's own does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.runtime.open import open_program
from worlds.cases import few
from worlds.recipes import untrained

pytestmark = pytest.mark.slow


class ToRows(nn.Module):
    """Resized to some 16 rows, and by a little more than its columns' number, as DINO's positions are."""

    def __init__(self, mode: str, sides: int, options: dict[str, bool]) -> None:
        super().__init__()
        self.mode, self.sides, self.options = mode, sides, options

    def forward(self, x: Tensor) -> Tensor:
        rows, others = x.shape[2], x.shape[3 : 2 + self.sides]
        by = (16.1 / rows, *((size + 0.1) / size for size in others))
        return nn.functional.interpolate(x, scale_factor=by, mode=self.mode, **self.options)


MODES: dict[str, tuple[int, dict[str, bool]]] = {
    "linear": (1, {}),
    "bilinear": (2, {}),
    "trilinear": (3, {}),
    "bicubic": (2, {}),
    "bilinear, corners": (2, {"align_corners": True}),
    "bicubic, corners": (2, {"align_corners": True}),
    "bilinear, of the sizes alone": (2, {"recompute_scale_factor": True}),
    "nearest, of the sizes alone": (2, {"recompute_scale_factor": True}),
}


@pytest.mark.parametrize("name", few(MODES, 2))
def test_a_factor_made_of_sizes_leaves_them_free(name: str, tmp_path: Path) -> None:
    sides, options = MODES[name]
    model = ToRows(name.partition(",")[0], sides, options)
    examples = [torch.randn(2, 3, 9, *(5, 4)[: sides - 1]), torch.randn(3, 3, 20, *(6, 3)[: sides - 1])]
    recipe = untrained(lambda: model, examples=lambda: iter(examples))
    capture(recipe, None, tmp_path / "b", formats=("onnx", "torch_export"))
    bundle = open_bundle(tmp_path / "b")
    for format in ("onnx", "torch_export"):
        program = open_program(bundle, format)
        for rows in (1, 2, 15, 16, 17, 33):
            x = torch.randn(2, 3, rows, *(7, 2)[: sides - 1])
            (answer,) = program.run({"x": x.numpy()}).values()
            np.testing.assert_allclose(answer, model(x).numpy(), rtol=1e-4, atol=1e-5, err_msg=f"{format} {rows}")
