"""Where no candidate is faster, the report says what a call costs and what int8 adds to it."""

from __future__ import annotations

import html
import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import trueline
from trueline.compress import search as searching
from trueline.compress.measure.kernels import count_kernels
from trueline.compress.measure.overhead import make_empty
from trueline.errors import BudgetMissed
from trueline.runtime.open import open_session
from worlds import compressible


@pytest.fixture(autouse=True)
def never_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "GAIN", 1e9)  # whatever the machine measures


def test_where_none_is_faster_the_table_ends_with_what_a_call_costs_and_how_much_is_in_int8(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    with pytest.raises(BudgetMissed) as missed:
        trueline.compress(
            trained.bundle.path, budget="accuracy=3%", quantize=["static", "float16"], out=tmp_path / "b.bundle"
        )
    report = json.loads((tmp_path / "b.bundle.search" / "report.json").read_text())
    why = report["none_is_faster"]
    assert f"none is faster: {why}" in missed.value.message
    assert why.startswith("at batch 1 a call of the parent takes ")
    assert "us if it computes nothing" in why
    assert "The best in int8, static:u8s8,minmax, has 3 of 3 heavy operators in int8 and takes " in why
    assert "--target size" in missed.value.hint
    assert f"None is faster: {html.escape(why)}" in (tmp_path / "b.bundle.search" / "report.html").read_text()


def test_where_a_candidate_is_smaller_as_asked_nothing_is_said_of_speed(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    found = trueline.compress(
        trained.bundle.path, budget="accuracy=3%", quantize=["static"], target="size", out=tmp_path / "b.bundle"
    )
    assert "none_is_faster" not in found.facts


def test_the_program_that_computes_nothing_is_called_as_its_parent_and_returns_the_same(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    bundle = trained.bundle
    inputs = {"input": compressible.images(2)}
    answers = open_session("onnx", bundle.program_path("onnx"), bundle.signature).run(inputs)
    path = tmp_path / "empty.onnx"
    onnx.save(make_empty(onnx.load(bundle.program_path("onnx")), answers), path)
    empty = open_session("onnx", path, bundle.signature).run(inputs)
    assert np.array_equal(empty["output"], answers["output"])
    assert count_kernels(path).operators <= 1 < count_kernels(bundle.program_path("onnx")).operators
