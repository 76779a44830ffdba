"""The operators of an exported program: custom ones as aten operators, lines that call them, buffers that they
write."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.value_ranges import ValueRanges

from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import SourceLine
from trueline.runtime.refusals import REFUSES, shorten_check


def _grouped_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Rows [S, K] sorted by group, each times its group's weight [G, K, N]; `offs` [G] are the ends of the groups.

    Values decide the sizes of groups, so all rows are multiplied by each weight and one product is kept: G times the
    work. Rows beyond the last group are 0, as in the original.
    """
    at = torch.arange(input.shape[0], device=input.device)
    found = input.new_zeros(input.shape[0], weight.shape[2])
    start = torch.zeros_like(offs[0])
    for group in range(weight.shape[0]):
        inside = (at >= start) & (at < offs[group])
        found = torch.where(inside[:, None], input @ weight[group], found)
        start = offs[group]
    return found


EQUIVALENTS: dict[str, Callable[..., Any]] = {"transformers::grouped_mm_fallback": _grouped_mm}
"""Name of an operator -> the same in aten operators."""


def as_aten(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """`program` with equivalents in place of operators that have one, and without torch's wrappers of operators (an
    autocast, the levels of a vmap); itself where it has neither."""
    parts = [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    graphs = [part.graph for part in parts]
    for part in parts:
        _name_checks(part)
    called = {node.target: None for graph in graphs for node in graph.nodes if node.op == "call_function"}
    custom = [one for one in called if isinstance(one, torch._ops.OpOverload) and one._schema.name in EQUIVALENTS]
    wrapped = torch.ops.higher_order.wrap_with_autocast in called or any(
        getattr(one, "__module__", "") == "torch._functorch.predispatch" for one in called
    )
    table = {one: EQUIVALENTS[one._schema.name] for one in custom}
    for part in parts if wrapped else ():
        _drop_dtype_checks(part)
    return program.run_decompositions(table) if table or wrapped else program


def _drop_dtype_checks(part: torch.fx.GraphModule) -> None:
    """Drops the checks of dtypes, which are the same in every call: within a vmap torch cannot decompose them where a
    size is free."""
    for node in part.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        part.graph.erase_node(node)
    part.recompile()


def _name_checks(part: torch.fx.GraphModule) -> None:
    """Begins the message of each check of values with `REFUSES`, which tells the server whose fault a failure is. torch
    drops checks without a message from a graph, since nothing uses their result."""
    checks = torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg
    found = [node for node in part.graph.nodes if node.target in checks]
    for node in found:
        said = "" if node.target is checks[0] else shorten_check(str(node.args[1]))
        node.target, node.args = checks[1], (*node.args[:1], f"{REFUSES}: {said}" if said else REFUSES)
    if found:
        part.recompile()


_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)


def may_choose(program: torch.export.ExportedProgram) -> bool:
    """Whether an operator may take one of equal numbers, as a sort or a top-k does: it returns whole numbers."""
    parts = [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    called = [node for part in parts for node in part.graph.nodes if node.op == "call_function"]
    return any(map(_returns_whole, called))


def _returns_whole(node: torch.fx.Node) -> bool:
    """Whether `node` returns a tensor of whole numbers, or what it returns is not known. Numbers are sizes."""
    if isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns:
        return False
    found = tree_leaves(node.meta.get("val"))
    tensors = [one for one in found if isinstance(one, torch.Tensor)]
    whole = any(not (one.is_floating_point() or one.is_complex() or one.dtype == torch.bool) for one in tensors)
    return whole or any(not isinstance(one, (torch.Tensor, *_NUMBERS)) for one in found)


_NODE = re.compile(r"%(\w+) :")
_OPERATOR = re.compile(r"torch\.ops\.(\w+\.\w+\.\w+)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def line_of(program: torch.export.ExportedProgram, said: str) -> SourceLine | None:
    """The user's line that called the node, or else the operator, that the message `said` names."""
    nodes = list(program.graph.nodes)
    names, operators = set(_NODE.findall(said)[:1]), set(_OPERATOR.findall(said)[:1])
    found = [node for node in nodes if node.name in names] or [node for node in nodes if str(node.target) in operators]
    for node in found or [node for node in nodes if _is_made_of(node, operators)]:
        frames = [(file, int(line)) for file, line in _FRAME.findall(node.meta.get("stack_trace") or "")]
        places = [SourceLine(file=file, line=line) for file, line in frames if code_paths.is_users(file)]
        if places:
            return places[-1]
    return None


def _is_made_of(node: torch.fx.Node, operators: Collection[str]) -> bool:
    """Whether an operator of that name is what torch makes of the node: `aten.linalg_inv_ex` of `aten.linalg_inv`."""
    name = str(node.target).removesuffix(".default")
    return isinstance(node.target, torch._ops.OpOverload) and any(one.startswith(f"{name}_") for one in operators)


_QUIET = frozenset({"training", "use_input_stats"})
"""Arguments that say whether a normalization renews its running statistics."""


def written_buffers(program: torch.export.ExportedProgram) -> Mapping[str, str]:
    """The buffers that `program` writes. torch lists them only for a functional graph, which takes as long as a
    trace."""
    if not may_write_buffers(program):
        return {}
    found: Mapping[str, str] = program.run_decompositions({}).graph_signature.buffers_to_mutate
    return found


def may_write_buffers(program: torch.export.ExportedProgram) -> bool:
    """Whether `program` may write into a buffer, an input or a constant: false if each operator that writes does so
    into a tensor that the graph made.

    An operator's schema says what it writes and of what its output is a view. Composite and custom operators, and a
    normalization that keeps statistics, may do more. Source: torch's aten/src/ATen/native/README.md, "Annotations".
    """
    return any(node.op == "call_function" and _may_write(node) for node in program.graph.nodes)


def _may_write(node: torch.fx.Node) -> bool:
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload):
        # arithmetic on sizes, getitem; what torch calls a higher-order operator holds graphs of its own
        return isinstance(operator, torch._ops.OperatorBase)
    if operator.namespace not in ("aten", "prims", "_c10d_functional"):
        return True
    given = _arguments(node)
    if "running_mean" in given:
        said = next((given[name] for name in _QUIET if name in given), True)
        return said is not False and given["running_mean"] is not None
    written = [name for name, alias in _aliases(operator).items() if alias.is_write]
    return not all(_is_new(given.get(name)) for name in written)


def _is_new(value: Any) -> bool:
    """Whether a tensor has memory of its own, made by the graph."""
    if isinstance(value, list | tuple):
        return all(_is_new(one) for one in value)
    if not isinstance(value, torch.fx.Node):
        return value is None
    operator = value.target
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    if operator.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
        return False  # it may return an input itself, as `contiguous` does, which the schema does not say
    given = _arguments(value)
    return all(_is_new(given.get(name)) for name in _aliases(operator))


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call by the names of the schema, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return given | dict(zip((argument.name for argument in schema), node.args, strict=False)) | dict(node.kwargs)


def _aliases(operator: torch._ops.OpOverload) -> dict[str, Any]:
    """The arguments that the operator writes, or of which its answer may be a view."""
    return {one.name: one.alias_info for one in operator._schema.arguments if one.alias_info is not None}


@contextmanager
def ranges_from_one(program: torch.export.ExportedProgram) -> Iterator[None]:
    """In the block, where `program` is saved or loaded, each size begins at 1: torch lets one that it has as beginning
    at 2, and takes 6 for the least of three times one, and 3 where two thirds of it are not 1. The signature says what
    is held.
    """
    original = program._range_constraints
    program._range_constraints = {
        size: ValueRanges(min(2 if size.is_symbol else 1, span.lower), span.upper) for size, span in original.items()
    }
    try:
        yield
    finally:
        program._range_constraints = original
