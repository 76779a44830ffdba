"""Arithmetic on sizes with fractions, in the precision of Python: `floor(0.29 * length)` in doubles.

torch.onnx computes it in floats, and a product that Python rounds to 28.999999999999996 is then 29: another size, at
some lengths only, which few probes meet. The exporter says of each node which call of the traced program it is made of;
calls of Python's own operators (`operator.mul`, `math.floor`, `torch.sym_float`) are arithmetic on sizes. What they
compute becomes double, their constants are read from the call, and what goes into tensors is a float as before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from trueline.capture.patches import Patch
from trueline.errors import CaptureError

PATCH = Patch(
    issue="https://github.com/pytorch/pytorch/issues/153115",
    versions="torch 2.13",
    cost="one pass over the graph",
    helps=("BestShare", "nllb_moe"),
)

_SAID = "pkg.torch.onnx.fx_node"
_CALL = re.compile(r"call_function\[target=((?:operator|math|builtins|torch\.sym_)[\w.]*)\]\(args = \((.*)\), kwargs")


def exact(model: ir.Model) -> None:
    """Rewrites `model` in place. Raises CaptureError for a fraction in it that the exporter does not say exactly."""
    nodes = [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if _calls(node)]
    turned = [value for node in nodes for value in node.outputs if value.dtype == ir.DataType.FLOAT]
    if not turned:
        return
    for number, node in enumerate(nodes):
        _constants(model, node, number)
    for node in nodes:
        to = node.attributes.get("to")
        if node.op_type == "Cast" and to is not None and to.as_int() == ir.DataType.FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.DOUBLE)
    for value in turned:
        value.dtype = ir.DataType.DOUBLE
        _as_before(value)
    for node in nodes:
        _taken_in(node)
    for name in [name for name, value in model.graph.initializers.items() if not value.uses()]:
        model.graph.initializers.pop(name)


def _calls(node: ir.Node) -> re.Match[str] | None:
    return _CALL.search(node.metadata_props.get(_SAID, ""))


def _constants(model: ir.Model, node: ir.Node, number: int) -> None:
    """The fractions among the inputs of `node`, as the call says them."""
    call = _calls(node)
    said = [float(one) for one in _numbers(call[2])] if call else []
    for at, value in enumerate(node.inputs):
        tensor = value.const_value if value is not None else None
        if tensor is None or tensor.dtype != ir.DataType.FLOAT:
            continue
        held = tensor.numpy().item() if tensor.size == 1 else float("nan")
        fitting = [one for one in said if np.float32(one) == np.float32(held)]
        if not fitting and not _plain(held):
            raise CaptureError(
                f"a size is computed with the fraction {held:g}, and torch.onnx does not say how exactly",
                hint="compute sizes in whole numbers (//) in the model",
            )
        made = ir.tensor(np.array(fitting[0] if fitting else held, np.float64), name=f"exact_{number}_{at}")
        new = ir.Value(name=made.name, const_value=made, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.DOUBLE))
        model.graph.register_initializer(new)
        node.replace_input_with(at, new)


def _numbers(arguments: str) -> Iterator[str]:
    return (found[0] for found in re.finditer(r"(?<![\w%.])-?\d+(\.\d+)?(e[-+]?\d+)?(?![\w.])", arguments))


def _plain(number: float) -> bool:
    """Whether a float holds it as a double would: a few binary places."""
    return (number * 1024).is_integer()


def _as_before(value: ir.Value) -> None:
    """Hands `value` to what is no arithmetic on sizes as a float."""
    others = [(user, at) for user, at in value.uses() if not _calls(user)]
    producer = value.producer()
    assert producer is not None
    if others:
        given = _cast(value, ir.DataType.FLOAT, after=producer)
        for user, at in others:
            user.replace_input_with(at, given)


def _taken_in(node: ir.Node) -> None:
    """Takes a float that comes from a tensor (`x.mean().item() * length`) for the double that it is in Python."""
    for at, value in enumerate(node.inputs):
        producer = value.producer() if value is not None else None
        if value is not None and producer is not None and value.dtype == ir.DataType.FLOAT and node.op_type != "Cast":
            node.replace_input_with(at, _cast(value, ir.DataType.DOUBLE, after=producer))


def _cast(value: ir.Value, to: ir.DataType, *, after: ir.Node) -> ir.Value:
    cast = ir.node("Cast", [value], attributes={"to": to})
    made = cast.outputs[0]
    made.name = f"{value.name}_as_{to.name.lower()}"
    made.type, made.shape = ir.TensorType(to), value.shape
    assert after.graph is not None
    after.graph.insert_after(after, cast)
    return made
