"""An ONNX program that is bound to arrays answers as `run` does, or says that it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.errors import BundleError
from trueline.runtime.onnx import OnnxSession
from trueline.runtime.session import Bindable

TYPES = {"FP32": TensorProto.FLOAT, "INT64": TensorProto.INT64, "BOOL": TensorProto.BOOL}
X = TensorSpec(name="x", datatype="FP32", shape=("n", 3))
Y = TensorSpec(name="y", datatype="FP32", shape=("n", 3))


def opened(
    folder: Path, nodes: Sequence[onnx.NodeProto], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec],
    weights: dict[str, Any] | None = None, *, random: bool = False,
) -> OnnxSession:  # fmt: skip
    def told(specs: Sequence[TensorSpec]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(one.name, TYPES[one.datatype], list(one.shape)) for one in specs]

    initial = [numpy_helper.from_array(np.asarray(array), name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "g", told(inputs), told(outputs), initial)
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    symbols = {size for one in (*inputs, *outputs) for size in one.shape if isinstance(size, str)}
    dims = {symbol: Dim(min=0) for symbol in symbols}
    return OnnxSession(path, Signature(inputs=tuple(inputs), outputs=tuple(outputs), dims=dims, random=random))


def bound(session: OnnxSession, **inputs: Any) -> tuple[Callable[[], None] | None, dict[str, Any], dict[str, Any]]:
    """The run, and the arrays that it reads and writes."""
    assert isinstance(session, Bindable)
    given = {name: np.array(value) for name, value in inputs.items()}
    outputs = {name: np.zeros_like(array) for name, array in session.run(given).items()}
    return session.bind(given, outputs), given, outputs


def rows(*values: float) -> Any:
    return np.array(values, np.float32).reshape(-1, 3)


def branch(name: str, nodes: Sequence[onnx.NodeProto], shape: Sequence[Any]) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)])


def chosen(shape: Sequence[Any], otherwise: onnx.NodeProto) -> onnx.NodeProto:
    """`x` itself where `c` says so, else what a node makes of it."""
    same = helper.make_node("Identity", ["x"], ["a"])
    return helper.make_node(
        "If", ["c"], ["y"], then_branch=branch("a", [same], shape), else_branch=branch("b", [otherwise], shape)
    )


C = TensorSpec(name="c", datatype="BOOL", shape=())
NODES = {
    "a copy": [helper.make_node("Identity", ["x"], ["y"])],
    "another shape of it": [helper.make_node("Reshape", ["x", "shape"], ["y"])],
    "a constant beside it": [helper.make_node("Add", ["x", "ones"], ["y"])],
}


@pytest.mark.parametrize("what", NODES)
def test_what_lies_in_the_arrays_is_what_is_answered_again_and_again(tmp_path: Path, what: str) -> None:
    weights = {"shape": np.array([-1, 3]), "ones": np.ones((1, 3), np.float32)}
    session = opened(tmp_path, NODES[what], [X], [Y], weights)
    run, inputs, outputs = bound(session, x=rows(1, 2, 3, 4, 5, 6))
    assert run is not None
    for seed in range(5):
        inputs["x"][...] = np.random.default_rng(seed).standard_normal((2, 3))
        run()
        np.testing.assert_array_equal(outputs["y"], session.run(inputs)["y"])


def test_a_part_of_an_array_may_be_bound_and_the_rest_is_left_alone(tmp_path: Path) -> None:
    session = opened(tmp_path, NODES["a constant beside it"], [X], [Y], {"ones": np.ones((1, 3), np.float32)})
    x, y = np.zeros((4, 3), np.float32), np.full((4, 3), 7, np.float32)
    run = session.bind({"x": x[:2]}, {"y": y[:2]})
    assert run is not None
    x[...] = 1
    run()
    assert y.tolist() == [[2, 2, 2]] * 2 + [[7, 7, 7]] * 2


@pytest.mark.parametrize("choice", [True, False])
def test_both_branches_write_where_they_are_told_to(tmp_path: Path, choice: bool) -> None:
    session = opened(tmp_path, [chosen(["n", 3], helper.make_node("Neg", ["x"], ["b"]))], [X, C], [Y])
    run, inputs, outputs = bound(session, x=rows(1, 2, 3), c=choice)
    assert run is not None
    for value, flag in ((4, not choice), (5, choice), (6, not choice)):
        inputs["x"][...], inputs["c"][...] = value, flag
        run()
        assert outputs["y"].tolist() == [[value if flag else -value] * 3]


def test_an_answer_of_another_shape_is_raised_and_not_what_was_answered_before(tmp_path: Path) -> None:
    twice = helper.make_node("Concat", ["x", "x"], ["b"], axis=0)
    free = TensorSpec(name="y", datatype="FP32", shape=("m", 3))
    session = opened(tmp_path, [chosen(["m", 3], twice)], [X, C], [free])
    run, inputs, outputs = bound(session, x=rows(1, 2, 3), c=True)
    assert run is not None
    inputs["c"][...] = False
    with pytest.raises(Exception, match="If node"):
        run()
    inputs["x"][...], inputs["c"][...] = 8, True
    run()
    assert outputs["y"].tolist() == [[8, 8, 8]]


def test_values_that_the_program_refuses_are_raised(tmp_path: Path) -> None:
    index = TensorSpec(name="x", datatype="INT64", shape=("n",))
    session = opened(
        tmp_path, [helper.make_node("Gather", ["table", "x"], ["y"])], [index], [Y], {"table": rows(*range(12))}
    )
    run, inputs, outputs = bound(session, x=np.array([3]))
    assert run is not None
    inputs["x"][...] = 4
    with pytest.raises(Exception, match="Gather"):
        run()
    inputs["x"][...] = 1
    run()
    assert outputs["y"].tolist() == [[3, 4, 5]]


def test_what_cannot_be_bound_safely_is_not(tmp_path: Path) -> None:
    relu = [helper.make_node("Relu", ["x"], ["y"])]
    session = opened(tmp_path, relu, [X], [Y])
    x = rows(1, 2, 3, 4, 5, 6)
    good = {"y": np.zeros((2, 3), np.float32)}
    assert session.bind({"x": x}, good) is not None
    assert session.bind({"x": x}, {}) is None
    assert session.bind({"x": x}, {"y": np.zeros((3, 3), np.float32)}) is None
    assert session.bind({"x": x}, {"y": np.zeros((2, 3))}) is None
    assert session.bind({"x": x}, {"y": np.zeros((3, 2), np.float32).T}) is None
    assert session.bind({"x": x[:, ::-1]}, good) is None
    assert session.bind({"x": x[:0]}, {"y": good["y"][:0]}) is None
    returned = opened(tmp_path, relu, [X], [Y, X])
    assert returned.bind({"x": x}, good | {"x": np.zeros((2, 3), np.float32)}) is None
    drawn = [helper.make_node("RandomNormalLike", ["x"], ["y"])]
    assert opened(tmp_path, drawn, [X], [Y], random=True).bind({"x": x}, good) is None
    assert opened(tmp_path, drawn, [X], [Y]).bind({"x": x}, good) is None  # and nobody said so


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ([X], [TensorSpec(name="y", datatype="INT64", shape=("n", 3))]),
        ([TensorSpec(name="x", datatype="INT64", shape=("n", 3))], [Y]),
        ([TensorSpec(name="z", datatype="FP32", shape=("n", 3))], [Y]),
        ([X], [TensorSpec(name="z", datatype="FP32", shape=("n", 3))]),
        ([X, TensorSpec(name="z", datatype="FP32", shape=("n", 3))], [Y]),
        ([X], []),
    ],
)
def test_a_program_of_other_names_or_datatypes_than_its_signature_is_not_opened(
    tmp_path: Path, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> None:
    opened(tmp_path, [helper.make_node("Neg", ["x"], ["y"])], [X], [Y])
    claimed = Signature(inputs=tuple(inputs), outputs=tuple(outputs), dims={"n": Dim()})
    with pytest.raises(BundleError, match="its signature says"):
        OnnxSession(tmp_path / "model.onnx", claimed)


def test_a_program_reads_the_numbers_of_an_array_whatever_their_order_in_memory(tmp_path: Path) -> None:
    session = opened(tmp_path, [helper.make_node("Neg", ["x"], ["y"])], [X], [Y])
    x = np.arange(12, dtype=np.float32).reshape(3, 4).T[:, ::-1]
    assert not x.flags.c_contiguous
    np.testing.assert_array_equal(session.run({"x": x})["y"], -x)
