"""Parts of a weight are stored as weights of their own, turned as they are read.

The matrices of nn.MultiheadAttention for queries, keys and values are one parameter. torch.onnx turns a weight when it
writes a program, and leaves a Split of one to the runtime, which computes it when it opens the program: in memory of
its own then, which processes that serve one bundle cannot share.
"""

import numpy as np
import onnx_ir as ir

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="onnxscript 0.7.2",
    cost="a copy of the weights that are split",
    helps=("torch_encoder", "torch_transformer"),
)


def store_parts(model: ir.Model) -> None:
    """Rewrites `model` in place."""
    graph = model.graph
    for node in list(graph):
        if node.op_type == "Split" and not node.domain and _is_weight(node.inputs[0], graph):
            _store(graph, node)


def _is_weight(value: ir.Value | None, graph: ir.Graph) -> bool:
    return (
        value is not None and value.name in graph.initializers and value.const_value is not None
        and value not in graph.inputs and not value.is_graph_output()
    )  # fmt: skip


def _store(graph: ir.Graph, split: ir.Node) -> None:
    whole, sizes = split.inputs[0], split.inputs[1] if len(split.inputs) > 1 else None
    assert whole is not None
    assert whole.const_value is not None
    lengths = None if sizes is None or sizes.const_value is None else sizes.const_value.numpy()
    if sizes is not None and lengths is None:
        return
    axis = split.attributes.get_int("axis", 0)
    array = whole.const_value.numpy()
    cuts = len(split.outputs) if lengths is None else np.cumsum(lengths)[:-1].tolist()
    if lengths is None and array.shape[axis] % len(split.outputs):
        return
    if any(one.is_graph_output() for one in split.outputs):
        return
    for number, (old, part) in enumerate(zip(split.outputs, np.split(array, cuts, axis), strict=True)):
        for node, _ in tuple(old.uses()):
            perm = node.attributes.get_ints("perm", ()) if node.op_type == "Transpose" and not node.domain else ()
            if perm and not node.outputs[0].is_graph_output():
                turned = _add(graph, f"{whole.name}.{number}.turned", part.transpose(perm))
                ir.convenience.replace_all_uses_with(node.outputs[0], turned)
                graph.remove(node, safe=True)
        if old.uses():
            ir.convenience.replace_all_uses_with(old, _add(graph, f"{whole.name}.{number}", part))
    graph.remove(split, safe=True)
    if not whole.uses():
        del graph.initializers[str(whole.name)]


def _add(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    while name in graph.initializers:
        name += "_"
    value = ir.Value(name=name, const_value=ir.tensor(np.ascontiguousarray(array), name=name))
    assert value.const_value is not None
    value.dtype, value.shape = value.const_value.dtype, ir.Shape(array.shape)
    graph.initializers[name] = value
    return value
