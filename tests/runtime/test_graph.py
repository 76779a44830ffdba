"""A program as text says, beside each value, the line of the user's file that it came from, and no folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trueline.runtime import export, graph, onnx_emit, paths
from trueline.runtime.eager import EagerSession

pytestmark = pytest.mark.slow


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)  # first
        return y.exp() + 1  # second


def line_of(mark: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


def test_each_value_is_shown_with_the_line_that_it_came_from_in_every_format(tmp_path: Path) -> None:
    model = Two().eval()
    exported = export.export(model, EagerSession(model, torch.randn(3, 4)).calling)
    for format, emit, words in (
        ("torch_export", export.emit, {"first": "linear", "second": "exp"}),
        ("onnx", onnx_emit.emit, {"first": "Gemm", "second": "Exp"}),
    ):
        path = emit(exported, tmp_path / format)
        shown = graph.text(format, path)
        for mark, word in words.items():
            place = f"# test_graph.py:{line_of(mark)}"
            assert any(word in line and line.endswith(place) for line in shown.splitlines()), shown
        assert str(Path(__file__).parent) not in shown
        assert str(Path(__file__).parent).encode() not in path.read_bytes()


def test_the_innermost_line_of_the_users_own_is_named_without_its_folder() -> None:
    trace = 'File "/home/a/model.py", line 7, in forward\n  y\nFile "/home/a/my layers.py", line 9, in f\n  z\n'
    assert paths.brief('File "/home/a/model.py", line 7, in forward\n  y\n') == "model.py:7"
    assert paths.brief(trace) == ""  # a name that is no plain one stays out
    assert paths.brief("") == ""
