"""OpenVINO's programs compete with ONNX Runtime's: proven, sealed and served in the runtime that was measured."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import trueline
from trueline.bundle import open_bundle
from trueline.compress import search as searching
from trueline.compress.apply.openvino import has_attention
from trueline.errors import BudgetMissed, NotProven
from trueline.runtime.open import open_program, replay
from worlds import compressible


@pytest.mark.slow
def test_a_program_for_openvino_is_sealed_in_its_format_and_proven_by_what_was_accepted(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    pytest.importorskip("nncf", reason="NNCF is not installed: pip install 'trueline[openvino]'")
    found = trueline.compress(
        trained.bundle.path, quantize=["openvino"], budget="accuracy=5%", target="size", out=tmp_path / "ov.bundle"
    )
    assert found.row.name == "openvino:mixed"
    assert (found.row.quantized, found.row.floating) == (3, 0)
    assert found.row.memory_bytes
    sealed = open_bundle(tmp_path / "ov.bundle")
    assert [one.format for one in sealed.manifest.programs] == ["openvino"]
    assert sealed.manifest.serve == "openvino"
    assert {one.format for one in sealed.evidence()} == {"openvino"}
    session = open_program(sealed)
    replay(sealed, session)
    path = sealed.program_path()
    model = onnx.load(path)
    weight = next(one for one in model.graph.initializer if one.data_type == TensorProto.INT8 and len(one.dims) == 4)
    array = onnx.numpy_helper.to_array(weight).copy()
    array[:] = -array
    weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
    onnx.save(model, path)
    with pytest.raises(NotProven):  # the golden records tell this program from the one that was accepted
        replay(sealed, open_program(sealed))


def test_a_runtime_that_is_not_installed_is_a_row_that_names_the_extra(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(BudgetMissed) as missed:
        trueline.compress(trained.bundle.path, quantize=["openvino"], budget="accuracy=5%", out=tmp_path / "b")
    assert "openvino:mixed" in missed.value.message
    rows = searching.read_rows(tmp_path / "b.search" / "rows.jsonl")
    [why] = [row.why for row in rows if row.kind == "openvino"]
    assert "nncf is not installed" in why
    assert "trueline[openvino]" in why


def test_a_model_with_a_softmax_between_activations_is_quantized_as_a_transformer() -> None:
    def make(second: str) -> onnx.ModelProto:
        nodes = [
            helper.make_node("MatMul", ["x", "x"], ["scores"]),
            helper.make_node("Softmax", ["scores"], ["shares"]),
            helper.make_node("MatMul", ["shares", second], ["y"]),
        ]
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in "xy")
        weight = onnx.numpy_helper.from_array(np.eye(2, dtype=np.float32), "w")
        return helper.make_model(helper.make_graph(nodes, "g", [x], [y], [weight]))

    assert has_attention(make("x"))
    assert not has_attention(make("w"))
