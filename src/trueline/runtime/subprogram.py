"""A part of an exported program as a program of its own.

Sizes that the part needs (a `sym_size` and arithmetic on it) are computed again inside it, so that only tensors cross
its border. The symbols of the whole keep their names and ranges.
"""

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_structure

from trueline.bundle.signature import DATATYPES
from trueline.errors import CaptureError

_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subprogram:
    """A part, with the names that its inputs and outputs have in the whole."""

    program: torch.export.ExportedProgram
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weight_bytes: int


def is_operator(node: Node) -> bool:
    """Whether `node` computes a tensor or several that are used, and not a size or a check of sizes."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    computes = bool(values) and all(isinstance(one, torch.Tensor) for one in values)
    return node.op == "call_function" and bool(node.users) and computes


def name_of(node: Node) -> str:
    """A value's name in every copy of its graph: a copied placeholder may get another name, but keeps its target."""
    return str(node.target) if node.op == "placeholder" else node.name


def cut(program: torch.export.ExportedProgram, nodes: Iterable[Node]) -> Subprogram:
    """The part that computes `nodes`, operators of `program.graph`.

    Raises CaptureError for a part without inputs or without used outputs, or whose border cuts a value that is no
    array.
    """
    chosen = set(nodes)
    inside = chosen | _size_nodes(chosen)
    weights = {spec.arg.name: spec for spec in program.graph_signature.input_specs if spec.kind in _WEIGHTS}
    outer = [node for node in program.graph.nodes if node not in inside and any(user in inside for user in node.users)]
    lifted = sorted(
        (node for node in outer if node.name in weights), key=lambda node: _WEIGHTS.index(weights[node.name].kind)
    )
    given = [node for node in outer if node.name not in weights]
    answers = [
        node for node in program.graph.nodes if node in chosen and any(user not in chosen for user in node.users)
    ]
    for node in (*given, *answers):
        _check_border(node)
    if not given or not answers:
        raise CaptureError("the part is a constant, or its outputs are unused")
    graph = _copy_graph(program.graph, inside, (*lifted, *given), answers)
    specs = [weights[node.name] for node in lifted]
    state = {spec.target: program.state_dict[spec.target] for spec in specs if spec.target in program.state_dict}
    constants = {spec.target: program.constants[spec.target] for spec in specs if spec.target in program.constants}
    held = {**state, **constants}.values()
    part = torch.export.ExportedProgram(
        root=GraphModule(program.graph_module, graph),
        graph=graph,
        graph_signature=ExportGraphSignature(
            [*specs, *(InputSpec(InputKind.USER_INPUT, TensorArgument(name=node.name), None) for node in given)],
            [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=node.name), None) for node in answers],
        ),
        state_dict=state,
        range_constraints=dict(program.range_constraints),
        module_call_graph=_call_graph(given, answers),
        constants=constants,
    )
    return Subprogram(
        program=part,
        inputs=tuple(name_of(node) for node in given),
        outputs=tuple(name_of(node) for node in answers),
        weight_bytes=sum(w.numel() * w.element_size() for w in held if isinstance(w, torch.Tensor)),
    )


def _size_nodes(chosen: Collection[Node]) -> set[Node]:
    """Sizes and sub-graphs that `chosen` need: cheap, and copied into every part that needs them."""
    found: set[Node] = set()
    waiting = [node for one in chosen for node in one.all_input_nodes]
    while waiting:
        node = waiting.pop()
        size = node.op == "call_function" and not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))
        if node not in found and node not in chosen and (size or node.op == "get_attr"):
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _check_border(node: Node) -> None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise CaptureError(f"the border cuts '{node.name}', which is no tensor")
    try:
        fits = torch.empty(0, dtype=value.dtype).numpy().dtype in DATATYPES
    except TypeError:
        fits = False
    if not fits:
        raise CaptureError(f"the border cuts '{node.name}', which is {value.dtype}")


def _copy_graph(whole: Graph, inside: Collection[Node], outer: Iterable[Node], answers: Iterable[Node]) -> Graph:
    graph = Graph()
    new: dict[Node, Node] = {}
    for node in outer:
        new[node] = graph.create_node("placeholder", node.name, name=node.name)
        new[node].meta = dict(node.meta)
    for node in whole.nodes:
        if node in inside:
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in answers))
    return graph


def _call_graph(given: Collection[Node], answers: Collection[Node]) -> list[Any]:
    """The form of the call for torch: a tuple in, a tuple out."""
    from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature

    signature = ModuleCallSignature(
        inputs=[],
        outputs=[],
        in_spec=tree_structure((tuple(0 for _ in given), {})),
        out_spec=tree_structure(tuple(0 for _ in answers)),
    )
    return [ModuleCallEntry(fqn="", signature=signature)]


def woven(
    module: GraphModule, pieces: Mapping[str, tuple[Collection[str], tuple[str, ...], tuple[str, ...]]]
) -> GraphModule:
    """`module` with a call of each submodule in `pieces` in place of its nodes.

    `pieces` gives for each submodule the names of these nodes, its inputs and its outputs. Raises ValueError when they
    do not fit the graph.
    """
    nodes = {name_of(node): node for node in module.graph.nodes}
    owner = {name: piece for piece, (inside, _, _) in pieces.items() for name in inside}
    missing = {name for inside, given, found in pieces.values() for name in (*inside, *given, *found)} - nodes.keys()
    if missing or pieces.keys() & nodes.keys() or len(owner) != sum(len(inside) for inside, _, _ in pieces.values()):
        raise ValueError(f"the plan names values that the program does not have, or one twice: {sorted(missing)[:3]}")
    graph = Graph()
    new: dict[str, Node] = {}
    for item in _order(nodes, owner, pieces):
        if item in pieces:
            _, given, answers = pieces[item]
            called = graph.call_module(item, tuple(new[name] for name in given))
            for at, name in enumerate(answers):
                one = len(answers) == 1
                new[name] = called if one else graph.call_function(operator.getitem, (called, at))
        else:
            new[item] = graph.node_copy(nodes[item], lambda node: new[name_of(node)])
    graph.lint()
    found = GraphModule(module, graph)
    found.delete_all_unused_submodules()
    return found


def _order(
    nodes: Mapping[str, Node],
    owner: Mapping[str, str],
    pieces: Mapping[str, tuple[Collection[str], tuple[str, ...], tuple[str, ...]]],
) -> list[str]:
    """Nodes and pieces in an order in which each follows what it needs, without what only pieces used."""
    from graphlib import CycleError, TopologicalSorter

    needs: dict[str, list[str]] = {}
    for name, node in nodes.items():
        spare = node.op == "get_attr" and all(name_of(user) in owner for user in node.users)
        if name not in owner and not spare:
            before = [name_of(one) for one in node.all_input_nodes]
            needs[name] = [owner.get(one, one) for one in before]
    for piece, (_, given, _) in pieces.items():
        needs[piece] = [owner.get(name, name) for name in given]
    takes = [name for name in needs if name in nodes and nodes[name].op == "placeholder"]
    gives = [name for name in needs if name in nodes and nodes[name].op == "output"]
    try:
        order = list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        raise ValueError("the pieces of the plan wait for each other") from error
    return [*takes, *(one for one in order if one not in takes and one not in gives), *gives]
