"""May an exported program write into what outlives a call? Told from its graph, without making it functional.

torch lists the buffers that a program writes only once the graph is functional, which takes as long as tracing it. A
graph in which every operator that writes does so to what was made in the graph writes no buffer: its schema says what
an operator writes and of what its answer is a view. Operators that are made of others, or that are not torch's own, may
do more than their schema says, and so may a normalization that keeps statistics: then the answer is yes.
Source: torch's notes on schemas (aten/src/ATen/native/README.md, "Annotations").
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DispatchKey

_QUIET = frozenset({"training", "use_input_stats"})
"""Arguments that say whether a normalization renews its running statistics."""


def may_write_buffers(program: torch.export.ExportedProgram) -> bool:
    """Whether `program`, as torch.export traced it, may write into a buffer, an input or a constant when it runs."""
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
    if not isinstance(operator, torch._ops.OpOverload) or _is_composite(operator):
        return False
    given = _arguments(value)
    return all(_is_new(given.get(name)) for name in _aliases(operator))


def _is_composite(operator: torch._ops.OpOverload) -> bool:
    """Whether it is made of others: what those hand on (`contiguous` the tensor itself) the schema does not say."""
    return bool(operator.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call by the names of the schema, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return given | dict(zip((argument.name for argument in schema), node.args, strict=False)) | dict(node.kwargs)


def _aliases(operator: torch._ops.OpOverload) -> dict[str, Any]:
    """The arguments that the operator writes, or of which its answer may be a view."""
    return {one.name: one.alias_info for one in operator._schema.arguments if one.alias_info is not None}
