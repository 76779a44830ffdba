"""A `match` is rewritten as the `if`s that it means: the same answers for every shape."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.patch import patch_module
from trueline.doctor.rewrites.control.matches import as_ifs
from trueline.doctor.rewrites.scope import Scope
from trueline.doctor.survey import survey

CASES = {
    "values, alternatives and a guard": """
def f(x):
    match x.shape[1]:
        case 1:
            return "one"
        case 3 | 4 as n:
            return n * 10
        case n if n > 20:
            return n
        case _:
            return "other"
""",
    "parts of a shape": """
def f(x):
    match x.shape:
        case (_, 1, _):
            return "flat"
        case (b, 3, w) if b > w:
            return b - w
        case [_, _, 5 | 7 as w]:
            return w
        case (a, b):
            return a * b
    return "left"
""",
    "a tuple of two sizes": """
def f(x):
    h, w = x.size(0), x.size(1)
    match h, w:
        case (1, _) | (_, 1):
            kept = 1
        case (height, width) if height == width:
            kept = height + 1
        case other:
            kept = len(other)
    return kept
""",
    "a subject that is computed once": """
def f(x):
    match x.shape[0] % 3:
        case 0:
            return "three"
        case left:
            return left
""",
}
SHAPES = [(1, 1), (2, 1), (3, 3), (1, 21), (4, 4), (5, 3, 2), (2, 3, 5), (2, 1, 5), (6, 9, 7), (6, 9, 8), (2, 30)]


def build(text: str) -> Any:
    scope: dict[str, Any] = {}
    exec(text, scope)
    return scope["f"]


@pytest.mark.parametrize("name", CASES)
def test_the_rewritten_function_answers_as_the_match_for_every_shape(name: str) -> None:
    text = CASES[name]
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    at = next(i for i, one in enumerate(function.body) if isinstance(one, ast.Match))
    statement = function.body[at]
    assert isinstance(statement, ast.Match)
    new = as_ifs(Scope(text=text, function=function, seen={}), statement)
    assert new is not None
    function.body[at : at + 1] = new
    edited = ast.unparse(ast.fix_missing_locations(function))
    assert "match" not in edited
    for shape in SHAPES:
        x = torch.zeros(shape)
        assert build(edited)(x) == build(text)(x), (shape, edited)


@pytest.mark.parametrize("pattern", ["(first, *rest)", "{'a': 1}", "int()", "(1, n) | (n, 1)"])
def test_a_pattern_without_a_plain_form_is_left_alone(pattern: str) -> None:
    text = f"def f(x):\n    match x.shape:\n        case {pattern}:\n            return 1\n"
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    statement = function.body[0]
    assert isinstance(statement, ast.Match)
    assert as_ifs(Scope(text=text, function=function, seen={}), statement) is None


class ByLength(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        match x.shape:
            case (_, 3 | 4, _):
                y = x * 2
            case (_, n, _) if n > 6:
                y = x - n
            case _:
                y = x + 1
        return y.relu()


@pytest.mark.long
def test_a_model_that_matches_a_shape_is_a_graph_after_the_rewrite() -> None:
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    model = ByLength()
    eager = EagerSession(copy.deepcopy(model).eval(), x, dynamic_shapes={"x": {1: "length"}})
    done = survey(model.eval(), calls_of(eager), onnx=None, base=Path(__file__).parent)
    row = done.rows["(model)"]
    assert row.rewrite is not None, row.why_not
    edited = patch_module(model, done.texts)
    for size in (1, 3, 4, 6, 7, 20):
        one = torch.randn(2, size, 4)
        torch.testing.assert_close(edited(one), model(one))
