"""What torch computes with fractions of sizes holds where it is claimed, in every format."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle.signature import Dim
from trueline.capture.export import fraction_guards, torch_export, whole_parts
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.capture.proof.far_sizes import FarSizes
from trueline.capture.size_limits import settle
from trueline.errors import RequestError
from trueline.runtime.open import open_session


def said(condition: str, **example: int) -> list[str]:
    tree = ast.parse(condition, mode="eval").body
    return [guard.text for guard in fraction_guards.in_whole_numbers(tree, list(example), example)]


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("d0 / 64 <= 2.0", ["length <= 128"]),
        ("0.01 * torch.sym_float(d0) > 1.0", ["length >= 101"]),
        ("math.trunc(0.6 * torch.sym_float(d0)) == 3", ["length >= 5", "length <= 6"]),
        ("math.ceil(0.3 * torch.sym_float(d0)) != 1", ["length != 1", "length != 2", "length != 3"]),
        ("math.ceil(0.3 * torch.sym_float(d0)) <= d0", []),
        ("torch.sym_float(d0) ** 0.5 < 300.5", ["length <= 65536"]),
        (
            "100 / (d0 // 5) < 101.0",
            ["length != 1", "length != 2", "length != 3", "length != 4"],
        ),  # divides by zero below 5
        ("math.sqrt(d0 - 5) < 50.0", ["length >= 5", "length <= 2504"]),  # has no value below 5
    ],
)
def test_a_condition_with_fractions_is_said_in_whole_numbers_around_the_example(
    condition: str, words: list[str]
) -> None:
    assert said(condition, length=150 if "> 1.0" in condition else 6) == words


def test_one_between_several_sizes_bounds_each_where_it_holds_for_all() -> None:
    assert said("0.001 * torch.sym_float(d0 * d1) <= 100.0", batch=3, length=9) == ["batch <= 256", "length <= 256"]
    assert said("torch.sym_float(d0 * d1) >= 1.0", batch=3, length=9) == []


def test_an_inequality_of_several_sizes_is_an_assumption_and_bounds_nothing() -> None:
    assert said("4 * d0 * math.trunc(0.5 * d1) != 4 * d0", batch=3, length=9) == []


def test_sizes_that_come_in_multiples_are_tried_in_multiples() -> None:
    steps = {"height": 16, "width": 16}
    for condition, example in (
        ("math.trunc(d0 / 16) * 16.0 == d0", {"height": 32}),
        ("math.trunc(d0 / 16) * 16.0 * d1 == d0 * d1", {"height": 32, "width": 48}),
        ("math.trunc(d0 / 16) * 16.0 * d1 == d0 * d1", {"height": 32, "batch": 3}),
    ):
        tree = ast.parse(condition, mode="eval").body
        assert fraction_guards.in_whole_numbers(tree, list(example), example, steps) == ()


def test_one_that_holds_from_some_sizes_on_bounds_each_from_below() -> None:
    assert said("0.5 * torch.sym_float(d0 * d1) >= 16.0", batch=3, length=16) == ["batch >= 2", "length >= 16"]


def test_one_that_nothing_around_the_example_keeps_to_is_an_error() -> None:
    with pytest.raises(ValueError, match="more than one direction"):
        said("0.5 * torch.sym_float(d0) == 0.5 * torch.sym_float(d1)", height=9, width=9)


@pytest.mark.parametrize(
    "condition",
    [
        "math.ceil(d0 / 8)",
        "math.floor((d0 + 3) / 16)",
        "math.trunc((9 - d0) / 4)",
        "math.ceil((5 - 3 * d0) / 7)",
        "math.trunc(0.5 * torch.sym_float(d0))",
        "math.ceil(0.375 * d0)",
        "math.ceil(torch.sym_float(d0) / 4.0)",
        "math.trunc(-0.25 * d0)",
        "8 * math.ceil(math.ceil(d0 / 2) / 4)",
    ],
)
def test_a_rounded_quotient_is_a_whole_division_at_every_size(condition: str) -> None:
    tree = ast.parse(condition, mode="eval").body
    whole = ast.unparse(fraction_guards.WholeDivisions().visit(ast.parse(condition, mode="eval").body))
    assert "math" not in whole
    for kind in ("==", ">="):
        for size in (*range(1, 200), 4095, 10**6 + 1, 2**31):
            number = eval(condition, {"math": math, "torch": torch, "d0": size})
            test = fraction_guards.compile_test(ast.parse(f"{whole} {kind} {number}", mode="eval").body, 1)
            assert test(size), (whole, size, number)
    assert ast.unparse(tree) != whole


@pytest.mark.parametrize(
    "condition", ["math.ceil(0.3 * d0)", "math.trunc(d0 / d1)", "math.floor(0.5 * d0 ** 0.5)", "math.ceil(d0 / 1e999)"]
)
def test_a_quotient_that_floats_round_is_left_as_it_is(condition: str) -> None:
    tree = ast.parse(condition, mode="eval").body
    assert ast.unparse(fraction_guards.WholeDivisions().visit(tree)) == ast.unparse(ast.parse(condition, mode="eval"))


@pytest.mark.parametrize(
    "condition",
    [
        "0.6 * torch.sym_float(d0) != d1",
        "d1 != 1.5 * d0 + 4",
        "math.trunc(0.29 * d0) != math.trunc(0.7 * d1)",
        "round(0.7 * d0) != d1",
        "math.ceil(d0 / 3) != 2 * d1 - 1",
        "224 / d0 != 112 / d1",
        "abs(d0 / 4 - 0.5) != max(0.2 * d1, 3)",
        "math.floor(-0.3 * d0) + d0 != math.trunc(0.07 * torch.sym_float(d1) - 5.5)",
    ],
)
def test_sizes_that_floats_take_for_equal_are_kept_apart_in_whole_numbers(condition: str) -> None:
    tree = ast.parse(condition, mode="eval").body
    assert isinstance(tree, ast.Compare)
    apart = whole_parts.keep_apart(tree.left, tree.comparators[0], ["height", "width"])
    assert apart is not None
    differ = fraction_guards.compile_test(tree, 2)
    draw, equal = np.random.default_rng(0), 0
    pairs = [(h, w) for h in range(1, 130) for w in range(1, 130)]
    for h in map(int, draw.integers(130, 2**40, 300)):
        pairs += [
            (h, int(near) + step)
            for near in (0.6 * h, 1.5 * h + 4, 0.7 * h, h / 6, h * 29 / 70, 10 * h)
            for step in (-1, 0, 1)
        ]
    for h, w in pairs:
        if w > 0 and not differ(h, w):
            equal += 1
            assert not apart.holds({"height": h, "width": w}), (h, w)
    assert equal > 20
    assert apart.holds({"height": 30, "width": 119})


@pytest.mark.parametrize(
    "condition", ["d0 ** 0.5 != d1", "math.sin(d0) != d1", "round(d0 / d1) != 2 * d1", "d1 / (d0 - 9) != d0"]
)
def test_what_is_no_quotient_of_whole_numbers_is_not_kept_apart(condition: str) -> None:
    tree = ast.parse(condition, mode="eval").body
    assert isinstance(tree, ast.Compare)
    assert whole_parts.keep_apart(tree.left, tree.comparators[0], ["height", "width"]) is None


def test_far_sizes_that_a_condition_with_fractions_leaves_out_are_said() -> None:
    tree = ast.parse("abs(torch.sym_float(d0) / 16000.0 - 1.5) >= 0.001", mode="eval").body
    (hole, *more) = fraction_guards.in_whole_numbers(tree, ["length"], {"length": 700}, decided=True)
    sizes = range(23_900, 24_100)
    left_out = [size for size in sizes if not all(guard.holds({"length": size}) for guard in (hole, *more))]
    assert left_out == [size for size in sizes if abs(size / 16000.0 - 1.5) < 0.001]
    assert len(left_out) > 30
    often = ast.parse("math.trunc(torch.sym_float(d0) / 50001.0) % 2 == 0", mode="eval").body
    guards = fraction_guards.in_whole_numbers(often, ["length"], {"length": 700}, decided=True)
    assert all(guard.holds({"length": 50_000}) for guard in guards)
    assert not all(guard.holds({"length": 50_001 * 12_345}) for guard in guards)


class Padded(nn.Module):
    """Windows of eight over a length that is filled up, and cut back."""

    def forward(self, x: Tensor) -> Tensor:
        filled = math.ceil(x.shape[1] / 8) * 8
        windows = nn.functional.pad(x, (0, 0, 0, filled - x.shape[1])).unflatten(1, (-1, 8))
        return (windows.cumsum(2) + windows.flip(2)).flatten(1, 2)[:, : x.shape[1]]


@pytest.mark.slow
def test_a_length_that_is_filled_up_to_a_multiple_is_free(tmp_path: Path) -> None:
    eager = EagerSession(Padded(), torch.randn(3, 12, 4), dynamic_shapes={"x": {1: "length"}})
    exported = settle(FarSizes(eager), torch_export.export(eager.module, eager.calling))
    assert exported.claims[0].dims["length"] == Dim()
    session = open_session("onnx", emit.emit(exported, tmp_path), exported.claims[0])
    for length in (1, 7, 8, 9, 16, 33, 256):
        x = {"x": np.random.default_rng(length).standard_normal((2, length, 4)).astype(np.float32)}
        assert np.allclose(session.run(x)["output"], eager.run(x)["output"], atol=1e-5)


class Far(nn.Module):
    """Beyond 128 it answers otherwise; the condition is a fraction."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) * 2 if x.shape[1] / 64 > 2 else x.sum(1)


