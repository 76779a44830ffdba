"""Channels of one size: the answers stay the same to the last bit, and int8 has room for every channel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from trueline.compress.apply.choose import choose_operators
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.equalize import equalize, find_spans
from trueline.compress.apply.static import StaticQuantizer
from trueline.compress.measure.kernels import count_kernels
from trueline.compress.method import CompressMethod
from worlds import compressible, uneven
from worlds.bundles import graph, spec


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> compressible.Compressible:
    return compressible.make(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def program(trained: compressible.Compressible, tmp_path: Path) -> ParentProgram:
    path = tmp_path / "parent.onnx"
    onnx.save(uneven.make_program(trained.module), path)
    return ParentProgram(path, tmp_path, lambda: [{"input": drawn(trained, "training", seed)} for seed in (1, 2)])


def drawn(trained: compressible.Compressible, mode: str, part: int = 0) -> np.ndarray:
    from trueline.recipe.load import load_recipe

    images = load_recipe(trained.recipe).dataset(mode).tensors[0].numpy()
    return images[64 * part : 64 * part + 64] if part else images[:512]


def run(path: Path, inputs: np.ndarray, output: str = "") -> np.ndarray:
    model = onnx.load(path)
    if output:
        model.graph.output.append(helper.make_empty_tensor_value_info(output))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run([output or "output"], {"input": inputs})[0]


def test_channels_of_a_batch_norm_behind_a_relu_get_one_size_and_the_answers_stay(
    trained: compressible.Compressible, program: ParentProgram
) -> None:
    images = drawn(trained, "evaluation")
    equal = equalize(program)
    assert np.allclose(run(equal, images), run(program.path, images), rtol=1e-5, atol=1e-7)
    before, after = (np.abs(run(path, images, "b")).max(axis=(0, 2, 3)) for path in (program.path, equal))
    assert before.max() > 1e4 * before[before > 0].min()
    assert after.max() < 10 * after[after > 0].min()


def test_a_model_in_the_design_of_crepe_keeps_its_decisions_in_int8(
    trained: compressible.Compressible, program: ParentProgram, tmp_path: Path
) -> None:
    images, out = drawn(trained, "evaluation"), tmp_path / "out" / "model.onnx"
    out.parent.mkdir()
    wanted = run(program.path, images).argmax(axis=1)
    for method in (CompressMethod("static", (signs, "minmax")) for signs in ("u8s8", "s8s8")):
        StaticQuantizer().apply(method, program, out)
        kept = float((run(out, images).argmax(axis=1) == wanted).mean())
        assert kept > 0.97, method.name
        assert count_kernels(out).quantized == 3


CONV = {"w": np.ones((4, 2, 1, 1), np.float32), "v": np.ones((3, 4, 1, 1), np.float32)}


@pytest.mark.parametrize(
    ("between", "more", "found"),
    [
        ([helper.make_node("Relu", ["a"], ["b"])], {}, 1),
        ([helper.make_node("MaxPool", ["a"], ["b"], kernel_shape=[2, 2])], {}, 1),
        ([helper.make_node("Pad", ["a", "pads"], ["b"])], {"pads": np.array([0, 0, 1, 1, 0, 0, 1, 1])}, 1),
        ([helper.make_node("Transpose", ["a"], ["b"], perm=[0, 1, 3, 2])], {}, 1),
        ([helper.make_node("Sigmoid", ["a"], ["b"])], {}, 0),
        ([helper.make_node("Clip", ["a", "zero", "six"], ["b"])], {"zero": np.float32(0), "six": np.float32(6)}, 0),
        ([helper.make_node("Pad", ["a", "pads"], ["b"])], {"pads": np.array([0, 1, 0, 0, 0, -1, 0, 0])}, 0),
        (
            [helper.make_node("Pad", ["a", "pads", "one"], ["b"])],
            {"pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "one": np.float32(1)},
            0,
        ),
        ([helper.make_node("Relu", ["a"], ["b"]), helper.make_node("Add", ["a", "b"], ["also"])], {}, 0),
        ([helper.make_node("Transpose", ["a"], ["b"], perm=[1, 0, 2, 3])], {}, 0),
    ],
)  # fmt: skip
def test_channels_are_scaled_only_where_all_that_lies_between_keeps_a_factor(
    between: list[onnx.NodeProto], more: dict[str, np.ndarray], found: int
) -> None:
    nodes = [
        helper.make_node("Conv", ["input", "w"], ["a"], name="one"), *between,
        helper.make_node("Conv", ["b", "v"], ["output"], name="two"),
    ]  # fmt: skip
    outputs = [spec("output", "batch", 3, 8, 8)]
    assert len(find_spans(graph(nodes, [spec("input", "batch", 2, 8, 8)], outputs, {**CONV, **more}))) == found


def test_channels_that_a_graph_inside_of_an_operator_reads_stay() -> None:
    inner = helper.make_graph(
        [helper.make_node("Relu", ["a"], ["inside"])], "then", [],
        [helper.make_tensor_value_info("inside", onnx.TensorProto.FLOAT, None)],
    )  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["input", "w"], ["a"], name="one"),
        helper.make_node("If", ["yes"], ["b"], then_branch=inner, else_branch=inner),
        helper.make_node("Conv", ["a", "v"], ["output"], name="two"),
    ]  # fmt: skip
    weights = {**CONV, "yes": np.array(True)}
    assert not find_spans(graph(nodes, [spec("input", "batch", 2, 8, 8)], [spec("output", "batch", 3, 8, 8)], weights))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_of_channels_are_scaled_each_by_its_own(groups: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    sizes = np.logspace(-3, 3, 4).astype(np.float32)
    weights = {
        "w": draw.standard_normal((4, 2, 3, 3)).astype(np.float32) * sizes.reshape(4, 1, 1, 1),
        "v": draw.standard_normal((8, 4 // groups, 1, 1)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["input", "w"], ["a"], name="one"), helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "v"], ["output"], name="two", group=groups),
    ]  # fmt: skip
    path = tmp_path / "grouped.onnx"
    onnx.save(graph(nodes, [spec("input", "batch", 2, 8, 8)], [spec("output", "batch", 8, 6, 6)], weights), path)
    images = draw.standard_normal((16, 2, 8, 8)).astype(np.float32)
    equal = equalize(ParentProgram(path, tmp_path, lambda: [{"input": images}]))
    assert not np.array_equal(run(equal, images, "b"), run(path, images, "b"))
    assert np.allclose(run(equal, images), run(path, images), rtol=1e-5, atol=1e-5)


def test_an_operator_between_others_in_float32_is_not_rounded(trained: compressible.Compressible) -> None:
    chosen = choose_operators(uneven.make_program(trained.module))
    assert list(chosen) == ["first", "first_relu", "second", "second_relu", "last"]


def test_an_addition_between_convolutions_is_rounded(trained: compressible.Compressible) -> None:
    chosen = choose_operators(uneven.make_program(trained.module, bare=True))
    assert {name for name, kind in chosen.items() if kind == "Add"} == {"raise", "lower"}
