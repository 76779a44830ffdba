"""The first piece of a tensor, the last one and their number are slices and arithmetic; zip cuts the longer tensor."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.examine import prove_onnx
from trueline.doctor.patch import patch_module
from trueline.doctor.rewrites.control.plain_forms import cut_zips
from trueline.doctor.rewrites.scope import Scope
from trueline.doctor.rewrites.tensors.selections import slice_pieces
from trueline.doctor.survey import survey

ENDS = """
def f(x):
    parts = torch.split(x, 4, dim=1)
    first, last = parts[0], parts[-1]
    return first.sum(1), last, len(parts)
"""
KEPT = {
    "another piece": ENDS.replace("parts[0]", "parts[1]").replace("parts[-1]", "parts[-2]").replace("len(parts)", "0"),
    "a tensor that changes before the piece is taken": ENDS.replace(
        "    first, last", "    x = x[:, 1:]\n    first, last"
    ),
    "a name of two lists": ENDS.replace("    first, last", "    parts = parts[1:]\n    first, last"),
}


def edit(text: str) -> str | None:
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    scope = Scope(text=text, function=function, seen={"x": torch.zeros(2, 9)})
    spot = scope.spot(function.body[0].lineno)
    assert spot is not None
    return next((found.text for found in slice_pieces(scope, spot) if found is not None), None)


def answer(text: str, *given: Tensor) -> Any:
    names: dict[str, Any] = {"torch": torch}
    exec(text, names)
    return names["f"](*given)


def test_the_ends_of_pieces_answer_as_the_pieces_do_at_each_length() -> None:
    text = edit(ENDS)
    assert text is not None
    assert "split" not in text
    for length in range(14):
        x = torch.randn(2, length)
        torch.testing.assert_close(answer(text, x), answer(ENDS, x))


@pytest.mark.parametrize("name", KEPT)
def test_a_piece_that_may_be_none_or_of_another_tensor_stays_as_it_is(name: str) -> None:
    assert edit(KEPT[name]) is None


ZIPPED = """
def f(x, w):
    total = 0
    for frame, (k, more) in enumerate(zip(x.unbind(1), w)):
        total = total + k.sum() * frame * more
    return total
"""


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (4, 4), (0, 2)])
def test_zip_of_tensors_ends_with_the_shorter_one(lengths: tuple[int, int]) -> None:
    function = ast.parse(ZIPPED).body[0]
    assert isinstance(function, ast.FunctionDef)
    x, w = torch.randn(2, lengths[0]), torch.randn(lengths[1])
    scope = Scope(text=ZIPPED, function=function, seen={"x": x, "w": w})
    spot = scope.spot(4)
    assert spot is not None
    (found,) = cut_zips(scope, spot)
    assert found is not None
    assert found.text.count("torch.sym_min(x.shape[1], w.shape[0])") == 2
    torch.testing.assert_close(answer(found.text, x, w), answer(ZIPPED, x, w))


class Overlapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        blocks = x.split(4, 1)
        return blocks[-1].mean(1) * len(blocks) - blocks[0].amax(1)


@pytest.mark.slow
@pytest.mark.jobs
def test_a_model_that_takes_the_last_piece_is_a_graph_at_each_length() -> None:
    model = Overlapped().eval()
    eager = EagerSession(model, torch.randn(2, 10, 3), dynamic_shapes={"x": {1: "length"}})
    done = survey(model, calls_of(eager), onnx=prove_onnx, base=Path.cwd())
    row = done.rows["(model)"]
    assert row.rewrite is not None, row.why_not
    assert row.rewrite.onnx == "proven"
    edited = patch_module(model, done.texts)
    for length in (1, 4, 5, 23):
        x = torch.randn(2, length, 3)
        torch.testing.assert_close(edited(x), model(x))


@pytest.mark.parametrize("source", ["zip(self.one, self.two)", "zip(words, words[1:])", "zip(x, words)"])
def test_zip_of_what_is_no_tensor_is_left_as_it_is(source: str) -> None:
    function = ast.parse(f"def f(self, x, words):\n    for a, b in {source}:\n        x = a(b)\n    return x\n").body[0]
    assert isinstance(function, ast.FunctionDef)
    scope = Scope(text=ast.unparse(function), function=function, seen={"x": torch.zeros(2, 9), "words": ["a", "b"]})
    spot = scope.spot(function.body[0].lineno)
    assert spot is not None
    assert not [*cut_zips(scope, spot)]
