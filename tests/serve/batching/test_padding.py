"""Requests of several lengths in one run, where the bundle allows it and the program here bears it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from onnx import helper

from trueline.bundle import Bundle, Dim, Golden, Signature
from trueline.runtime.open import open_program
from trueline.serve.batching.execution_plan import draw_up
from trueline.serve.batching.policy import run_batch
from worlds import bundles


def means(out: Path, *, masked: bool) -> Bundle:
    """The mean of x over its length, with the mask or without it; either bundle claims that it may be filled up."""
    x, mask, y = (
        bundles.spec("x", "batch", "length"),
        bundles.spec("mask", "batch", "length"),
        bundles.spec("y", "batch"),
    )
    axes = {"axes": np.array([1])}
    nodes = [
        helper.make_node("Mul", ["x", "mask"], ["shown"]),
        helper.make_node("ReduceSum", ["shown", "axes"], ["total"], keepdims=0),
        helper.make_node("ReduceSum", ["mask", "axes"], ["count"], keepdims=0),
        helper.make_node("Div", ["total", "count"], ["y"]),
    ]
    if not masked:
        nodes = [helper.make_node("ReduceMean", ["x"], ["y"], axes=[1], keepdims=0)]
        axes = {}
    model = bundles.graph(nodes, [x, mask], [y], axes)
    given = np.arange(12, dtype=np.float32).reshape(3, 4)
    ones = np.ones((3, 4), np.float32)
    golden = [Golden(case="3", inputs={"x": given, "mask": ones}, outputs={"y": given.mean(axis=1)})]
    signature = Signature(inputs=(x, mask), outputs=(y,), dims={"batch": Dim(), "length": Dim()}, padded=("length",))
    return bundles.bundle(out, model, signature, golden)


def of(*values: float) -> dict[str, Any]:
    x = np.array([values], np.float32)
    return {"x": x, "mask": np.ones_like(x)}


def test_requests_of_several_lengths_run_together_and_answer_as_alone(tmp_path: Path) -> None:
    bundle = means(tmp_path / "b", masked=True)
    session = open_program(bundle)
    padding = draw_up(session, bundle.golden(), max_batch=8).padding
    assert padding is not None
    runs: list[tuple[int, ...]] = []

    def run(inputs: Any) -> Any:
        runs.append(inputs["x"].shape)
        return session.run(inputs)

    found = run_batch(run, [of(1, 2, 3), of(4), of(5, 7)], [1, 1, 1], padding)
    assert runs == [(3, 3)]
    assert [float(one["y"][0]) for one in found if isinstance(one, dict)] == [2.0, 4.0, 6.0]


def test_a_program_that_looks_behind_the_mask_is_not_filled_up_whatever_its_bundle_says(tmp_path: Path) -> None:
    bundle = means(tmp_path / "b", masked=False)
    plan = draw_up(open_program(bundle), bundle.golden(), max_batch=8)
    assert plan.batch
    assert plan.padding is None


def test_lengths_that_cannot_be_evened_out_are_run_one_by_one(tmp_path: Path) -> None:
    bundle = means(tmp_path / "b", masked=True)
    session = open_program(bundle)
    padding = draw_up(session, bundle.golden(), max_batch=8).padding
    tight = msgspec.structs.replace(session.signature, dims={"batch": Dim(max=1), "length": Dim()})

    def run(inputs: Any) -> Any:
        tight.check(inputs)
        return session.run(inputs)

    found = run_batch(run, [of(1, 2, 3), of(4)], [1, 1], padding)
    assert [one["y"].tolist() for one in found if isinstance(one, dict)] == [[2.0], [4.0]]
