"""Masks of attention add infinity: a model with one is compressed like any other, and what is masked does not count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from trueline.bundle import Dim, Golden, Signature
from trueline.compress import api
from trueline.compress.apply import calibrate
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.quantizers import QUANTIZERS
from trueline.compress.measure.kernels import count_kernels
from trueline.compress.method import parse_method
from trueline.errors import BundleError
from worlds.bundles import bundle, graph, spec

LENGTH, WIDTH = 4, 16


def make_weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    weights = {name: 0.3 * random.standard_normal((WIDTH, WIDTH)).astype(np.float32) for name in "qkvo"}
    shares = np.zeros(WIDTH, np.float32)
    shares[::2] = -np.inf
    causal = np.triu(np.full((LENGTH, LENGTH), -np.inf, np.float32), 1)
    return {**weights, "causal": causal, "some": shares, "least": np.array(-np.inf, np.float32)}


def causal_attention() -> list[onnx.NodeProto]:
    """The mask is a constant that is added to the scores."""
    return [
        helper.make_node("MatMul", ["x", "q"], ["queries"]), helper.make_node("MatMul", ["x", "k"], ["keys"]),
        helper.make_node("Transpose", ["keys"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["queries", "turned"], ["scores"]),
        helper.make_node("Add", ["scores", "causal"], ["masked"]), helper.make_node("Softmax", ["masked"], ["shares"]),
        helper.make_node("MatMul", ["x", "v"], ["values"]), helper.make_node("MatMul", ["shares", "values"], ["mixed"]),
        helper.make_node("MatMul", ["mixed", "o"], ["y"]),
    ]  # fmt: skip


def padded_pool() -> list[onnx.NodeProto]:
    """Infinity is chosen by what the records have, between two layers that are rounded."""
    return [
        helper.make_node("MatMul", ["x", "q"], ["scores"]), helper.make_node("Greater", ["x", "zero"], ["there"]),
        helper.make_node("Where", ["there", "scores", "least"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["shares"]), helper.make_node("MatMul", ["shares", "o"], ["y"]),
    ]  # fmt: skip


def masked_layer() -> list[onnx.NodeProto]:
    """A constant mask between two layers that are rounded."""
    return [
        helper.make_node("MatMul", ["x", "q"], ["scores"]), helper.make_node("Add", ["scores", "some"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["shares"]), helper.make_node("MatMul", ["shares", "o"], ["y"]),
    ]  # fmt: skip


def make(nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    weights = {**make_weights(), "zero": np.array(-2.5, np.float32)}
    used = {name: weights[name] for name in {name for node in nodes for name in node.input} & weights.keys()}
    for number, node in enumerate(nodes):
        node.name = f"{node.op_type}_{number}"
    x, y = spec("x", "batch", LENGTH, WIDTH), spec("y", "batch", LENGTH, WIDTH)
    return graph(nodes, [x], [y], used)


def draw(seed: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).standard_normal((16, LENGTH, WIDTH)).astype(np.float32)}


def run(path: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, inputs)[0]


@pytest.mark.parametrize("way", ["static", "static:s8s8,entropy", "dynamic", "weights", "float16", "bfloat16"])
@pytest.mark.parametrize("nodes", [causal_attention, padded_pool, masked_layer])
def test_a_program_with_a_mask_is_compressed_and_answers_as_before(tmp_path: Path, way: str, nodes: object) -> None:
    path, work, out = tmp_path / "model.onnx", tmp_path / "work", tmp_path / "out" / "model.onnx"
    work.mkdir()
    out.parent.mkdir()
    onnx.save(make(nodes()), path)  # type: ignore[operator]
    method, program = parse_method(way), ParentProgram(path, work, lambda: [draw(0), draw(1)])
    QUANTIZERS[method.kind].apply(method, program, out)
    assert QUANTIZERS[method.kind].find_fault(count_kernels(out)) == ""
    want, have = run(path, draw(2)), run(out, draw(2))
    assert np.isfinite(have).all()
    assert np.linalg.norm(want - have) < 0.05 * np.linalg.norm(want)


def test_tensors_that_met_infinity_are_named_and_have_the_range_of_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(make(causal_attention()), path)
    program = ParentProgram(path, tmp_path, lambda: [draw(0)])
    assert calibrate.find_unbounded(program) == {"masked"}
    assert b"inf" not in calibrate.ranges(program, "minmax").read_bytes()


def test_a_mask_is_no_reason_to_refuse_a_bundle_and_an_infinite_weight_is(tmp_path: Path) -> None:
    def seal(model: onnx.ModelProto, name: str):
        path = tmp_path / f"{name}.onnx"
        onnx.save(model, path)
        golden = [Golden(case="16", inputs=draw(0), outputs={"y": run(path, draw(0))})]
        signature = Signature(
            inputs=(spec("x", "batch", LENGTH, WIDTH),), outputs=(spec("y", "batch", LENGTH, WIDTH),),
            dims={"batch": Dim()},
        )  # fmt: skip
        return bundle(tmp_path / f"{name}.bundle", model, signature, golden)

    for nodes in (causal_attention, padded_pool, masked_layer):
        api._check_parent(seal(make(nodes()), nodes.__name__))
    broken = make(causal_attention())
    for weight in broken.graph.initializer:
        if weight.name == "v":
            array = onnx.numpy_helper.to_array(weight).copy()
            array[0, 0] = np.inf
            weight.CopyFrom(onnx.numpy_helper.from_array(array, "v"))
    with pytest.raises(BundleError, match=r"weight 'v'.* has 1 values that are not finite"):
        api._check_parent(seal(broken, "broken"))
