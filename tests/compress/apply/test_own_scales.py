"""A program that was trained for int8 keeps the scales that it was trained with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import trueline
from trueline.compress import ordering
from trueline.compress import search as searching
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.equalize import equalize
from trueline.compress.apply.graph import fold
from trueline.compress.apply.own_scales import find_rounded, find_steps, is_rounded, keeps_scales
from trueline.compress.apply.static import StaticQuantizer
from trueline.compress.measure.kernels import count_kernels
from trueline.compress.method import CompressMethod
from worlds import compressible, fake_quantized
from worlds.fake_quantized import STEPS

Programs = Callable[[onnx.ModelProto], ParentProgram]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> compressible.Compressible:
    return compressible.make(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    def make(model: onnx.ModelProto) -> ParentProgram:
        onnx.save(model, tmp_path / "parent.onnx")
        return ParentProgram(tmp_path / "parent.onnx", tmp_path, lambda: [{"input": compressible.images(32, 4)}])

    return make


def run(path: Path, inputs: np.ndarray, *, rewritten: bool = True) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    if not rewritten:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(["output"], {"input": inputs})[0]


def quantize(program: ParentProgram, *exclude: str) -> Path:
    out = program.work / f"out-{len(exclude)}" / "model.onnx"
    out.parent.mkdir()
    StaticQuantizer().apply(CompressMethod("static", ("s8s8", "entropy"), exclude), program, out)
    return out


def test_the_steps_that_a_program_rounds_to_are_read_from_it(
    trained: compressible.Compressible, programs: Programs
) -> None:
    program = programs(fake_quantized.make_program(trained.module))
    found = {value.made: value for value in find_rounded(onnx.load(fold(program)))}
    read = {name: (one.scale, one.zero, one.least, one.most) for name, one in found.items()}
    assert read == {name: (pytest.approx(scale), *rest) for name, (scale, *rest) in STEPS.items()}
    assert keeps_scales(program)


def test_its_own_scales_are_those_of_the_int8_program_whatever_ranges_are_named(
    trained: compressible.Compressible, programs: Programs
) -> None:
    program, images = programs(fake_quantized.make_program(trained.module)), compressible.images(64)
    out = quantize(program)
    stored = {one.name: numpy_helper.to_array(one) for one in onnx.load(out).graph.initializer}
    assert {name: float(stored[f"{name}.scale"]) for name in STEPS} == {
        name: pytest.approx(scale) for name, (scale, *_) in STEPS.items()
    }
    zeros = {name: (int(stored[f"{name}.zero"]), stored[f"{name}.zero"].dtype) for name in STEPS}
    assert zeros == {"r": (20, np.uint8), "s": (128, np.uint8), "t": (0, np.uint8)}
    want = run(program.path, images)
    assert np.abs(run(out, images, rewritten=False) - want).max() < 0.02 * np.abs(want).max()
    assert count_kernels(out).quantized == 3
    assert count_kernels(quantize(program, "second")).quantized == 2
    assert program.notes["static"].startswith("it was trained for int8")


def test_a_search_tries_one_way_of_a_program_that_has_its_own_scales(
    trained: compressible.Compressible, programs: Programs
) -> None:
    def list_static(model: onnx.ModelProto) -> int:
        return sum(one.kind == "static" for one in ordering.list_usual(programs(model), "latency"))

    assert list_static(fake_quantized.make_program(trained.module)) == 1
    for file in programs(onnx.ModelProto()).work.glob("folded/*"):
        file.unlink()
    assert list_static(onnx.load(trained.bundle.program_path("onnx"))) == 6


def test_a_bundle_that_was_trained_for_int8_is_compressed_with_its_scales_and_the_table_says_so(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "QUICK_S", 0.02)
    monkeypatch.setattr(searching, "FULL_S", 0.05)
    sealed = fake_quantized.seal(trained, tmp_path / "rounded.bundle")
    found = trueline.compress(
        sealed.path, recipe=trained.recipe, quantize=["static"], out=tmp_path / "small.bundle", target="size"
    )
    assert "the scales that it rounds by are kept" in found.as_text()
    assert found.row.quantized == 3
    assert found.row.note


def test_weights_on_steps_are_told_from_others_and_their_channels_stay(
    trained: compressible.Compressible, programs: Programs
) -> None:
    program = programs(fake_quantized.make_program(trained.module, rounding=False))
    assert is_rounded(program)
    assert not keeps_scales(program)
    assert equalize(program) == fold(program)
    draw = np.random.default_rng(0)
    grid = draw.integers(-100, 101, (8, 40)) * draw.uniform(0.001, 1, (8, 1))
    scales = find_steps(grid.astype(np.float32), 0)
    assert scales is not None
    assert np.allclose(np.rint(grid / scales[:, None]) * scales[:, None], grid, rtol=1e-5)
    assert find_steps(draw.standard_normal((8, 40)), 0) is None


def test_weights_as_training_leaves_them_are_on_no_steps(
    trained: compressible.Compressible, programs: Programs
) -> None:
    program = programs(onnx.load(trained.bundle.program_path("onnx")))
    assert not is_rounded(program)
    assert not keeps_scales(program)


class FakeQuantizing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input = torch.fake_quantize_per_tensor_affine(input, 0.02, 40, 0, 255)
        scale = torch.tensor([0.02, 0.03, 0.025, 0.04])
        zero = torch.zeros(4, dtype=torch.int32)
        weight = torch.fake_quantize_per_channel_affine(self.weight, scale, zero, 0, -127, 127)
        return nn.functional.linear(input, weight)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch's exporter
def test_what_capture_writes_of_a_model_with_fake_quantization_is_recognized(tmp_path: Path) -> None:
    from trueline.capture.patches.fake_quantization import keep_steps

    torch.manual_seed(0)
    path, given = tmp_path / "parent.onnx", torch.rand(5, 6)
    with keep_steps():
        torch.onnx.export(FakeQuantizing().eval(), (given,), path, dynamo=True, input_names=["input"], verbose=False)
    program = ParentProgram(path, tmp_path, list)
    (value,) = find_rounded(onnx.load(fold(program)))
    assert (value.scale, value.zero, value.least, value.most) == (pytest.approx(0.02), 40, 0, 255)
    assert keeps_scales(program)
