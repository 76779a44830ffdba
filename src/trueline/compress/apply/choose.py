"""Which operators static quantization rounds: those for which a runtime has int8 kernels, and light ones between them.

ONNX Runtime's quantizer by itself rounds every addition, multiplication, sigmoid and normalization it knows. Beside
operators in float32 that makes nothing faster, and it may cost everything: in a sigmoid written as 1 / (1 + exp(-x))
the sum is rounded in steps of its largest value, exp(20); a batch norm has one step for the factors of all channels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from trueline.compress.measure.kernels import HEAVY

_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""What is rounded for its own sake, where its weights are constants."""
_LIGHT = frozenset(
    """
    Add Mul Relu Clip LeakyRelu Sigmoid Softmax AveragePool GlobalAveragePool Concat Where Resize Pad
    """.split()  # noqa: SIM905 - as prose they take one line
)
"""They have int8 kernels, and make new numbers."""
MOVES = frozenset(
    """
    MaxPool Reshape Transpose Squeeze Unsqueeze Flatten Slice Split Gather GatherElements Identity Dropout
    """.split()  # noqa: SIM905 - as above
)
"""They hand on the numbers of an input as they are, in int8 if that is."""
REMOVABLE = frozenset({"Relu", "Clip"})
"""They become the range of what is before them, wherever they are."""
_AVERAGES = frozenset({"ReduceMean", "Cast"})
"""In float32, between operators in int8."""
_FLOATING = frozenset({"BatchNormalization", "InstanceNormalization", "LayerNormalization", "TopK", "CumSum", "ArgMax"})
"""The quantizer rounds what they read and write, and the runtime computes them in float32."""


def choose_operators(model: Any, *, heavy: bool = False) -> dict[str, str]:
    """The kinds of the operators that are worth rounding, by their names, in the model's order; with `heavy`, of all
    heavy ones, as other quantizers know more."""
    graph = model.graph
    constants = {one.name for one in graph.initializer}
    born, read = _find_born(graph.node, constants, _find_infinite(graph)), _find_read(graph.node)
    found = {}
    for node in graph.node:
        layer = _is_layer(node, constants) or (heavy and node.op_type in HEAVY)
        looked_up = node.op_type == "Gather" and node.input[0] in constants
        light = node.op_type in _LIGHT and node.output[0] in born
        light = light and (node.op_type in REMOVABLE or node.output[0] in read)
        if layer or looked_up or light:
            found[node.name] = node.op_type
    return found


def list_left(model: Any, chosen: Iterable[str]) -> list[str]:
    """Names of the operators that the quantizer would round, and `chosen` does not have."""
    known, names = _LAYERS | _LIGHT | _FLOATING, set(chosen)
    tables = {one.name for one in model.graph.initializer}
    return [
        node.name for node in model.graph.node
        if node.name not in names and (node.op_type in known or (node.op_type == "Gather" and node.input[0] in tables))
    ]  # fmt: skip


def _is_layer(node: Any, constants: set[str]) -> bool:
    return node.op_type in _LAYERS and bool(constants.intersection(node.input[:2]))


def _find_infinite(graph: Any) -> set[str]:
    """Constants with infinity, as masks have: in int8 what they mask would count."""
    floats = (one for one in graph.initializer if one.data_type == TensorProto.FLOAT and _is_here(one))
    return {one.name for one in floats if np.isinf(numpy_helper.to_array(one)).any()}


def _is_here(constant: Any) -> bool:
    """Whether its numbers were read, and do not lie beside the graph."""
    return bool(constant.data_location != TensorProto.EXTERNAL)


def _find_born(nodes: Any, constants: set[str], infinite: set[str]) -> set[str]:
    """Tensors that are in int8 as they are made: of heavy operators, and of light ones that read only such."""
    born: set[str] = set()
    for node in nodes:
        if node.op_type in _LAYERS:
            known = _is_layer(node, constants)
        elif node.op_type in _LIGHT:
            given = [name for name in _numbers(node) if name not in constants]
            known = bool(given) and born.issuperset(given) and not infinite.intersection(node.input)
        else:
            known = node.op_type in MOVES and node.input[0] in born
        if known:
            born.update(node.output)
    return born


def _find_read(nodes: Any) -> set[str]:
    """Tensors that a heavy operator reads, or light ones before it."""
    readers = defaultdict(list)
    for node in nodes:
        for name in node.input:
            readers[name].append(node)
    read: set[str] = set()
    for node in reversed(nodes):
        for name in node.output:
            if any(
                one.op_type in _LAYERS or (one.op_type in _LIGHT | MOVES | _AVERAGES and read.intersection(one.output))
                for one in readers[name]
            ):
                read.add(name)
    return read


def _numbers(node: Any) -> list[str]:
    """The inputs of which it makes numbers; the others are shapes and conditions."""
    if node.op_type == "Where":
        return list(node.input[1:])
    if node.op_type in ("Clip", "Resize", "Pad"):
        return [node.input[0]]
    return [name for name in node.input if name]
