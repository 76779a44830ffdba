"""What OpenVINO's int8 rounds in a model with attention. Needs NNCF: skipped, with its reason, where it is missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.openvino import OpenVinoQuantizer
from trueline.compress.measure.kernels import count_kernels
from trueline.compress.method import CompressMethod

pytestmark = pytest.mark.slow
LAYERS, WIDTH, LENGTH = 2, 32, 12


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> ParentProgram:
    pytest.importorskip("nncf", reason="NNCF is not installed: pip install 'trueline[openvino]'")
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    model = Encoder().eval()
    calling = EagerSession(model, torch.randn(2, LENGTH, WIDTH)).calling
    path = emit.emit(torch_export.export(model, calling), folder)
    draw = np.random.default_rng(0)
    batches = [{"x": draw.standard_normal((2, LENGTH, WIDTH), np.float32)} for _ in range(8)]
    (folder / "work").mkdir()
    return ParentProgram(path, folder / "work", lambda: batches)


def products_in_float(path: Path) -> set[str]:
    """The kinds of operators whose answers a multiplication reads without rounding."""
    graph = onnx.load(path).graph
    made_by = {name: node for node in graph.node for name in node.output}
    found = set()
    for name in (name for node in graph.node if node.op_type == "MatMul" for name in node.input):
        node = made_by.get(name)
        while node is not None and node.op_type in ("Transpose", "Reshape"):
            node = made_by.get(node.input[0])
        found.add("" if node is None else node.op_type)
    return found - {"DequantizeLinear"}


def compressed(program: ParentProgram, word: str, folder: Path) -> Path:
    OpenVinoQuantizer().apply(CompressMethod("openvino", (word,)), program, folder / word / "model.onnx")
    return folder / word / "model.onnx"


def test_performance_rounds_every_product_and_mixed_leaves_the_shares_of_attention(
    program: ParentProgram, tmp_path: Path
) -> None:
    assert not products_in_float(compressed(program, "performance", tmp_path))
    assert "Softmax" in products_in_float(compressed(program, "mixed", tmp_path))


def test_neither_rounds_what_is_added_or_normalized_and_both_answer_as_int8_does(
    program: ParentProgram, tmp_path: Path
) -> None:
    import openvino

    given = np.random.default_rng(1).standard_normal((2, LENGTH, WIDTH), np.float32)
    core = openvino.Core()
    expected = core.compile_model(program.path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(given)[0]
    for word in ("performance", "mixed"):
        path = compressed(program, word, tmp_path)
        graph = onnx.load(path).graph
        made_by = {name: node for node in graph.node for name in node.output}
        light = [node for node in graph.node if node.op_type in ("Add", "LayerNormalization")]
        rounded = [node for node in light if getattr(made_by.get(node.input[0]), "op_type", "") == "DequantizeLinear"]
        assert not rounded
        assert count_kernels(path, "openvino").floating == 0
        found = core.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(given)[0]
        assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)


def test_keys_move_by_whole_rows_and_openvino_turns_them_inside_of_the_product(
    program: ParentProgram, tmp_path: Path
) -> None:
    import openvino

    for word in ("performance", "mixed"):
        compiled = openvino.Core().compile_model(compressed(program, word, tmp_path), "CPU")
        kinds = [(node.get_rt_info()["layerType"].astype(str), node) for node in compiled.get_runtime_model().get_ops()]
        moves = [node.get_output_partial_shape(0) for kind, node in kinds if kind == "Transpose"]
        moved = [shape for shape in moves if shape.rank.get_length() == 4]  # the others are weights
        assert moved
        assert not [shape for shape in moved if shape[3] != WIDTH // 4]
