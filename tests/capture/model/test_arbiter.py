"""The arbiter answers in float64 for every layer, also for a model that is too large to be held so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model import arbiter
from trueline.capture.model.arbiter import Arbiter
from trueline.capture.model.eager import EagerSession


class First(nn.Module):
    """The first output of a layer that returns several."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)[0]


class Paired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(8, 8, 4)
        self.keys = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Any:
        keys = self.keys.expand(len(x), 6, 8)
        return self.layer(x, x), nn.functional.scaled_dot_product_attention(x[:, None], keys, keys)


class Matrix(nn.Module):
    """A product with a matrix as it lies in memory, which linear layers turn."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 5))

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "Conv1d": (nn.Conv1d(3, 4, 3), (2, 3, 9)),
    "Conv2d": (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (2, 3, 9, 9)),
    "strided": (nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 3)), (2, 3, 9, 9)),
    "Conv3d": (nn.Conv3d(3, 4, 3), (2, 3, 5, 5, 5)),
    "Matrix": (Matrix(), (3, 8)),
    "Linear": (nn.Linear(8, 5), (2, 4, 8)),
    "groups": (nn.Conv2d(4, 8, 3, groups=2), (2, 4, 9, 9)),
    "ConvTranspose2d": (nn.ConvTranspose2d(3, 4, 3), (2, 3, 9, 9)),
    "LSTM": (First(nn.LSTM(8, 5, 2, batch_first=True, bidirectional=True)), (2, 4, 8)),
    "GRU": (First(nn.GRU(8, 5, batch_first=True)), (2, 4, 8)),
    "PReLU": (nn.PReLU(8), (2, 8)),
    "Bilinear": (Paired(), (2, 8)),
    "encoder": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 4, 8)),
}


@pytest.mark.parametrize("columns", [0, 1 << 20], ids=["large images", "small images"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_answers_in_float64_whether_its_weights_are_held_so_or_widened_by_parts(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, shape = LAYERS[name]
    eager = EagerSession(module.eval(), torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    held = Arbiter(eager).run(eager.example)
    monkeypatch.setattr(arbiter, "HELD", 0)
    monkeypatch.setattr(arbiter, "PIECE", 16)
    monkeypatch.setattr(arbiter, "PART", 16)
    monkeypatch.setattr(arbiter, "COLUMNS", columns)
    found, rounded = Arbiter(eager), Arbiter(eager).run(eager.example, rounded=1)
    for output, want in held.items():
        answer = found.run(eager.example)[output]
        np.testing.assert_allclose(answer, want, rtol=1e-12, atol=1e-14)
        assert 0 < np.abs(rounded[output] - want).max() < 1e-5 * np.abs(want).max() or name == "PReLU"
    assert {one.dtype for one in module.parameters()} == {torch.float32}


def test_a_rounded_product_is_off_by_what_adding_that_many_terms_takes() -> None:
    """Float32 adds 4,096 terms that cancel with an error far above that of the small sum."""
    torch.manual_seed(0)
    eager = EagerSession(nn.Linear(4096, 256, bias=False).eval(), torch.randn(1, 4096))
    exact = Arbiter(eager).run(eager.example)["output"]
    error = np.sqrt(np.mean((eager.run(eager.example)["output"] - exact) ** 2))
    moved = np.sqrt(np.mean((Arbiter(eager).run(eager.example, rounded=1)["output"] - exact) ** 2))
    assert error / 4 < moved < error * 8


def test_a_convolution_over_a_long_signal_is_rounded_by_the_terms_of_its_kernel_and_not_by_the_length() -> None:
    torch.manual_seed(0)
    module = nn.Conv1d(2, 4, 3, bias=False).eval()
    eager = EagerSession(module, torch.randn(1, 2, 65536))
    exact = Arbiter(eager).run(eager.example)["output"]
    moved = np.abs(Arbiter(eager).run(eager.example, rounded=1)["output"] - exact)
    assert 0 < moved.max() <= 2**-23 * np.abs(exact).max()  # one rounding of the result
