"""A model's checks of values are made in its ONNX program, and a Fourier transform has the length asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.errors import TruelineError
from trueline.runtime.open import open_program, open_session
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


class Widens(nn.Module):
    """A spectrum becomes a signal that is longer than the spectrum is."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.hfft(x, dim=1)


def test_a_transform_of_a_length_of_its_own_is_answered_for_every_length(tmp_path: Path) -> None:
    eager = EagerSession(Widens().eval(), torch.randn(3, 6, 4), dynamic_shapes={"x": {1: "length"}})
    exported = torch_export.export(eager.module, eager.calling)
    session = open_session("onnx", emit.emit(exported, tmp_path), exported.signature)
    for batch, length in ((1, 5), (3, 8), (2, 33)):
        x = {"x": torch.randn(batch, length, 4).numpy()}
        found, expected = session.run(x)["output"], eager.run(x)["output"]
        assert found.shape == expected.shape
        assert np.allclose(found, expected, rtol=1e-4, atol=1e-5)
