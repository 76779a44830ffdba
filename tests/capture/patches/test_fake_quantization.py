"""A model with fake-quantized values is captured for every batch, and each value falls on the step that torch takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from trueline.capture.export import torch_export
from trueline.capture.export.torch_export import LoadedProgram
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.runtime.open import open_session

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, .* are deprecated")]

SCALES, ZEROS = torch.tensor([0.1, 0.03, 0.7, 0.011]), torch.tensor([0, 3, -2, 0], dtype=torch.int32)
QUANTIZED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "8 bits": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
    "a zero point": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.03, 7, 0, 255),
    "16 bits": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.001, 0, -32768, 32767),
    "a scale in a tensor": lambda x: torch.fake_quantize_per_tensor_affine(x, SCALES[0], ZEROS[1], -128, 127),
    "there and back": lambda x: torch.quantize_per_tensor(x, 0.03, 7, torch.quint8).dequantize(),
    "channels there and back": lambda x: torch.dequantize(
        torch.quantize_per_channel(x, SCALES.double(), ZEROS, 1, torch.qint8)
    ),
    "whole steps": lambda x: torch.quantize_per_tensor(x, 0.1, -4, torch.qint8).int_repr(),
    "channels": lambda x: torch.fake_quantize_per_channel_affine(x, SCALES, ZEROS, 1, -128, 127),
}


class Quantized(torch.nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.quantize = QUANTIZED[how]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quantize(x)


@pytest.mark.jobs
@pytest.mark.parametrize("how", QUANTIZED)
def test_each_value_falls_on_the_step_that_torch_takes(how: str, tmp_path: Path) -> None:
    eager = EagerSession(Quantized(how).eval(), torch.randn(3, 4))
    exported = torch_export.export(eager.module, eager.calling)
    path = emit.emit(exported, tmp_path)
    assert "Scan" not in {node.op_type for node in onnx.load(str(path)).graph.node}
    halves = [np.arange(-4000, 4000) * np.float32(scale / 2) for scale in (*SCALES.tolist(), 0.001)]
    inputs = {"x": np.concatenate(halves).astype(np.float32).reshape(-1, 4)}
    expected = eager.run(inputs)["output"]
    for program in (LoadedProgram(exported), open_session("onnx", path, exported.signature)):
        np.testing.assert_array_equal(program.run(inputs)["output"], expected)


def test_other_dtypes_and_calls_outside_of_a_trace_are_torchs_own() -> None:
    before = torch.fake_quantize_per_tensor_affine, torch.quantize_per_tensor, torch.dequantize
    for how in ("8 bits", "there and back"):
        eager = EagerSession(Quantized(how).eval(), torch.randn(3, 4))
        torch_export.export(eager.module, eager.calling)
    assert (torch.fake_quantize_per_tensor_affine, torch.quantize_per_tensor, torch.dequantize) == before
