"""Small ONNX bundles, made without torch. onnx is imported only where it is used."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trueline.bundle import Bundle, Contents, Dim, Evidence, Golden, ProgramEntry, Signature, Summary, TensorSpec, seal
from trueline.bundle.values import Values

if TYPE_CHECKING:
    import onnx

Array = npt.NDArray[np.generic]


def spec(name: str, *shape: int | str, datatype: str = "FP32") -> TensorSpec:
    return TensorSpec(name=name, datatype=datatype, shape=shape)


def graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    weights: dict[str, Array] | None = None,
) -> onnx.ModelProto:
    from onnx import TensorProto, helper, numpy_helper

    types = {"FP32": TensorProto.FLOAT, "INT64": TensorProto.INT64, "FP16": TensorProto.FLOAT16}

    def info(one: TensorSpec) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(one.name, types[one.datatype], list(one.shape))

    initial = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    made = helper.make_graph(list(nodes), "g", [info(s) for s in inputs], [info(s) for s in outputs], initial)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def bundle(
    out: Path,
    model: onnx.ModelProto | bytes,
    signature: Signature,
    golden: Sequence[Golden],
    *,
    name: str = "tiny",
    evidence: Sequence[Evidence] = (),
    lineage: Mapping[str, Any] | None = None,
    recipe_digest: str = "0",
    values: Mapping[str, Values] | None = None,
    step: int | None = None,
) -> Bundle:
    """A sealed bundle of one program, which may be any bytes where it is never run."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "programs").mkdir()
        content = model if isinstance(model, bytes) else model.SerializeToString()
        (Path(folder) / "programs" / "model.onnx").write_bytes(content)
        entry = ProgramEntry(
            format="onnx",
            file="programs/model.onnx",
            proven=True,
            seconds=0.0,
            probes=1,
            max_abs_error=0.0,
            versions={},
            values=dict(values or {}),
        )
        contents = Contents(
            name=name,
            signature=signature,
            programs=[(entry, Path(folder))],
            serve="onnx",
            golden=golden,
            evidence=list(evidence),
            lineage=dict(lineage or {}),
            summary=Summary(recipe=name, recipe_digest=recipe_digest, step=step),
        )
        return seal(out, contents)


def double_plus(out: Path, *, wrong: bool = False, max_rows: int | None = None, values: Values | None = None) -> Bundle:
    """y = 2x + 1 over rows of three; `wrong` seals a golden record that no runtime reproduces. `values`: of x."""
    from onnx import helper

    x, y = spec("x", "batch", 3), spec("y", "batch", 3)
    two, one = np.float32(2), np.float32(1)
    nodes = [helper.make_node("Mul", ["x", "two"], ["t"]), helper.make_node("Add", ["t", "one"], ["y"])]
    model = graph(nodes, [x], [y], {"two": np.array(two), "one": np.array(one)})
    given = np.arange(12, dtype=np.float32).reshape(4, 3)
    answer = given * two + (5 if wrong else one)
    golden = [Golden(case="4", inputs={"x": given}, outputs={"y": answer.astype(np.float32)})]
    signature = Signature(inputs=(x,), outputs=(y,), dims={"batch": Dim(max=max_rows)})
    return bundle(out, model, signature, golden, values=None if values is None else {"x": values})


def store(folder: Path, *names: str, max_rows: int | None = None) -> Path:
    """A folder of `double_plus`: with "tiny", "pair/1" and "pair/2" one model, and another in two versions."""
    for name in names:
        double_plus(folder / f"{name}.bundle", max_rows=max_rows)
    return folder


def scaled(out: Path, *, name: str = "double", scale: float = 2.0) -> Bundle:
    """y = scale * x over rows of four, with evidence and a lineage."""
    from onnx import helper

    x, y, given = spec("x", "batch", 4), spec("y", "batch", 4), np.ones((2, 4), np.float32)
    model = graph([helper.make_node("Mul", ["x", "scale"], ["y"])], [x], [y], {"scale": np.array(scale, np.float32)})
    evidence = Evidence(
        format="onnx", against="eager", probe="2", origin="given", inputs_sha256="0" * 64, shapes={}, verdict="agrees"
    )
    return bundle(
        out,
        model,
        Signature(inputs=(x,), outputs=(y,), dims={"batch": Dim(max=8)}),
        [Golden(case="2", inputs={"x": given}, outputs={"y": given * np.float32(scale)})],
        name=name,
        evidence=[evidence],
        lineage={"recipe": name},
        recipe_digest="a" * 64,
    )


def tabled(
    out: Path, ids: Array, rows: Array, *, scale: float = 1.0, wrong: bool = False, step: int | None = None
) -> Bundle:
    """y = scale * the row at place x; the ids beside the rows make them a table. `wrong`: as in `double_plus`."""
    from onnx import helper

    x, y = spec("x", "batch", datatype="INT64"), spec("y", "batch", int(rows.shape[1]))
    nodes = [
        helper.make_node("Gather", ["rows", "x"], ["row"]), helper.make_node("Mul", ["row", "scale"], ["y"]),
        helper.make_node("Size", ["ids"], ["count"]),
    ]  # fmt: skip
    factor = np.float32(scale)
    model = graph(nodes, [x], [y], {"ids": ids, "rows": rows, "scale": np.array(factor)})
    given = np.arange(4)
    answer = rows[given] * factor + np.float32(5 if wrong else 0)
    golden = [Golden(case="4", inputs={"x": given}, outputs={"y": answer.astype(np.float32)})]
    signature = Signature(inputs=(x,), outputs=(y,), dims={"batch": Dim()})
    values = {"x": Values(low=0, high=len(rows) - 1)}
    return bundle(out, model, signature, golden, name="tabled", values=values, step=step)
