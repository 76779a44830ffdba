"""What a call costs that computes nothing: no way to compress a program makes it faster than that."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
from onnx import helper, numpy_helper

from trueline.compress.measure.reference import PARENT, Reference

if TYPE_CHECKING:
    from trueline.bundle.signature import Array


def measure_overhead(reference: Reference, batch: int, seconds: float) -> tuple[float, float]:
    """Microseconds of a call of the parent's program, and of one with the same inputs and outputs and no operators."""
    inputs = reference.timed[batch][1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        parent = onnx.load(reference.bundle.program_path("onnx"), load_external_data=False)
        onnx.save(make_empty(parent, reference.session.run(inputs)), path)
        session = reference.open(path, "onnx")
        rounds = reference.time({"empty": session}, batch=batch, seconds=seconds, eager=False)
    return 1e3 * rounds.timing(PARENT).median_ms, 1e3 * rounds.timing("empty").median_ms


def make_empty(parent: Any, answers: Mapping[str, Array]) -> Any:
    """A program that is called as `parent` and returns `answers`."""
    constants = [numpy_helper.from_array(array, f"{name}.constant") for name, array in answers.items()]
    nodes = [helper.make_node("Identity", [f"{name}.constant"], [name]) for name in answers]
    graph = helper.make_graph(nodes, "empty", parent.graph.input, parent.graph.output, constants)
    return helper.make_model(graph, opset_imports=parent.opset_import, ir_version=parent.ir_version)
