"""What quantization ruins is named, and left out: layers, and light operators between them."""

from __future__ import annotations

from pathlib import Path

import pytest

import trueline
from trueline.compress import refine
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.measure.reference import open_reference
from trueline.compress.method import Budget, CompressMethod
from trueline.compress.sensitivity import rank_operators
from trueline.recipe.load import load_recipe
from worlds import compressible, uneven


@pytest.fixture(autouse=True)
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine, "TRIALS", 4)


@pytest.mark.jobs
def test_an_accuracy_that_falls_to_chance_names_the_layers_to_blame_and_leaves_them_out(tmp_path: Path) -> None:
    made = compressible.make(tmp_path)
    first, second = made.module[0], made.module[2]
    first.weight.data[0], first.bias.data[0] = 0.0, -1.0  # a channel that is dead, of which large weights are left
    second.weight.data[:, 0] = 20_000
    sealed = compressible.seal(made.module, tmp_path / "ruined.bundle", made.bundle.manifest.lineage.recipe_digest)
    found = trueline.compress(
        sealed.path, budget="accuracy=3%", quantize=["static"], target="size", out=tmp_path / "small.bundle"
    )
    rows = {row.name: row for row in found.rows}
    ruined = rows["static:u8s8,minmax"]
    assert ruined.verdict == "over budget"
    assert ruined.loss is not None
    assert ruined.loss > 0.3
    assert ruined.why.partition("change the answers most: ")[2].startswith("second (")
    spared = rows["static:u8s8,minmax without 1"]
    assert (spared.exclude, spared.verdict, spared.quantized) == (("second",), "offered", 2)
    assert "second" in found.row.exclude


@pytest.mark.long
def test_light_operators_are_ranked_with_the_heavy_ones_and_left_out(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    sealed = uneven.seal(trained, tmp_path / "bare.bundle", bare=True)
    found = trueline.compress(
        sealed.path, recipe=trained.recipe, budget="accuracy=3%", quantize=["static"], target="size",
        out=tmp_path / "small.bundle",
    )  # fmt: skip
    ruined = next(row for row in found.rows if row.name == "static:u8s8,minmax")
    assert ruined.verdict == "over budget"
    assert "all of a kind: Add (" in ruined.why
    spared = next(row for row in found.rows if row.name == "static:u8s8,minmax without 2")
    assert (set(spared.exclude), spared.verdict, spared.quantized) == ({"raise", "lower"}, "offered", 3)


def test_what_was_measured_before_a_kill_is_not_measured_again_and_what_had_no_time_is_known(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    import math

    sealed = uneven.seal(trained, tmp_path / "bare.bundle", bare=True)
    reference = open_reference(sealed, load_recipe(trained.recipe), Budget("accuracy", 0.03))
    program = ParentProgram(sealed.program_path("onnx"), tmp_path / "work", reference.calibration)
    program.work.mkdir()
    method, now = CompressMethod("static", ("u8s8", "minmax")), [0.0]

    def tick() -> float:
        now[0] += 1
        return now[0]

    first = rank_operators(reference, program, method, 6.0, tick)
    assert set(first.kinds) == {"Add", "Conv", "Gemm"}
    measured = {name for name, error in first.operators.items() if not math.isnan(error)}
    assert measured == {"raise", "lower"}
    again = rank_operators(reference, program, method, -1.0, tick)  # no time at all: what is known is on disk
    assert {name: error for name, error in again.operators.items() if not math.isnan(error)}.keys() >= measured
