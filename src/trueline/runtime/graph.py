"""A program as text that a person reads: what `trueline bundle inspect --graph` prints. Nothing is run.

                  code                                            ssa
onnx, openvino    one call a line, as in Python                   ONNX's own textual form
torch_export      the graph as Python, with the shape of values   the graph as torch.fx writes it
offload           what runs where, and the whole as torch_export  the same
torchscript       the program's source                            TorchScript's graph, calls of its own put in
aotinductor       nothing: it is machine code                     nothing

In SSA form (static single assignment) every value has one name and is assigned once. Behind each value stands the line
of the user's file that it came from, but for TorchScript, whose records of lines hold paths and are not kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trueline.errors import UsageError

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

_NO_TRACE = "        # No stacktrace found for following nodes\n"
_ASSIGNED = re.compile(r'\s*(?:\[[^\]]*\]\s*)?"?([^\s":,=]+)"?[^=]* = ')


Form = Literal["code", "ssa"]
OWN: dict[str, Form] = {"onnx": "ssa", "openvino": "ssa"}
"""The form that a format has of its own, where it is not code."""


def text(format: str, path: Path, form: Form | None = None) -> str:
    """The program file `path` in words; in the format's own form when none is named.

    Raises BundleError, and UsageError for machine code.
    """
    ssa = (form or OWN.get(format, "code")) == "ssa"
    if format in ("onnx", "openvino"):
        return _onnx(path, ssa=ssa)
    if format == "torch_export":
        return _export(path, ssa=ssa)
    if format == "offload":
        return _offload(path, ssa=ssa)
    if format == "torchscript":
        return _torchscript(path, ssa=ssa)
    raise UsageError(
        f"a program in format '{format}' is machine code and cannot be read",
        hint="ask for another program of the bundle with --format",
    )


def _torchscript(path: Path, *, ssa: bool) -> str:
    from trueline.runtime import torchscript_archive

    if not ssa:
        return torchscript_archive.source(path)
    from trueline.runtime import torchscript

    return str(torchscript.opened(path).inlined_graph)


def _onnx(path: Path, *, ssa: bool) -> str:
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    if not ssa:
        from trueline.runtime import onnx_listing

        return onnx_listing.code(model)
    for tensor in model.graph.initializer:  # their names, types and shapes are wanted, not their numbers
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
    graphs = [model.graph, *(a.g for node in model.graph.node for a in node.attribute if a.HasField("g"))]
    nodes = [node for graph in graphs for node in graph.node if node.output]
    places = {node.output[0]: one.value for node in nodes for one in node.metadata_props if one.key == "source"}
    return _placed(onnx.printer.to_text(model), places)


def _placed(text: str, places: Mapping[str, str]) -> str:
    """`text` with the user's line behind each line that assigns a value whose place is known."""

    def told(line: str) -> str:
        found = _ASSIGNED.match(line)
        place = places.get(found[1]) if found else None
        return f"{line}  # {place}" if place else line

    return "\n".join(map(told, text.splitlines())) + "\n"


def _offload(path: Path, *, ssa: bool) -> str:
    from trueline.runtime import offload

    plan = offload.read(path)
    parts = "".join(
        f"# {part.file}: {', '.join(part.inputs)} -> {', '.join(part.outputs)}\n"
        f"#     in place of {', '.join(part.nodes)}\n"
        for part in plan.parts
    )
    return f"# {plan}\n{parts}{_export(path.parent / plan.program, ssa=ssa)}"


def _export(path: Path, *, ssa: bool) -> str:
    from trueline.runtime import torch_export

    program = torch_export.load(path)
    if ssa:
        code = "\n".join(_assigned(program.graph_module, "program"))
    else:
        code = program.graph_module.print_readable(print_output=False, expanded_def=True)
        code = code.replace(_NO_TRACE, "")
        code = _placed(code, {node.name: _place(node) for node in program.graph.nodes})
    return f"{code}\n# {program.graph_signature}\n# ranges: {program.range_constraints}\n"


def _assigned(module: GraphModule, name: str) -> Iterator[str]:
    """Each value of `module` and then of the graphs in it, those of cond, while_loop and scan."""
    from torch.fx import GraphModule

    yield f"graph {name}:"
    for node in module.graph.nodes:
        place = _place(node)
        yield f"    {node.format_node()}" + (f"  # {place}" if place else "")
    for child, part in module.named_children():
        if isinstance(part, GraphModule):
            yield ""
            yield from _assigned(part, f"{name}.{child}")


def _place(node: Node) -> str:
    return str(node.meta.get("stack_trace") or "")
