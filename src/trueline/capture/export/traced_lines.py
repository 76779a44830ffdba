"""Lines of the user's code that an exported program has operators of.

torch traces the functions that its own loops and branches are given (`scan(step, …)`) as a whole, or raises; their
operators have the line of the call.
"""

import re
from collections.abc import Iterator

import torch

from trueline.capture.export.exported import Exported
from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import SourceLine
from trueline.capture.model.syntax import is_called, lines_of_given

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def graphs_of(exported: Exported) -> list[torch.fx.Graph]:
    parts = exported.program.graph_module.modules()
    return [part.graph for part in parts if isinstance(part, torch.fx.GraphModule)]


def find_traced(exported: Exported) -> set[SourceLine]:
    """The user's innermost lines of operators in the program from which its answer follows."""
    found = set[SourceLine]()
    for graph in graphs_of(exported):
        waiting: list[torch.fx.Node] = [graph.output_node()]
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            own = find_own_line(node)
            found |= {*own, *(line for call in own if _is_structured(node) for line in _find_steps(call))}
            new = [one for one in node.all_input_nodes if one not in seen]
            seen.update(new)
            waiting += new
    return found


def find_own_line(node: torch.fx.Node) -> list[SourceLine]:
    """The user's innermost line of an operator; none where there is none. What torch itself wrote has no file."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in frames if code_paths.is_users(file) and not file.startswith("<")]
    return [SourceLine(file=file, line=int(line)) for file, line in own[-1:]]


def _is_structured(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _find_steps(call: SourceLine) -> Iterator[SourceLine]:
    """The lines of the functions that `scan(step, …)` is given. torch traces all of them, or raises; its operators have
    the line of the call."""
    return (SourceLine(file=call.file, line=line) for line in lines_of_given(call.file, call.line))


def find_followed(exported: Exported) -> set[SourceLine]:
    """The user's lines of operators that take numbers, or whose sizes follow from values, in the program."""
    found = set[SourceLine]()
    for node in (node for graph in graphs_of(exported) for node in graph.nodes if node.op == "call_function"):
        if not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(
            getattr(node.target, "tags", ())
        ):
            continue
        frames = _FRAME.findall(node.meta.get("stack_trace") or "")
        found |= {SourceLine(file=file, line=int(line)) for file, line in frames}
    return found


def find_structured(exported: Exported) -> set[SourceLine]:
    """The user's lines that call the loops and branches of torch that the program has, those inside of others too."""
    calls = [node for graph in graphs_of(exported) for node in graph.nodes if _is_structured(node)]
    return {
        line
        for node in calls
        for call in find_own_line(node)
        for line in (call, *_find_steps(call))
        if is_called(line.file, line.line, node.target.name())
    }
