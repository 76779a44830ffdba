"""A second form of a program, for the sizes of one request, answers only once it was compared here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trueline.bundle import Dim, Golden, Signature
from trueline.errors import BundleError, RequestError, TruelineError
from trueline.runtime import open as opening
from trueline.runtime.open import open_session, replay
from trueline.runtime.openvino import FixedSizesSession, compile_fixed
from worlds.bundles import graph, spec

SIGNATURE = Signature(inputs=(spec("x", "batch", 2),), outputs=(spec("y", "batch", 2),), dims={"batch": Dim()})


class Form:
    """Doubles its input, off by `off`, and counts what it is asked."""

    format, signature = "openvino", SIGNATURE

    def __init__(self, off: float = 0.0) -> None:
        self.off, self.asked, self.released = np.float32(off), 0, 0

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        self.asked += 1
        return {"y": inputs["x"] * np.float32(2) + self.off}

    def release_memory(self) -> None:
        self.released += 1


def records(count: int) -> dict[str, Any]:
    return {"x": np.ones((count, 2), np.float32)}


def make_bundle(path: Path, *sizes: int) -> Any:
    path.write_bytes(b"weights")
    bounds = (np.full(1, 0.1), np.full(2, 0.1))
    golden = tuple(
        Golden(case=str(size), inputs=records(size), outputs={"y": records(size)["x"] * 2}, bounds={"y": bounds[:1]})
        for size in sizes
    )
    return SimpleNamespace(name="small", signature=SIGNATURE, golden=lambda: golden, program_path=lambda format: path)


def make_session(general: Form, compile_fixed: Callable[[], Any]) -> FixedSizesSession:
    return FixedSizesSession(general, compile_fixed, {"batch": 1})


def test_the_form_for_fixed_sizes_answers_these_alone_and_only_after_the_golden_records(tmp_path: Path) -> None:
    general, fixed = Form(), Form()
    session = make_session(general, lambda: fixed)
    session.run(records(1))
    assert (general.asked, fixed.asked) == (1, 0)
    replay(make_bundle(tmp_path / "model.onnx", 1, 3), session)
    assert (general.asked, fixed.asked) == (3, 1)  # each form was compared, the general one at both sizes
    session.run(records(1))
    assert (general.asked, fixed.asked) == (3, 2)
    session.run(records(3))
    assert (general.asked, fixed.asked) == (4, 2)
    session.release_memory()
    assert (general.released, fixed.released) == (1, 1)


def test_a_form_that_answers_within_what_was_accepted_is_admitted_and_another_is_not(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "model.onnx", 1, 3)
    for off, admitted in ((0.09, True), (0.2, False)):
        session = make_session(Form(), lambda off=off: Form(off))
        replay(bundle, session)
        assert session.is_admitted == admitted
        assert abs(float(session.run(records(1))["y"][0, 0]) - 2 - (off if admitted else 0)) < 1e-6


def test_without_a_golden_record_of_its_sizes_or_where_it_cannot_be_made_the_general_form_answers(
    tmp_path: Path,
) -> None:
    def broken() -> Form:
        raise BundleError("no program for these sizes")

    for sizes, make in (((3,), Form), ((1, 3), broken)):
        session = make_session(Form(), make)
        replay(make_bundle(tmp_path / "model.onnx", *sizes), session)
        assert not session.is_admitted
        assert session.run(records(1))["y"].tolist() == [[2.0, 2.0]]


def test_weights_above_the_bound_are_not_held_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    session = make_session(Form(), lambda: made.append(1) or Form())
    monkeypatch.setattr(opening, "MOST_BYTES", 6)
    replay(make_bundle(tmp_path / "model.onnx", 1), session)
    assert not session.is_admitted
    assert not made
    monkeypatch.setattr(opening, "MOST_BYTES", 7)
    replay(make_bundle(tmp_path / "model.onnx", 1), session)
    assert session.is_admitted


def test_a_request_outside_the_signature_is_refused_by_the_general_form_in_its_words(tmp_path: Path) -> None:
    class Strict(Form):
        def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
            SIGNATURE.check(inputs)
            return super().run(inputs)

    session = make_session(Strict(), Form)
    replay(make_bundle(tmp_path / "model.onnx", 1), session)
    with pytest.raises(RequestError, match="missing input 'x'"):
        session.run({})
    with pytest.raises(RequestError, match="input 'x' has 1 dimensions"):
        session.run({"x": np.ones(2, np.float32)})


def test_openvino_compiles_a_program_for_the_sizes_alone_and_answers_the_same(tmp_path: Path) -> None:
    if importlib.util.find_spec("openvino") is None:
        pytest.skip("openvino is not installed: pip install 'trueline[openvino]'")
    import onnx
    from onnx import helper

    weight = np.random.default_rng(0).random((2, 2), np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    onnx.save(graph(nodes, list(SIGNATURE.inputs), list(SIGNATURE.outputs), {"w": weight}), tmp_path / "model.onnx")
    fixed = compile_fixed(tmp_path / "model.onnx", SIGNATURE, {"batch": 1})
    general = open_session("openvino", tmp_path / "model.onnx", SIGNATURE)
    assert np.allclose(fixed.run(records(1))["y"], general.run(records(1))["y"], rtol=1e-6)
    with pytest.raises(TruelineError):
        fixed.run(records(3))
