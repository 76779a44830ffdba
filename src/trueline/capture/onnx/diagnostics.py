"""What ONNX Runtime says of a node that it cannot run, in the user's terms: the dtypes at it, and the line it is from.

ONNX Runtime names a node and its operator; why it has no such operator is as a rule the dtype (bfloat16 on the CPU).
"""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import torch

from trueline.capture.export import custom_ops
from trueline.capture.model.code_paths import SourceLine

_NODE = re.compile(r"node with name '([^']+)'|Node \(([^)]+)\)")


def named(said: str) -> str:
    """The name of the node in `said`; empty where none is named.

    >>> named("Could not find an implementation for Gemm(13) node with name 'node_linear'")
    'node_linear'
    """
    found = _NODE.search(said)
    return (found[1] or found[2] or "") if found else ""


def dtypes(path: Path, node: str) -> list[str]:
    """What goes into and comes out of the node of the program at `path`, but for plain float32 and int64."""
    graph = onnx.load(str(path), load_external_data=False).graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info, *graph.output)}
    kinds |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    names = [name for one in graph.node if one.name == node for name in (*one.input, *one.output)]
    usual = (onnx.TensorProto.UNDEFINED, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64)
    found = {kinds[name] for name in names if kinds.get(name, onnx.TensorProto.UNDEFINED) not in usual}
    return sorted(onnx.TensorProto.DataType.Name(kind).lower() for kind in found)


def line_of(program: torch.export.ExportedProgram, node: str) -> SourceLine | None:
    """The user's line that `node` is from: the exporter calls it after the graph's own, with a prefix."""
    return custom_ops.line_of(program, f"%{node.removeprefix('node_')} :")
