"""Weights that were trained for int8 are not rounded a second time by methods that round weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from trueline.compress.apply import dynamic
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.kept_steps import KEPT_STEPS
from trueline.compress.apply.own_scales import find_steps
from trueline.compress.apply.quantizers import QUANTIZERS
from trueline.compress.apply.saturation import NARROW
from trueline.compress.derive.qat import round_weight
from trueline.compress.method import CompressMethod, parse_method
from trueline.runtime.onnx import open_model
from trueline.runtime.session import DEFAULTS
from worlds import compressible


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> compressible.Compressible:
    return compressible.make(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def placed(trained: compressible.Compressible, tmp_path: Path) -> ParentProgram:
    """The program with the weights of its last layer on the steps of a training for int8."""
    last = trained.module[6]
    free = last.weight.detach().clone()
    with torch.no_grad():
        last.weight.copy_(round_weight(free))
    sealed = compressible.seal(
        trained.module, tmp_path / "placed.bundle", trained.bundle.manifest.lineage.recipe_digest
    )
    with torch.no_grad():
        last.weight.copy_(free)
    return ParentProgram(sealed.program_path("onnx"), tmp_path, list)


def apply(program: ParentProgram, name: str) -> tuple[Path, dict[str, Any]]:
    method: CompressMethod = parse_method(name)
    out = program.work / name.replace(":", "-") / "model.onnx"
    out.parent.mkdir()
    QUANTIZERS[method.kind].apply(method, program, out)
    return out, {one.name: numpy_helper.to_array(one) for one in onnx.load(out).graph.initializer}


def steps_of(program: ParentProgram) -> tuple[np.ndarray, np.ndarray]:
    """[256, 10] The steps of the last layer, and their scales."""
    [weight] = [one for one in onnx.load(program.path).graph.initializer if list(one.dims) == [10, 256]]
    scales = find_steps(numpy_helper.to_array(weight), 0)
    assert scales is not None
    return np.rint(numpy_helper.to_array(weight) / scales[:, None]).T, scales


@pytest.mark.parametrize("words", ["u8", "s8"])
def test_dynamic_multiplies_by_the_steps_that_the_training_has_left(
    placed: ParentProgram, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic, "saturates", lambda *, signed: False)
    steps, scales = steps_of(placed)
    path, made = apply(placed, f"dynamic:{words}")
    [weight] = [name for name in made if name.endswith("_quantized")]
    name = weight.removesuffix("_quantized")
    assert np.array_equal(made[weight].astype(int) - made[f"{name}_zero_point"], steps)
    np.testing.assert_allclose(made[f"{name}_scale"], scales, rtol=1e-6)
    assert placed.notes["dynamic"] == KEPT_STEPS
    answers = [
        open_model(one, DEFAULTS).run(None, {"input": compressible.images(16)})[0] for one in (placed.path, path)
    ]
    assert np.abs(answers[0] - answers[1]).max() < 0.02 * np.abs(answers[0]).max()


def test_where_int8_saturates_weights_of_seven_bits_are_rounded_anew_and_the_row_says_so(
    placed: ParentProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic, "saturates", lambda *, signed: True)
    _, made = apply(placed, "dynamic:s8")
    [weight] = [array for name, array in made.items() if name.endswith("_quantized")]
    assert np.abs(weight.astype(int)).max() <= 64
    assert placed.notes["dynamic"] == NARROW


def test_weights_in_blocks_of_8_bits_are_the_steps_that_the_training_has_left(placed: ParentProgram) -> None:
    steps, scales = steps_of(placed)
    path, made = apply(placed, "weights:int8")
    [blocks] = [array for name, array in made.items() if name.endswith("_Q8")]
    [found] = [array for name, array in made.items() if name.endswith("_scales")]
    assert np.array_equal(blocks.reshape(10, -1).T.astype(int) - 128, steps)
    np.testing.assert_allclose(found.reshape(10, -1), np.repeat(scales[:, None], 8, axis=1), rtol=1e-6)
    assert placed.notes["weights"] == KEPT_STEPS
    answers = [
        open_model(one, DEFAULTS).run(None, {"input": compressible.images(16)})[0] for one in (placed.path, path)
    ]
    assert np.abs(answers[0] - answers[1]).max() < 0.02 * np.abs(answers[0]).max()


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_sixteen_bits_hold_weights_nearer_to_their_step_than_to_any_other(placed: ParentProgram, kind: str) -> None:
    steps, scales = steps_of(placed)
    path, _ = apply(placed, kind)
    [narrow] = [one for one in onnx.load(path).graph.initializer if list(one.dims) == [10, 256]]
    wide = numpy_helper.to_array(narrow).astype(np.float64)
    assert np.array_equal(np.rint(wide.T / scales), steps)


@pytest.mark.parametrize("name", ["dynamic:u8", "weights:int8"])
def test_weights_that_lie_on_no_steps_are_rounded_as_ever(
    trained: compressible.Compressible, tmp_path: Path, name: str
) -> None:
    program = ParentProgram(trained.bundle.program_path("onnx"), tmp_path, list)
    apply(program, name)
    assert not program.notes[name.partition(":")[0]]
