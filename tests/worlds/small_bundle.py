"""A bundle small enough to seal in milliseconds: y = scale * x, as ONNX, without torch."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from trueline.bundle import (
    Bundle,
    Contents,
    Dim,
    Evidence,
    Golden,
    ProgramEntry,
    Signature,
    Summary,
    TensorSpec,
    seal,
)


def small_bundle(out: Path, *, name: str = "double", scale: float = 2.0) -> Bundle:
    x = np.ones((2, 4), np.float32)
    spec = {"datatype": "FP32", "shape": ("batch", 4)}
    signature = Signature(
        inputs=(TensorSpec(name="x", **spec),), outputs=(TensorSpec(name="y", **spec),), dims={"batch": Dim(max=8)}
    )
    entry = ProgramEntry(
        format="onnx",
        file="programs/model.onnx",
        proven=True,
        seconds=0.1,
        probes=1,
        max_abs_error=0.0,
        versions={},
    )
    evidence = Evidence(
        format="onnx", against="eager", probe="2", origin="given", inputs_sha256="0" * 64, shapes={}, verdict="agrees"
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "programs").mkdir()
        onnx.save(_program(scale), str(Path(folder) / entry.file))
        contents = Contents(
            name=name,
            signature=signature,
            programs=[(entry, Path(folder))],
            serve="onnx",
            golden=[Golden(case="2", inputs={"x": x}, outputs={"y": x * np.float32(scale)})],
            evidence=[evidence],
            lineage={"recipe": name},
            summary=Summary(recipe=name, recipe_digest="a" * 64),
        )
        return seal(out, contents)


def _program(scale: float) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x", "y")]
    constant = helper.make_tensor("scale", TensorProto.FLOAT, [], [scale])
    node = helper.make_node("Mul", ["x", "scale"], ["y"])
    graph = helper.make_graph([node], "double", ends[:1], ends[1:], [constant])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
