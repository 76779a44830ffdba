"""A pruned and a taught model are trained as jobs, captured and proven like new models, and compete with the parent."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

import trueline
from trueline.bundle import open_bundle
from trueline.compress import search as searching
from trueline.compress.derive import bundles
from trueline.errors import UsageError
from trueline.runtime.open import open_program, replay
from worlds import compressible


def weights_of(path: Path) -> list[int]:
    return [numpy_helper.to_array(one).size for one in onnx.load(path).graph.initializer]


@pytest.mark.slow
@pytest.mark.long
def test_a_pruned_model_is_trained_proven_quantized_and_smaller(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    pytest.importorskip("torch_pruning", reason="torch-pruning is not installed: pip install 'trueline[prune]'")
    weights = trained.recipe.with_name("weights.safetensors")
    out = tmp_path / "pruned.bundle"
    found = trueline.compress(
        trained.bundle.path, prune="channels=0.3", checkpoint=weights, quantize=["static"], out=out
    )
    assert found.row.name == "prune:channels=0.3 + static:u8s8,minmax"
    assert found.row.quantized == 3
    assert found.row.loss is not None
    assert found.row.loss < 0.05
    pruned = open_bundle(tmp_path / "pruned.bundle.search" / "derived" / "0" / "drawn.bundle")
    assert {one.against for one in pruned.evidence()} == {"eager"}  # proven like any captured model
    assert sum(weights_of(pruned.program_path())) < 0.8 * sum(weights_of(trained.bundle.program_path()))
    sealed = open_bundle(out)
    replay(sealed, open_program(sealed))
    assert sealed.manifest.lineage.parent == trained.bundle.digest


@pytest.mark.slow
@pytest.mark.long
def test_masks_alone_say_that_they_are_not_faster(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "GAIN", 1e9)  # whatever the machine measures
    weights = trained.recipe.with_name("weights.safetensors")
    found = trueline.compress(
        trained.bundle.path, prune="linear=0.5", checkpoint=weights, out=tmp_path / "masked.bundle"
    )
    assert "masks alone are not faster" in found.row.why
    large = max(onnx.load(open_bundle(found.path).program_path()).graph.initializer, key=lambda one: len(one.raw_data))
    assert (numpy_helper.to_array(large) == 0).mean() == pytest.approx(0.5, abs=0.01)


DEEP = compressible.BRIEF_RECIPE.replace(
    "nn.MaxPool2d(2),\n", "nn.Sequential(*(nn.Conv2d(16, 16, 1) for _ in range(4))), nn.MaxPool2d(2),\n"
).replace('name = "drawn"', 'name = "deep"')


@pytest.mark.slow
@pytest.mark.long
def test_a_ready_student_is_taught_by_answers_and_outputs_inside_and_competes(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(DEEP)
    trained = trueline.train(recipe, workers="1", job_dir=tmp_path / "job")
    trueline.capture(recipe, trained.checkpoint, tmp_path / "deep.bundle", formats=["onnx"])
    found = trueline.compress(
        tmp_path / "deep.bundle", recipe=recipe, checkpoint=trained.checkpoint, drop="4=0.5", match=["4.1=4.3"],
        out=tmp_path / "small.bundle",
    )  # fmt: skip
    assert re.fullmatch(r"distill:[\d.]+,2 of 4,features", found.row.name)
    assert open_bundle(found.path).lineage()["compression"]["name"] == found.row.name
    parent, small = open_bundle(tmp_path / "deep.bundle"), open_bundle(tmp_path / "small.bundle")
    convolutions = [sum(size == 16 * 16 for size in weights_of(one.program_path("onnx"))) for one in (parent, small)]
    assert convolutions == [4, 2]
    replay(small, open_program(small))


def test_a_checkpoint_that_is_nowhere_is_asked_for(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"checkpoint.*is not found") as missing:
        bundles.find_checkpoint(trained.bundle, None, trained.bundle.path)
    assert "--checkpoint" in missing.value.hint


def test_a_student_with_other_inputs_is_refused(trained: compressible.Compressible, tmp_path: Path) -> None:
    from trueline.compress.planning import check_alike
    from worlds.bundles import double_plus

    other = double_plus(tmp_path / "other.bundle")
    with pytest.raises(UsageError, match="takes and returns"):
        check_alike(trained.bundle.signature, other.signature)
