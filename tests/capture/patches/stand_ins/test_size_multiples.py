"""What is filled up to a multiple and cut off again is captured for all sizes, and not for multiples alone."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._sympy.functions import PythonMod
from torch.utils._sympy.symbol import SymT, make_symbol

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.capture.patches.stand_ins import size_multiples
from trueline.errors import NotProven
from trueline.runtime.open import open_program
from worlds.recipes import untrained

SUMS: dict[str, tuple[Callable[[Any, Callable[[Any, int], Any]], Any], bool]] = {
    "filled up": (lambda n, rest: n + rest(4 - rest(n, 4), 4), True),
    "filled up by a negative rest": (lambda n, rest: n + rest(-n, 8), True),
    "filled up after an offset": (lambda n, rest: 3 + n + rest(8 - rest(n + 3, 8), 8), True),
    "filled up three times": (lambda n, rest: 3 * n + 3 * rest(-n, 5), True),
    "cut off": (lambda n, rest: n - rest(n, 4), True),
    "cut off twice": (lambda n, rest: 2 * n - 2 * rest(n, 6) + 1, True),
    "another rest": (lambda n, rest: n + rest(n, 4), False),
    "filled up but one": (lambda n, rest: n + rest(4 - rest(n + 1, 4), 4), True),
    "by another number": (lambda n, rest: n + rest(3 - rest(n, 4), 4), False),
}
"""Sums of a size and what is left of a division; whether they are multiples."""


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_written_as_a_multiple_where_it_is_one_and_equals_it_at_every_size(name: str) -> None:
    function, is_multiple = SUMS[name]
    size = make_symbol(SymT.SIZE, 7)
    total = function(size, PythonMod)
    folded = size_multiples.fold(total)
    assert (folded is not total) == is_multiple
    assert [folded.subs(size, one) for one in range(1, 60)] == [function(one, operator.mod) for one in range(1, 60)]


class Windows(nn.Module):
    """Attention in windows of 4 x 4, of an image of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        count, height, width, channels = x.shape
        x = F.pad(x, (0, 0, 0, (4 - width % 4) % 4, 0, (4 - height % 4) % 4))
        _, high, wide, _ = x.shape
        rows = x.view(count, high // 4, 4, wide // 4, 4, channels).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, channels)
        rows = (rows @ rows.transpose(1, 2)).softmax(-1) @ self.values(rows)
        x = rows.view(count, high // 4, wide // 4, 4, 4, channels).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(count, high, wide, channels)[:, :height, :width].contiguous()


@pytest.mark.slow
def test_windows_of_an_image_that_is_filled_up_are_captured_for_every_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shapes = {"x": {2: "height", 3: "width"}}
    recipe = untrained(Windows, examples=lambda: torch.randn(2, 2, 8, 8), dynamic_shapes=lambda: shapes)
    bundle = open_bundle(capture(recipe, None, tmp_path / "b").path)
    assert {one.format for one in bundle.manifest.programs} == {"onnx", "torch_export"}
    assert bundle.signature.guards == ()
    dims = bundle.signature.dims
    assert all(
        (dims[one].max, dims[one].multiple_of) == (None, 1) and dims[one].min <= 5 for one in shapes["x"].values()
    )


class WritesWhatItCutOff(nn.Module):
    """The copy is what was filled up itself, where nothing was."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        filled = F.pad(x, (0, (4 - length % 4) % 4)) * 1.0
        kept = filled[:, :length].contiguous()
        kept.add_(1)
        return kept * filled.sum(1, keepdim=True)


@pytest.mark.jobs
@pytest.mark.slow
def test_a_copy_that_is_none_at_some_sizes_is_answered_as_the_model_answers_it(tmp_path: Path) -> None:
    recipe = untrained(
        WritesWhatItCutOff, examples=lambda: torch.randn(3, 9), dynamic_shapes=lambda: {"x": {1: "length"}}
    )
    try:
        bundle = open_bundle(capture(recipe, None, tmp_path / "b").path)
    except NotProven:
        return
    name = bundle.signature.inputs[0].name
    for program in bundle.manifest.programs:
        session = open_program(bundle, program.format)
        for length in (7, 8, 9, 12):
            x = np.random.default_rng(length).standard_normal((2, length)).astype(np.float32)
            if session.signature.allows({"batch": 2, "length": length}):
                (found,) = session.run({name: x}).values()
                np.testing.assert_allclose(found, WritesWhatItCutOff()(torch.from_numpy(x)).numpy(), rtol=1e-4)
