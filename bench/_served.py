"""The models of the serving benchmark, made without torch and sealed with outputs of ONNX Runtime: they measure time
and prove nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from trueline.bundle import Bundle, Contents, Dim, Golden, ProgramEntry, Signature, Summary, TensorSpec, seal

Array = npt.NDArray[np.float32]


class Graph:
    """Nodes and weights of a model of one input `x` and one output `y`, drawn from a seed."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        fan_in = int(np.prod(shape[1:])) if len(shape) > 2 else shape[0]
        array = self.rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(fan_in))
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def node(self, kind: str, *inputs: str, out: str = "", **attributes: object) -> str:
        out = out or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], **attributes))
        return out

    def model(self, inputs: Sequence[int], outputs: Sequence[int]) -> onnx.ModelProto:
        def info(name: str, shape: Sequence[int]) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape])

        graph = helper.make_graph(self.nodes, "g", [info("x", inputs)], [info("y", outputs)], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def mlp(width: int = 256, layers: int = 1) -> onnx.ModelProto:
    """256 -> width (`layers` times, ReLU between) -> 10."""
    made, at, size = Graph(), "x", 256
    for _ in range(layers):
        at = made.node("Relu", made.node("MatMul", at, made.weight(size, width)))
        size = width
    made.node("MatMul", at, made.weight(size, 10), out="y")
    return made.model([256], [10])


def mean_of_image() -> onnx.ModelProto:
    """The mean of an image of 3 x 224 x 224: its only cost is the 602 kB of input."""
    made = Graph()
    made.node("ReduceMean", "x", out="y", axes=[1, 2, 3], keepdims=0)
    return made.model([3, 224, 224], [])


def resnet18() -> onnx.ModelProto:
    """ResNet-18's convolutions with random weights; its normalisations are folded away, as exporters do."""
    made = Graph()

    def conv(at: str, wide_in: int, wide: int, size: int, stride: int) -> str:
        pad = size // 2
        return made.node("Conv", at, made.weight(wide, wide_in, size, size), strides=[stride] * 2, pads=[pad] * 4)

    at = made.node("Relu", conv("x", 3, 64, 7, 2))
    at = made.node("MaxPool", at, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    wide_in = 64
    for stage, wide in enumerate((64, 128, 256, 512)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            beside = conv(at, wide_in, wide, 1, stride) if stride == 2 else at
            inner = conv(made.node("Relu", conv(at, wide_in, wide, 3, stride)), wide, wide, 3, 1)
            at = made.node("Relu", made.node("Add", inner, beside))
            wide_in = wide
    at = made.node("Flatten", made.node("GlobalAveragePool", at))
    made.node("MatMul", at, made.weight(512, 1000), out="y")
    return made.model([3, 224, 224], [1000])


def session(path: Path, threads: int = 1) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def sealed(folder: Path, name: str, model: onnx.ModelProto, *, rows: int = 2) -> Bundle:
    """`folder/name.bundle`."""
    source = folder / f"{name}.source"
    (source / "programs").mkdir(parents=True)
    path = source / "programs" / "model.onnx"
    onnx.save(model, str(path))
    shapes = [
        [size.dim_value for size in one.type.tensor_type.shape.dim][1:]
        for one in (model.graph.input[0], model.graph.output[0])
    ]
    x = np.random.default_rng(1).standard_normal((rows, *shapes[0]), dtype=np.float32)
    y = np.asarray(session(path).run(None, {"x": x})[0])
    specs = [
        TensorSpec(name=one, datatype="FP32", shape=("batch", *shape)) for one, shape in zip("xy", shapes, strict=True)
    ]
    entry = ProgramEntry(
        format="onnx", file="programs/model.onnx", proven=False, seconds=0.0, probes=0, max_abs_error=0.0, versions={}
    )
    contents = Contents(
        name=name,
        signature=Signature(inputs=(specs[0],), outputs=(specs[1],), dims={"batch": Dim()}),
        programs=[(entry, source)],
        serve="onnx",
        golden=[Golden(case=str(rows), inputs={"x": x}, outputs={"y": y})],
        evidence=[],
        lineage={},
        summary=Summary(recipe="bench", recipe_digest="0" * 64),
    )
    return seal(folder / f"{name}.bundle", contents)


def json_body(x: Array) -> bytes:
    """An infer request in JSON, with one decimal."""
    data = [round(float(value), 1) for value in x.ravel()]
    tensor = {"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": data}
    return json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode()


def binary_body(x: Array) -> tuple[bytes, str]:
    """An infer request with raw bytes both ways, and its header."""
    tensor = {"name": "x", "shape": list(x.shape), "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + x.tobytes(), f"inference-header-content-length: {len(head)}"
