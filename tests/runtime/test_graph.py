"""A program as text says, beside each value, the line of the user's file that it came from, and no folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor, nn

from trueline.capture.export import torch_export, torchscript
from trueline.capture.model import code_paths
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit as onnx_emit
from trueline.errors import UsageError
from trueline.runtime import graph
from worlds import marks

pytestmark = pytest.mark.slow


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)  # first
        return y.exp() + 1  # second


def test_each_value_is_shown_with_the_line_that_it_came_from_in_every_format(tmp_path: Path) -> None:
    model = Two().eval()
    exported = torch_export.export(model, EagerSession(model, torch.randn(3, 4)).calling)
    for format, emit, words, code, ssa in (
        (
            "torch_export",
            torch_export.emit,
            {"first": "linear", "second": "exp"},
            'exp: "f32',
            "%exp : [num_users=1] =",
        ),
        ("onnx", onnx_emit.emit, {"first": "Gemm", "second": "Exp"}, "exp = Exp(linear)", "exp = Exp (linear)"),
    ):
        path = emit(exported, tmp_path / format)
        assert graph.text(format, path) in [graph.text(format, path, form) for form in ("code", "ssa")]
        for form, form_words in (("code", code), ("ssa", ssa)):
            shown = graph.text(format, path, form)
            assert form_words in shown
            for mark, word in words.items():
                place = f"# {marks.place_of(__file__, mark)}"
                assert any(word in line and line.endswith(place) for line in shown.splitlines()), shown
            assert str(Path(__file__).parent) not in shown
        assert str(Path(__file__).parent).encode() not in path.read_bytes()


class Either(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))
        return found


def test_in_ssa_form_the_graphs_inside_a_graph_follow_it(tmp_path: Path) -> None:
    model = Either().eval()
    path = torch_export.emit(torch_export.export(model, EagerSession(model, torch.randn(3, 4)).calling), tmp_path)
    shown = graph.text("torch_export", path, "ssa")
    assert "graph program:\n" in shown
    assert "graph program.true_graph_0:\n" in shown
    assert shown.index("target=torch.ops.aten.mul.Tensor") > shown.index("graph program.true_graph_0:")


def test_the_branches_of_an_onnx_program_stand_as_functions_and_no_weight_is_printed() -> None:
    one, other = (
        helper.make_graph([helper.make_node(op, ["x", "w"], ["y"])], name, [], [typed("y")])
        for op, name in (("Add", "more"), ("Sub", "less"))
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=one, else_branch=other)
    node.metadata_props.add(key="source", value="model.py:7")
    held = onnx.numpy_helper.from_array(np.full((3, 4), 0.12345, np.float32), "w")
    branch = helper.make_graph([node], "0.a graph", [typed("x"), helper.make_tensor_value_info("c", 9, [])], [], [held])
    branch.output.append(typed("y"))
    shown = graph.onnx_code(helper.make_model(branch))
    assert shown.splitlines() == [
        "def _0_a_graph(x: 'float[n, 4]', c: 'bool[]'):",
        "    w = weight('float[3, 4]')",
        "    def y_else_branch():",
        "        y = Sub(x, w)",
        "        return y",
        "    def y_then_branch():",
        "        y = Add(x, w)",
        "        return y",
        "    y = If(c, else_branch=y_else_branch, then_branch=y_then_branch)  # model.py:7",
        "    return y",
    ]


def typed(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 4])


def test_a_script_is_shown_as_its_source_and_as_its_graph(tmp_path: Path) -> None:
    eager = EagerSession(Two().eval(), torch.randn(3, 4))
    path, _ = torchscript.emit(eager.module, eager.calling, tmp_path, "script")
    assert "torch.exp(" in graph.text("torchscript", path)
    assert "= aten::exp(%" in graph.text("torchscript", path, "ssa")
    with pytest.raises(UsageError, match="is machine code and cannot be read"):
        graph.text("aotinductor", path, "ssa")


def test_the_innermost_line_of_the_users_own_is_named_without_its_folder() -> None:
    trace = 'File "/home/a/model.py", line 7, in forward\n  y\nFile "/home/a/my layers.py", line 9, in f\n  z\n'
    assert code_paths.brief('File "/home/a/model.py", line 7, in forward\n  y\n') == "model.py:7"
    assert code_paths.brief(trace) == ""  # a name that is no plain one stays out
    assert code_paths.brief("") == ""
