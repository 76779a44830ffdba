"""A layer that was left out of int8 is computed in float32, by the runtime too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import trueline
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.kept_floats import keep_floats
from trueline.compress.apply.quantizers import QUANTIZERS
from trueline.compress.measure.kernels import count_kernels
from trueline.compress.method import CompressMethod
from trueline.runtime.open import open_session
from worlds import compressible


@pytest.fixture(scope="module")
def ruined(tmp_path_factory: pytest.TempPathFactory) -> compressible.Compressible:
    """A bundle whose second convolution int8 ruins: it has large weights for a channel that is dead."""
    made = compressible.make(tmp_path_factory.mktemp("trained"))
    first, second = made.module[0], made.module[2]
    first.weight.data[0], first.bias.data[0] = 0.0, -1.0
    second.weight.data[:, 0] = 20_000
    digest = made.bundle.manifest.lineage.recipe_digest
    sealed = compressible.seal(made.module, made.recipe.parent / "ruined.bundle", digest)
    return compressible.Compressible(sealed, made.recipe, made.module)


def quantize(bundle: trueline.Bundle, folder: Path, *exclude: str) -> Path:
    """The program in int8 without `exclude`. A reshape takes the place of its Flatten, as an exported program has it:
    ONNX Runtime moves the rounding of the last layer's input through it, to the second convolution."""
    folder.mkdir(parents=True, exist_ok=True)
    model, path = onnx.load(bundle.program_path("onnx")), folder / "model.onnx"
    [flat] = [node for node in model.graph.node if node.op_type == "Flatten"]
    flat.CopyFrom(helper.make_node("Reshape", [flat.input[0], "sizes"], list(flat.output), name="flat"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1, 256]), "sizes"))
    onnx.save(model, path)
    program = ParentProgram(path, folder, lambda: [{"input": compressible.images(64, seed)} for seed in (1, 2)])
    out = folder / "made" / "model.onnx"
    out.parent.mkdir()
    QUANTIZERS["static"].apply(CompressMethod("static", ("u8s8", "minmax"), exclude), program, out)
    return out


@pytest.mark.parametrize("name", ["first", "second", "last"])
def test_a_layer_that_is_left_out_is_not_rounded_by_the_runtime(
    ruined: compressible.Compressible, tmp_path: Path, name: str
) -> None:
    kernels = count_kernels(quantize(ruined.bundle, tmp_path, name), "onnx")
    assert (kernels.quantized, kernels.floating) == (2, 1)


def test_a_convolution_that_int8_ruins_answers_as_before_once_it_is_left_out(
    ruined: compressible.Compressible, tmp_path: Path
) -> None:
    path = quantize(ruined.bundle, tmp_path, "second")
    signature, inputs = ruined.bundle.signature, {"input": compressible.images(64)}
    want = open_session("onnx", ruined.bundle.program_path("onnx"), signature).run(inputs)["output"]
    have = open_session("onnx", path, signature).run(inputs)["output"]
    assert np.abs(want - have).max() < 0.05 * np.abs(want).max()


def test_layers_in_int8_and_in_float32_alone_are_left_as_they_are(
    ruined: compressible.Compressible, tmp_path: Path
) -> None:
    for exclude in ((), ("second", "last")):
        made = onnx.load(quantize(ruined.bundle, tmp_path / "-".join(exclude), *exclude))
        before = made.SerializeToString()
        keep_floats(made)
        assert made.SerializeToString() == before
        assert sum(node.op_type == "Sum" for node in made.graph.node) == bool(exclude)


@pytest.mark.jobs
def test_a_search_offers_the_program_without_the_layer_to_blame_and_seals_one_that_leaves_it_out(
    ruined: compressible.Compressible, tmp_path: Path
) -> None:
    found = trueline.compress(
        ruined.bundle.path, budget="accuracy=3%", target="size", quantize=["static"], out=tmp_path / "small.bundle"
    )
    [alone] = [row for row in found.rows if row.exclude == ("second",)]
    assert (alone.verdict, alone.quantized, alone.floating) == ("offered", 2, 1)
    assert "second" in found.row.exclude