class Together(nn.Module):
    """Beyond 1000 steps of all records together it answers otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) * 2 if x.shape[0] * x.shape[1] > 1000 else x.sum(1)


class Share(nn.Module):
    """0.29 * 100 is 28.999999999999996 in Python, and 29 in floats."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : max(1, math.floor(x.shape[1] * 0.29))].sum(1) * (x.shape[1] * 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Far, Together])
def test_sizes_beyond_such_a_condition_are_refused_and_not_answered_wrongly(
    tmp_path: Path, model: type[nn.Module]
) -> None:
    eager = EagerSession(model(), torch.randn(3, 9, 4), dynamic_shapes={"x": {1: "length"}})
    exported = settle(FarSizes(eager), torch_export.export(eager.module, eager.calling))
    session = open_session("torch_export", torch_export.emit(exported, tmp_path), exported.claims[0])
    refused = 0
    for batch, length in [(2, 128), (2, 129), (2, 500), (2, 501), (200, 5), (201, 5)]:
        x = {"x": np.random.default_rng(0).standard_normal((batch, length, 4)).astype(np.float32)}
        try:
            found = session.run(x)["output"]
        except RequestError:
            refused += 1
            continue
        assert np.allclose(found, eager.run(x)["output"], atol=1e-4)
    assert 0 < refused < 6
    assert exported.claims[0].dims["length"] == (Dim(max=128) if model is Far else Dim())


@pytest.mark.slow
def test_onnx_computes_with_sizes_as_exactly_as_python_at_every_length(tmp_path: Path) -> None:
    eager = EagerSession(Share(), torch.randn(3, 9, 4), dynamic_shapes={"x": {1: "length"}})
    exported = settle(FarSizes(eager), torch_export.export(eager.module, eager.calling))
    session = open_session("onnx", emit.emit(exported, tmp_path), exported.signature)
    for length in range(exported.signature.dims["length"].min, 301):
        x = {"x": np.random.default_rng(length).standard_normal((2, length, 4)).astype(np.float32)}
        wanted = eager.run(x)["output"]
        assert np.allclose(session.run(x)["output"], wanted, atol=1e-4 * np.abs(wanted).max()), length
