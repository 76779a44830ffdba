"""Small ONNX bundles for tests, made without torch."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from trueline.bundle import Bundle, Contents, Dim, Golden, ProgramEntry, Signature, Summary, TensorSpec, seal
from trueline.serve.http import Request, Response

Array = npt.NDArray[np.generic]
ONNX_TYPES = {"FP32": TensorProto.FLOAT, "INT64": TensorProto.INT64, "FP16": TensorProto.FLOAT16}


def spec(name: str, *shape: int | str, datatype: str = "FP32") -> TensorSpec:
    return TensorSpec(name=name, datatype=datatype, shape=shape)


def graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    weights: dict[str, Array] | None = None,
) -> onnx.ModelProto:
    def info(one: TensorSpec) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(one.name, ONNX_TYPES[one.datatype], list(one.shape))

    initial = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    made = helper.make_graph(list(nodes), "g", [info(s) for s in inputs], [info(s) for s in outputs], initial)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def bundle(
    out: Path,
    model: onnx.ModelProto,
    signature: Signature,
    golden: Sequence[Golden],
    *,
    name: str = "tiny",
) -> Bundle:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "programs").mkdir()
        onnx.save(model, str(Path(folder) / "programs" / "model.onnx"))
        entry = ProgramEntry(
            format="onnx",
            file="programs/model.onnx",
            proven=True,
            seconds=0.0,
            probes=1,
            max_abs_error=0.0,
            versions={},
        )
        contents = Contents(
            name=name,
            signature=signature,
            programs=[(entry, Path(folder))],
            serve="onnx",
            golden=golden,
            evidence=[],
            lineage={},
            summary=Summary(recipe="none", recipe_digest="0"),
        )
        return seal(out, contents)


def double_plus(out: Path, *, wrong: bool = False, max_rows: int | None = None) -> Bundle:
    """y = 2x + 1 over rows of three; `wrong` seals a golden answer that no runtime gives."""
    x, y = spec("x", "batch", 3), spec("y", "batch", 3)
    two, one = np.float32(2), np.float32(1)
    nodes = [helper.make_node("Mul", ["x", "two"], ["t"]), helper.make_node("Add", ["t", "one"], ["y"])]
    model = graph(nodes, [x], [y], {"two": np.array(two), "one": np.array(one)})
    given = np.arange(12, dtype=np.float32).reshape(4, 3)
    answer = given * two + (5 if wrong else one)
    golden = [Golden(case="4", inputs={"x": given}, outputs={"y": answer.astype(np.float32)})]
    return bundle(out, model, Signature(inputs=(x,), outputs=(y,), dims={"batch": Dim(max=max_rows)}), golden)


class Answers:
    """An App that answers what it was made with."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def answer(self, request: Request) -> Any:
        return self._answer

    def refuse(self, path: str, status: int, message: str) -> Response:
        return Response(status, message.encode())
