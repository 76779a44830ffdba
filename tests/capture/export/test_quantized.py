"""Layers that torch quantized by itself are refused by name, with what to do instead."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from trueline.capture.api import capture
from trueline.errors import NotProven
from worlds.recipes import untrained


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated, and models that use it are there
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
        found: nn.Module = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        return found


def test_packed_weights_are_refused_by_the_layers_that_have_them(tmp_path: Path) -> None:
    recipe = untrained(quantized, name="packed", examples=lambda: torch.randn(4, 8))
    with pytest.raises(NotProven, match="weights of quantized layers are packed") as raised:
        capture(recipe, None, tmp_path / "b")
    assert "0._packed_params (LinearPackedParams)" in raised.value.message
    assert "before quantize_dynamic" in raised.value.hint
