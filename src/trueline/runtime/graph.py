"""A program as text that a person reads: what `trueline inspect --graph` prints. Nothing is run.

onnx, openvino    ONNX's own textual form: one value a line, assigned once, with the line that it came from
torch_export      the graph as Python, one operator a line, with the shape of each value and its line
offload           what runs where, and the graph of the whole
torchscript       the program's source
aotinductor       nothing: it is machine code
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from trueline.errors import UsageError

_ASSIGNED = re.compile(r'\s*(?:\[[^\]]*\]\s*)?"?([^\s":,=]+)"?[^=]* = ')


def text(format: str, path: Path) -> str:
    """The program file `path` in words. Raises BundleError, and UsageError for machine code."""
    if format in ("onnx", "openvino"):
        return _onnx(path)
    if format == "torch_export":
        return _export(path)
    if format == "offload":
        return _offload(path)
    if format == "torchscript":
        from trueline.runtime import script_archive

        return script_archive.source(path)
    raise UsageError(
        f"a program in format '{format}' is machine code and cannot be read",
        hint="ask for another program of the bundle with --format",
    )


def _onnx(path: Path) -> str:
    import onnx

    model = onnx.load(str(path), load_external_data=False)
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


def _offload(path: Path) -> str:
    from trueline.runtime import offload

    plan = offload.read(path)
    parts = "".join(
        f"# {part.file}: {', '.join(part.inputs)} -> {', '.join(part.outputs)}\n"
        f"#     in place of {', '.join(part.nodes)}\n"
        for part in plan.parts
    )
    return f"# {plan}\n{parts}{_export(path.parent / plan.program)}"


def _export(path: Path) -> str:
    from trueline.runtime import export

    program = export.load(path)
    code: str = program.graph_module.print_readable(print_output=False, expanded_def=True)
    places = {node.name: str(node.meta.get("stack_trace") or "") for node in program.graph.nodes}
    code = _placed(code, places)
    return f"{code}\n# {program.graph_signature}\n# ranges: {program.range_constraints}\n"
