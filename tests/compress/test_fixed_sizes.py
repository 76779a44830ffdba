"""A candidate has a second form, for the sizes of a single record, where that is surely faster and answers the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trueline
from trueline.bundle import open_bundle
from trueline.bundle.describe import describe
from trueline.compress import fixed_sizes
from trueline.compress import search as searching
from trueline.compress.fixed_sizes import try_fixed
from trueline.compress.measure.reference import Reference, open_reference
from trueline.compress.measure.single_records import find_usual_sizes, run_alone
from trueline.compress.method import Budget
from trueline.recipe.load import load_recipe
from trueline.runtime.open import open_program, replay
from trueline.runtime.openvino import FixedSizesSession
from worlds import compressible


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> compressible.Compressible:
    return compressible.make(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def reference(trained: compressible.Compressible) -> Reference:
    return open_reference(trained.bundle, load_recipe(trained.recipe), Budget("accuracy", 0.02))


class Changed:
    """The parent's program; `change` is what its answers to single records become."""

    def __init__(self, reference: Reference, change: Any) -> None:
        self._session, self._change = reference.session, change
        self.format, self.signature = "openvino", reference.session.signature
        self.asked = 0

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        self.asked += 1
        assert len(inputs["input"]) == 1
        return {"output": self._change(self._session.run(inputs)["output"])}


def attempt(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, *, change: Any = lambda y: y, speed: Any = (1.2, 1.1),
    off: float = 0.5, most_s: float = 60.0,
) -> tuple[fixed_sizes.FixedTrial, Changed]:  # fmt: skip
    """`off`: how far the general form's answers are from the parent's."""
    fixed = Changed(reference, change)
    monkeypatch.setattr(fixed_sizes, "compile_fixed", lambda path, signature, sizes: fixed)
    monkeypatch.setattr(fixed_sizes, "compare_speed", lambda *_: speed)
    answers = dataclasses.replace(
        reference.answers, outputs=[{"output": one["output"] + np.float32(off)} for one in reference.answers.outputs]
    )
    path = reference.bundle.program_path("onnx")
    return try_fixed(reference, path, reference.session, answers, seconds=0.1, most_s=most_s), fixed


def test_a_form_that_is_faster_and_answers_like_the_other_is_taken_after_all_records_were_asked_alone(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, fixed = attempt(reference, monkeypatch)
    assert trial.sizes == {"batch": 1}
    assert isinstance(trial.session, FixedSizesSession)
    assert trial.session.is_admitted
    assert fixed.asked == reference.count
    assert trial.note == "compiled once more for batch 1: 1.20 times as fast there"


@pytest.mark.parametrize("speed", [(1.049, 1.04), (1.2, 1.0)])
def test_a_form_that_is_not_faster_by_a_twentieth_for_sure_is_not_taken(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, speed: tuple[float, float]
) -> None:
    trial, fixed = attempt(reference, monkeypatch, speed=speed)
    assert (trial.sizes, trial.session, fixed.asked) == ({}, reference.session, 0)
    assert "times as fast there: not used" in trial.note


def test_a_form_that_differs_by_more_than_what_was_accepted_or_loses_decisions_is_not_taken(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, _ = attempt(reference, monkeypatch, change=lambda y: y - np.float32(0.2))  # 0.7 from the general form
    assert trial.sizes == {}
    assert "answers otherwise" in trial.note
    trial, _ = attempt(reference, monkeypatch, change=lambda y: y + np.float32(0.2))  # 0.3, and 0.5 was accepted
    assert trial.sizes == {"batch": 1}
    trial, _ = attempt(
        reference, monkeypatch, change=lambda y: np.float32(5e3) - y, off=1e4
    )  # inside of a tolerance, and wrong
    assert trial.sizes == {}
    assert "loses" in trial.note


def test_weights_above_the_bound_and_records_that_take_too_long_have_no_second_form(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, _ = attempt(reference, monkeypatch, most_s=0.0)
    assert trial.sizes == {}
    assert f"to answer {reference.count} records one by one would take" in trial.note
    monkeypatch.setattr(fixed_sizes, "MOST_BYTES", 1)
    trial, fixed = attempt(reference, monkeypatch)
    assert (trial.sizes, fixed.asked) == ({}, 0)


def test_the_usual_sizes_are_those_of_most_records_each_alone(reference: Reference) -> None:
    assert find_usual_sizes(reference.session.signature, reference.batches) == {"batch": 1}
    inputs = reference.batches[0].inputs
    alone, together = run_alone(reference.session, inputs), reference.session.run(inputs)
    assert np.allclose(alone["output"], together["output"], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_bundle_with_a_second_form_says_so_proves_it_and_answers_single_records_by_it(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nncf", reason="NNCF is not installed: pip install 'trueline[openvino]'")
    for name, value in (("QUICK_S", 0.02), ("FULL_S", 0.05)):
        monkeypatch.setattr(searching, name, value)
    monkeypatch.setattr(fixed_sizes, "compare_speed", lambda *_: (1.2, 1.1))
    found = trueline.compress(trained.bundle.path, quantize=["openvino"], out=tmp_path / "two.bundle")
    sealed = open_bundle(found.path)
    assert sealed.program().fixed == found.row.fixed == {"batch": 1}
    assert "compiled once more for batch 1 alone" in describe(sealed)
    assert any(one.probe.endswith("one by one, compiled for batch 1") for one in sealed.evidence())
    session = open_program(sealed)
    assert isinstance(session, FixedSizesSession)
    assert not session.is_admitted
    replay(sealed, session)
    assert session.is_admitted
    image = compressible.images(1)
    want, have = session.general.run({"input": image}), session.run({"input": image})
    bound = float(sealed.golden()[0].bounds["output"][0][0])
    assert np.abs(want["output"] - have["output"]).max() <= bound
    without = trueline.compress(
        trained.bundle.path, quantize=["openvino"], target="memory", out=tmp_path / "one.bundle"
    )
    assert without.row.fixed == {}
    assert (without.row.memory_bytes or 0) < (found.row.memory_bytes or 0)
