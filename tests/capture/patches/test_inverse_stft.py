"""A signal that is made of a spectrum has torch's own numbers, at any length of either."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.patches.inverse_stft import invert


@pytest.mark.parametrize("more", [None, 0, -5, 3])
@pytest.mark.parametrize(
    ("hop", "width", "normalized"), [(8, 32, False), (10, 32, True), (7, 20, False), (16, 32, False)]
)
def test_a_spectrum_is_inverted_as_torch_does(hop: int, width: int, normalized: bool, more: int | None) -> None:
    window = torch.hann_window(width)
    for steps in (160, 171):
        signal = torch.randn(2, steps, generator=torch.Generator().manual_seed(steps))
        given = {"hop_length": hop, "win_length": width, "window": window, "normalized": normalized}
        spectrum = torch.stft(signal, 32, **given, return_complex=True) * (1 + 0.1j)  # type: ignore[arg-type]
        length = None if more is None else steps + more
        expected = torch.istft(spectrum, 32, **given, length=length)  # type: ignore[arg-type]
        torch.testing.assert_close(invert(spectrum, 32, **given, length=length), expected)  # type: ignore[arg-type]


class Louder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(x, 16, 4, window=self.window, return_complex=True)
        return torch.istft(spectrum * 2, 16, 4, window=self.window, length=x.shape[1])


def test_the_length_of_a_signal_stays_free() -> None:
    signal = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    model = Louder()
    exported = torch_export.export(model, EagerSession(model, signal, dynamic_shapes={"x": {1: "steps"}}).calling)
    program = exported.program.module(check_guards=False)
    for steps in (40, 64, 101):
        x = torch.randn(3, steps, generator=torch.Generator().manual_seed(steps))
        torch.testing.assert_close(program(x)[0], model(x))
