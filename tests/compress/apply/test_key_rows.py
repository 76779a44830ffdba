"""Keys of attention stay in rows: the Transpose in front of a product is split, and what is computed stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from trueline.compress.apply.key_rows import keep_rows

KEYS, QUERIES = [2, 5, 3, 4], [2, 3, 6, 4]
"""[batch, keys, heads, size] and [batch, heads, queries, size]"""
SCALES: dict[str, Any] = {
    "one": np.array(0.05, np.float32),
    "each": np.array([0.05, 0.1, 0.02, 0.03, 0.04], np.float32),
}


def attention(*, rounded: str = "", factor: int = 1, returned: bool = False) -> Any:
    """The product of queries and keys: by which of SCALES keys are rounded, which factor they are, and whether the
    turned keys are an output as well."""
    nodes, constants, turned = [helper.make_node("Transpose", ["keys"], ["turned"], perm=[0, 2, 3, 1])], [], "turned"
    if rounded:
        scale = SCALES[rounded]
        zero = np.zeros(scale.shape, np.int8)
        constants = [numpy_helper.from_array(scale, "scale"), numpy_helper.from_array(zero, "zero")]
        for kind, given, turned in (("QuantizeLinear", "turned", "q"), ("DequantizeLinear", "q", "dq")):
            nodes.append(helper.make_node(kind, [given, "scale", "zero"], [turned]))
            if scale.shape:
                nodes[-1].attribute.append(helper.make_attribute("axis", 3))
    factors = ["queries", turned] if factor == 1 else [turned, "queries"]
    nodes.append(helper.make_node("MatMul", factors, ["scores"]))
    shapes = {"keys": KEYS, "queries": QUERIES if factor == 1 else [2, 3, 5, 4]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    found = ["scores", "turned"] if returned else ["scores"]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in found]
    graph = helper.make_graph(nodes, "attention", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def compute(model: Any) -> list[Any]:
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    draw = np.random.default_rng(0)
    found: list[Any] = session.run(
        None, {one.name: draw.standard_normal(one.shape, np.float32) for one in session.get_inputs()}
    )
    return found


def list_moves(model: Any) -> list[list[int]]:
    return [list(node.attribute[0].ints) for node in model.graph.node if node.op_type == "Transpose"]


@pytest.mark.parametrize("rounded", ["", "one"])
def test_keys_move_by_whole_rows_and_turn_in_front_of_their_product(rounded: str) -> None:
    model = attention(rounded=rounded)
    before = compute(model)
    keep_rows(model)
    assert list_moves(model) == [[0, 2, 1, 3], [0, 1, 3, 2]]
    assert [node.op_type for node in model.graph.node][-2:] == ["Transpose", "MatMul"]
    np.testing.assert_array_equal(compute(model), before)


@pytest.mark.parametrize(
    "how",
    [{"rounded": "each"}, {"factor": 0}, {"returned": True}],
    ids=["a scale for each key", "the first factor", "the turned keys are an output"],
)
def test_what_is_read_in_another_way_is_left_alone(how: dict[str, Any]) -> None:
    model = attention(**how)
    before = compute(model)
    keep_rows(model)
    assert list_moves(model) == [[0, 2, 3, 1]]
    np.testing.assert_array_equal(compute(model)[0], before[0])


def test_a_swap_of_the_last_axes_alone_stays_one_move() -> None:
    model = attention()
    model.graph.node[0].attribute[0].ints[:] = [0, 1, 3, 2]
    keep_rows(model)
    assert list_moves(model) == [[0, 1, 3, 2]]
