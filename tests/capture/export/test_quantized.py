"""Linear layers of `quantize_dynamic` are captured as they are; layers that stay packed are refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.capture.export.quantized_layers import UnpackedLinear, unpack, unpack_layer
from trueline.errors import NotProven
from trueline.runtime.open import open_program
from worlds.recipes import untrained

PER_CHANNEL = torch.ao.quantization.per_channel_dynamic_qconfig


def quantize(model: nn.Module, kinds: object, dtype: torch.dtype = torch.qint8) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated, and models that use it are there
        found: nn.Module = torch.ao.quantization.quantize_dynamic(model.eval(), kinds, dtype=dtype)
        return found


def quantized() -> nn.Module:
    torch.manual_seed(0)
    return quantize(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), {nn.Linear})


@pytest.mark.jobs
def test_a_model_after_quantize_dynamic_is_proven_as_it_is(tmp_path: Path) -> None:
    done = capture(untrained(quantized, name="packed", examples=lambda: torch.randn(4, 8)), None, tmp_path / "b")
    assert [one.verdict for one in done.programs] == ["proven", "proven"]
    assert "finite" in done.programs[0].range  # torch's kernel refuses a NaN
    bundle, batch = open_bundle(tmp_path / "b"), torch.randn(5, 8)
    answer = open_program(bundle, "onnx").run({bundle.signature.inputs[0].name: batch.numpy()})
    assert np.allclose(next(iter(answer.values())), quantized()(batch).detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["per tensor", "per channel", "half", "with a ReLU"])
def test_an_unpacked_layer_rounds_as_the_packed_one_does(kind: str) -> None:
    torch.manual_seed(1)
    packed = _PACKED[kind]()
    for scale in (1.0, 1e-3, 1e-5, 1e-20, 0.0, 1e4, 1e30):
        for values in (torch.randn(7, 40), torch.rand(7, 40), -torch.rand(7, 40), torch.randint(-3, 4, (7, 40)) / 2):
            given = values * scale
            want, found = packed(given).detach(), unpack_layer(packed)(given)
            close = (1e-7 if kind != "half" else 1e-6) * float(want.abs().max())
            assert torch.allclose(found, want, rtol=0, atol=close), (scale, values[0, :3])


def test_numbers_on_the_border_between_two_steps_are_rounded_as_in_the_packed_layer() -> None:
    packed = _PACKED["per tensor"]()
    given = torch.tensor([-1.0, 0.0, 1.0, 0.5] * 10)[None]
    assert torch.allclose(unpack_layer(packed)(given), packed(given), rtol=0, atol=1e-6)


def test_the_users_model_has_its_packed_layers_back_after_an_export() -> None:
    model = quantized()
    before = dict(model.named_children())
    stack = ExitStack()
    stack.enter_context(unpack(model))
    assert isinstance(model[0], UnpackedLinear)
    stack.__exit__(KeyError, KeyError(), None)
    assert dict(model.named_children()) == before


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.memory = kind(8, 4, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.memory(x)[0]
        return found


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_an_unpacked_recurrent_layer_answers_as_the_packed_one(
    kind: type[nn.LSTM | nn.GRU], options: dict[str, Any]
) -> None:
    packed: Any = quantize(Recurrent(kind, **options), {kind}).memory
    x = torch.randn(3, 5, 8)
    (want, ends), (found, last) = packed(x), unpack_layer(packed)(x)
    again, _ = unpack_layer(packed)(x, ends)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-6)
    torch.testing.assert_close(last, ends, rtol=0, atol=1e-6)
    torch.testing.assert_close(again, packed(x, ends)[0], rtol=0, atol=1e-6)


@pytest.mark.long
def test_a_recurrent_model_is_proven_for_torchs_kernels_alone(tmp_path: Path) -> None:
    """What it carries is rounded to steps: a last digit beside torch's makes another step."""
    recipe = untrained(
        lambda: quantize(Recurrent(nn.LSTM), {nn.LSTM}),
        name="packed",
        examples=lambda: torch.randn(4, 5, 8),
        dynamic_shapes=lambda: {"x": {1: "length"}},
    )
    onnx, exported = capture(recipe, None, tmp_path / "b").programs
    assert "what memory carries is rounded to steps" in onnx.why
    assert exported.verdict == "proven"
    assert exported.max_abs_error == 0


@pytest.mark.filterwarnings("ignore")  # torch.ao is deprecated
def test_packed_weights_are_refused_by_the_layers_that_have_them(tmp_path: Path) -> None:
    def model() -> nn.Module:
        stub = torch.ao.quantization.QuantWrapper(nn.Sequential(nn.Linear(8, 4))).eval()
        stub.qconfig = torch.ao.quantization.default_qconfig
        prepared = torch.ao.quantization.prepare(stub)
        prepared(torch.randn(4, 8))
        return torch.ao.quantization.convert(prepared)

    recipe = untrained(model, name="packed", examples=lambda: torch.randn(4, 8))
    with pytest.raises(NotProven, match="weights of quantized layers are packed") as raised:
        capture(recipe, None, tmp_path / "b")
    assert "module.0._packed_params (LinearPackedParams)" in raised.value.message
    assert "trueline compress" in raised.value.hint


def _rectified() -> nn.Module:
    fused = torch.ao.nn.intrinsic.LinearReLU(nn.Linear(40, 9), nn.ReLU()).eval()
    fused[0].qconfig = fused.qconfig = torch.ao.quantization.default_dynamic_qconfig
    return torch.ao.nn.intrinsic.quantized.dynamic.LinearReLU.from_float(fused)


_PACKED: dict[str, Callable[[], nn.Module]] = {
    "per tensor": lambda: quantize(nn.Sequential(nn.Linear(40, 9)), {nn.Linear})[0],
    "per channel": lambda: quantize(nn.Sequential(nn.Linear(40, 9, bias=False)), {nn.Linear: PER_CHANNEL})[0],
    "half": lambda: quantize(nn.Sequential(nn.Linear(40, 9)), {nn.Linear}, torch.float16)[0],
    "with a ReLU": _rectified,
}
