"""Layers that a program leaves in float32 stay there.

ONNX Runtime's pass WeightBiasQuantization rounds the constant weights of a convolution or Gemm whose input
and output are rounded, with one scale for all channels, although nothing in the program asks for it. So a layer that
was left out since int8 ruins it was in int8 all the same. The pass looks for the input's DequantizeLinear, and does not
see through a sum of one number, which costs a copy.
"""

from __future__ import annotations

from typing import Any

from onnx import helper

_ROUNDED = ("Conv", "ConvTranspose", "Gemm")


def keep_floats(model: Any) -> None:
    """Puts a Sum before each layer of float32 weights that reads what was rounded; the answers stay."""
    weights = {one.name for one in model.graph.initializer}
    widened = {
        node.output[0]
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] not in weights
    }
    nodes, copies = [], {}
    for node in model.graph.node:
        if node.op_type in _ROUNDED and node.input[0] in widened and node.input[1] in weights:
            source = node.input[0]
            if source not in copies:
                copies[source] = f"{source}_in_float32"
                nodes.append(helper.make_node("Sum", [source], [copies[source]], name=copies[source]))
            node.input[0] = copies[source]
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
