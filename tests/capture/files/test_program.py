"""A program that comes as a file becomes a bundle that answers as the file does; nothing is unpickled."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.capture.api import capture_file
from trueline.cli import app
from trueline.errors import BundleError, CaptureError, NotProven, RequestError, UsageError
from trueline.runtime.open import open_program, replay
from worlds.models import ShapeBranch

pytestmark = pytest.mark.slow  # exports programs


def onnx_file(path: Path, *, op: str = "MatMul", batch: int | str = "n", domain: str = "") -> Path:
    """x [n, 4] times a matrix."""
    weights = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "w"], ["y"], domain=domain)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 3])],
        [numpy_helper.from_array(weights, "w")],
    )
    opsets = [helper.make_opsetid("", 17)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), str(path))
    return path


class Even(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] % 2 == 0 else x + 1


def exported(path: Path, module: nn.Module) -> Path:
    free = ({0: torch.export.Dim.DYNAMIC},)
    torch.export.save(torch.export.export(module, (torch.randn(4, 3),), dynamic_shapes=free), path)
    return path


def test_an_onnx_file_is_proven_against_the_reference_implementation(tmp_path: Path) -> None:
    file = onnx_file(tmp_path / "my model.onnx")
    captured = capture_file(file, tmp_path / "b")
    assert [(one.format, one.verdict) for one in captured.programs] == [("onnx", "proven")]
    bundle = open_bundle(tmp_path / "b")
    assert bundle.name == "my_model"
    assert [spec.shape for spec in (*bundle.signature.inputs, *bundle.signature.outputs)] == [
        ("batch", 4),
        ("batch", 3),
    ]
    assert {one.against for one in bundle.evidence()} == {f"onnx.reference {onnx.__version__}"}
    assert {1, 2, 17} <= {one.shapes["x"][0] for one in bundle.evidence()}
    assert bundle.lineage()["file"]["name"] == "my model.onnx"
    assert len(bundle.lineage()["file"]["sha256"]) == 64
    assert list(replay(bundle, open_program(bundle))) == ["batch-1", "batch-2", "batch-5"]


def test_a_file_without_a_free_batch_keeps_its_sizes(tmp_path: Path) -> None:
    capture_file(onnx_file(tmp_path / "m.onnx", batch=2), tmp_path / "b")
    session = open_program(open_bundle(tmp_path / "b"))
    assert session.run({"x": np.ones((2, 4), np.float32)})["y"].shape == (2, 3)
    with pytest.raises(RequestError, match="has size 3 in dimension 0, expected 2"):
        session.run({"x": np.ones((3, 4), np.float32)})


def test_a_file_that_claims_what_it_cannot_answer_is_refused(tmp_path: Path) -> None:
    file = onnx_file(tmp_path / "m.onnx", op="Add")  # 4 and 3 do not broadcast, at any batch
    with pytest.raises((NotProven, CaptureError)):
        capture_file(file, tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_an_operator_that_no_runtime_has_is_named(tmp_path: Path) -> None:
    file = onnx_file(tmp_path / "m.onnx", op="Mine", domain="com.example")
    with pytest.raises(CaptureError, match=r"com\.example"):
        capture_file(file, tmp_path / "b")


def test_an_exported_program_keeps_the_range_that_it_was_exported_with(tmp_path: Path) -> None:
    captured = capture_file(exported(tmp_path / "m.pt2", ShapeBranch()), tmp_path / "b")
    assert {one.format: one.verdict for one in captured.programs} == {"onnx": "proven", "torch_export": "proven"}
    bundle = open_bundle(tmp_path / "b")
    for format in ("onnx", "torch_export"):
        session = open_program(bundle, format)
        assert (session.run({"x": np.zeros((6, 3), np.float32)})["output"] == 1).all()
        with pytest.raises(RequestError, match="at most 6"):
            session.run({"x": np.zeros((7, 3), np.float32)})


class Beside(nn.Module):
    def __init__(self, other: object) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        return x + 1, x.shape[0] if self.other == "size" else self.other


@pytest.mark.parametrize("other", [None, 3, "size"])
def test_an_exported_program_that_returns_more_than_tensors_is_refused(tmp_path: Path, other: object) -> None:
    file = exported(tmp_path / "m.pt2", Beside(other))
    with pytest.raises(CaptureError, match="not tensors alone"):
        capture_file(file, tmp_path / "b", formats=["onnx"])


def test_an_exported_program_with_a_guard_that_is_no_range_is_refused_with_the_guard(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="a guard that is no range"):
        capture_file(exported(tmp_path / "m.pt2", Even()), tmp_path / "b")


@pytest.mark.parametrize("name", ["model.pt", "model.onnx", "model.pt2"])
def test_a_pickle_is_refused_by_name_whatever_it_is_called(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / name)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was unpickled"))
    with pytest.raises(UsageError, match="is a pickle") as refused:
        capture_file(tmp_path / name, tmp_path / "b")
    assert "weights_only=True" in refused.value.hint


def test_a_file_that_is_no_program_or_torn_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"nothing of the kind")
    with pytest.raises(CaptureError, match=r"m\.onnx"):
        capture_file(tmp_path / "m.onnx", tmp_path / "b")
    file = exported(tmp_path / "m.pt2", ShapeBranch())
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises((UsageError, BundleError, CaptureError), match=r"m\.pt2"):
        capture_file(file, tmp_path / "b")
    file.write_bytes(b"\x00\x01" * 500)
    with pytest.raises(BundleError, match=r"m\.pt2 is no zip archive"):
        capture_file(file, tmp_path / "b")


def test_the_command_line_takes_a_file_and_prints_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = onnx_file(tmp_path / "m.onnx"), tmp_path / "out.bundle"
    assert app.run(["capture", str(file), "-o", str(out), "--quiet", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["serve"] == "onnx"
    (program,) = said["programs"]
    assert (program["format"], program["verdict"], program["emitted"]) == ("onnx", "proven", True)
    assert program["seconds"] > 0
    assert program["size_bytes"] > 0
    assert program["probes"] > 5
    assert open_bundle(out).lineage()["attempts"] == [program]
    assert app.run(["bundle", "inspect", str(out), "--graph"]) == 0
    assert "y = MatMul (x, w)" in capsys.readouterr().out
    assert app.run(["capture", str(file), "checkpoint", "-o", str(out), "--quiet"]) == 2
    assert "takes no checkpoint" in capsys.readouterr().err
    (tmp_path / "recipe.py").write_text("")
    assert app.run(["capture", str(tmp_path / "recipe.py"), "--quiet"]) == 2
    assert "name the checkpoint" in capsys.readouterr().err
