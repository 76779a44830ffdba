"""An LSTM as a Scan over its steps: ONNX Runtime's own computes its gates by a polynomial.

A sigmoid of -18 and below is 0 there, and 1e-8 is off by as much. A gate that is all but shut multiplies the answer, so
an answer of 1e-8 was twice the model's. Here each gate is computed by its formula, where an answer holds what the LSTM
returns and no layer adds to it. Source: ONNX's LSTM of opset 14.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir import convenience

from trueline.capture.onnx.precision import reaches_output
from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="onnxruntime 1.31",
    cost="several times as slow as the operator; only for a last layer, or where the operator is refused",
    helps=("bilstm", "lstm-gate"),
)
_GATES = ("input", "output", "forget", "cell")
_DIRECTIONS = {"forward": (0,), "reverse": (1,), "bidirectional": (0, 1)}
"""Value of the attribute -> for each direction whether it goes backwards."""


def compute_gates_exactly(model: ir.Model, *, every: bool) -> None:
    """Rewrites in `model` each LSTM whose outputs reach an answer as they are, or `every` one. One with sequence
    lengths, or without initial states, stays."""
    for number, node in enumerate(list(ir.traversal.RecursiveGraphIterator(model.graph))):
        given = [*node.inputs, *[None] * 8][:8] if node.op_type == "LSTM" else []
        plain = given and None not in (*given[:3], *given[5:7]) and given[4] is None and given[7] is None
        if plain and (every or reaches_output(node)):
            _replace(node, given, f"lstm_{number}")


class _Nodes(ir.tape.Tape):
    """Nodes with names of their own, of one float type."""

    def __init__(self, name: str, kind: ir.DataType | None) -> None:
        super().__init__()
        self._name, self._kind = name, kind

    def add(self, op_type: str, *inputs: Any, **attributes: Any) -> Any:
        made = self.op(op_type, inputs, attributes)
        self._finish(made)
        return made

    def add_many(self, op_type: str, count: int, *inputs: Any, **attributes: Any) -> Sequence[Any]:
        made = self.op_multi_out(op_type, inputs, attributes, num_outputs=count)
        for one in made:
            self._finish(one)
        return made

    def constant(self, values: Any, kind: ir.DataType = ir.DataType.INT64) -> Any:
        made = self.add("Constant", value=ir.tensor(values, dtype=kind))
        made.type = ir.TensorType(kind)
        return made

    def _finish(self, value: ir.Value) -> None:
        value.name = f"{self._name}_{len(self.nodes)}_{value.index()}"
        value.type = None if self._kind is None else ir.TensorType(self._kind)


def _replace(node: ir.Node, given: Sequence[Any], name: str) -> None:
    x, weights, recurrent, biases, _, h, c, _ = given
    nodes = _Nodes(name, x.dtype)
    zero, one = (nodes.constant([number]) for number in (0, 1))
    attribute = node.attributes.get("direction")
    found = []
    for way, backwards in enumerate(_DIRECTIONS["forward" if attribute is None else attribute.as_string()]):
        at = nodes.constant(way)
        given_w, held_w, start, cell = (nodes.add("Gather", one_, at, axis=0) for one_ in (weights, recurrent, h, c))
        steps = nodes.add("MatMul", x, nodes.add("Transpose", given_w, perm=[1, 0]))
        if biases is not None:
            both = nodes.add_many("Split", 2, nodes.add("Gather", biases, at, axis=0), axis=0, num_outputs=2)
            steps = nodes.add("Add", steps, nodes.add("Add", *both))
        held = nodes.add("Transpose", held_w, perm=[1, 0])
        body = _body(f"{name}_{way}", x.dtype, held)
        directions = {"scan_input_directions": [backwards], "scan_output_directions": [backwards]}
        found.append(nodes.add_many("Scan", 3, start, cell, steps, body=body, num_scan_inputs=1, **directions))
    made = [
        nodes.add("Concat", *(nodes.add("Unsqueeze", each[at], axis) for each in found), axis=along)
        for at, axis, along in ((2, one, 1), (0, zero, 0), (1, zero, 0))
    ]
    for old, new in zip(node.outputs, made, strict=False):
        new.shape, new.type = old.shape, old.type
    for new_node in nodes.nodes:
        new_node.metadata_props.update(node.metadata_props)
    count = len(node.outputs)
    assert node.graph is not None
    convenience.replace_nodes_and_values(node.graph, node, [node], nodes.nodes, node.outputs, made[:count])


def _body(name: str, kind: ir.DataType | None, held: ir.Value) -> ir.Graph:
    """One step: of the state, the cell and what the step's input adds to the gates, the next state, cell and output."""
    names = ("state", "cell", "step")
    kinds: Mapping[str, Any] = {"type": None if kind is None else ir.TensorType(kind)}
    h, c, step = (ir.Value(name=f"{name}_{each}", **kinds) for each in names)
    nodes = _Nodes(f"{name}_step", kind)
    one = nodes.constant(1.0, kind or ir.DataType.FLOAT)
    sums = nodes.add("Add", step, nodes.add("MatMul", h, held))
    parts = dict(zip(_GATES, nodes.add_many("Split", 4, sums, axis=1, num_outputs=4), strict=True))
    opened = {
        gate: nodes.add("Reciprocal", nodes.add("Add", one, nodes.add("Exp", nodes.add("Neg", parts[gate]))))
        for gate in _GATES[:3]
    }
    fresh = nodes.add("Mul", opened["input"], nodes.add("Tanh", parts["cell"]))
    cell = nodes.add("Add", nodes.add("Mul", opened["forget"], c), fresh)
    state = nodes.add("Mul", opened["output"], nodes.add("Tanh", cell))
    output = nodes.add("Identity", state)
    return ir.Graph([h, c, step], [state, cell, output], nodes=nodes.nodes, name=f"{name}_body")
