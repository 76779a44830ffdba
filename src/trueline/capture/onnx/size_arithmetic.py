"""torch.onnx computes fractions of sizes in single precision, where Python uses double: `floor(0.29 * length)`.

A product that Python rounds to 28.999999999999996 is then 29, at a few lengths that probes rarely meet. Nodes that the
exporter made of calls of Python's own operators (`operator.mul`, `math.floor`, `torch.sym_float`) are arithmetic on
sizes: their results become double, their constants are read from the call, and what enters tensors is a float as
before. Its division of whole numbers rounds towards zero, where Python's rounds down: `-(-length // 8)`.
"""

import re
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from trueline.capture.patches import Patch
from trueline.errors import CaptureError

PATCH = Patch(
    issue="pytorch/pytorch#153115",
    versions="torch 2.13",
    cost="one pass over the graph",
    helps=("BestShare", "nllb_moe"),
)

_NODE = "pkg.torch.onnx.fx_node"
_CALL = re.compile(
    r"call_function\[target=((?!operator\.getitem)(?:operator|math|builtins|torch\.sym_)[\w.]*)\]"
    r"\(args = \((.*)\), kwargs"
)
"""A tensor of a list is not arithmetic."""


def compute_in_double(model: ir.Model) -> None:
    """Rewrites `model` in place. Raises CaptureError for a fraction that the exporter does not record exactly."""
    nodes = [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if _size_call(node)]
    for node in nodes:
        call = _size_call(node)
        if call is not None and call[1] == "operator.floordiv" and node.op_type == "Div" and _may_be_negative(node):
            _round_down(node)
    floats = [value for node in nodes for value in node.outputs if value.dtype == ir.DataType.FLOAT]
    if not floats:
        return
    for number, node in enumerate(nodes):
        _replace_constants(model, node, number)
    for node in nodes:
        to = node.attributes.get("to")
        if node.op_type == "Cast" and to is not None and to.as_int() == ir.DataType.FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.DOUBLE)
    for value in floats:
        value.dtype = ir.DataType.DOUBLE
        # A cast takes the number as it is: `torch.full((), 0.137 * length, dtype=torch.float64)`.
        others = [(user, at) for user, at in value.uses() if not _size_call(user) and user.op_type != "Cast"]
        producer = value.producer()
        if others and producer is not None:  # tensors take it as a float
            cast = _cast(value, ir.DataType.FLOAT, after=producer)
            for user, at in others:
                user.replace_input_with(at, cast)
    for node in nodes:
        _cast_inputs(node)
    for name in [name for name, value in model.graph.initializers.items() if not value.uses()]:
        model.graph.initializers.pop(name)


def _may_be_negative(node: ir.Node) -> bool:
    """Whether one of the operands comes of a difference, a negative number, or another operator than those of sizes."""
    left = list(node.inputs)
    while left:
        value = left.pop()
        producer, tensor = (value.producer(), value.const_value) if value is not None else (None, None)
        if tensor is not None and (tensor.numpy() < 0).any():
            return True
        if producer is not None and _size_call(producer):
            if producer.op_type in ("Sub", "Neg"):
                return True
            left.extend(producer.inputs)
    return False


def _round_down(node: ir.Node) -> None:
    """What is left over has the divisor's sign in ONNX, too: without it the division is exact."""
    above, below = node.inputs
    rest = ir.node("Mod", [above, below])
    whole = ir.node("Sub", [above, rest.outputs[0]])
    assert node.graph is not None
    node.graph.insert_before(node, [rest, whole])
    for one in (rest, whole):
        one.metadata_props.update(node.metadata_props)
        one.outputs[0].type, one.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        one.outputs[0].name = f"{node.outputs[0].name}_{one.op_type.lower()}"
    node.replace_input_with(0, whole.outputs[0])


def computes_size(node: ir.Node) -> bool:
    """Whether `node` is arithmetic of Python's own operators, on sizes."""
    return _size_call(node) is not None


def _size_call(node: ir.Node) -> re.Match[str] | None:
    return _CALL.search(node.metadata_props.get(_NODE, ""))


def _replace_constants(model: ir.Model, node: ir.Node, number: int) -> None:
    """Gives `node` the fractions among its inputs as the call records them."""
    call = _size_call(node)
    recorded = [float(one) for one in _numbers(call[2])] if call else []
    for at, value in enumerate(node.inputs):
        tensor = value.const_value if value is not None else None
        if tensor is None or tensor.dtype != ir.DataType.FLOAT:
            continue
        single = tensor.numpy().item() if tensor.size == 1 else float("nan")
        matching = [one for one in recorded if np.float32(one) == np.float32(single)]
        if not matching and not (single * 1024).is_integer():  # with few binary places it is the same as a double
            raise CaptureError(
                f"a size is computed with the fraction {single:g}, and torch.onnx does not say how exactly",
                hint="compute sizes in whole numbers (//) in the model",
            )
        exact = ir.tensor(np.array(matching[0] if matching else single, np.float64), name=f"exact_{number}_{at}")
        new = ir.Value(name=exact.name, const_value=exact, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.DOUBLE))
        model.graph.register_initializer(new)
        node.replace_input_with(at, new)


def _numbers(arguments: str) -> Iterator[str]:
    return (match[0] for match in re.finditer(r"(?<![\w%.])-?\d+(\.\d+)?(e[-+]?\d+)?(?![\w.])", arguments))


def _cast_inputs(node: ir.Node) -> None:
    """Casts a float that comes from a tensor (`x.mean().item() * length`) to the double that it is in Python."""
    for at, value in enumerate(node.inputs):
        producer = value.producer() if value is not None else None
        if value is not None and producer is not None and value.dtype == ir.DataType.FLOAT and node.op_type != "Cast":
            node.replace_input_with(at, _cast(value, ir.DataType.DOUBLE, after=producer))


def _cast(value: ir.Value, to: ir.DataType, *, after: ir.Node) -> ir.Value:
    cast = ir.node("Cast", [value], attributes={"to": to})
    result = cast.outputs[0]
    result.name = f"{value.name}_as_{to.name.lower()}"
    result.type, result.shape = ir.TensorType(to), value.shape
    assert after.graph is not None
    after.graph.insert_after(after, cast)
    return result
