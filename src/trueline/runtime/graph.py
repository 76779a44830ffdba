"""A program as text: what `trueline bundle inspect --graph` prints. Nothing is run.

                  code                                             ssa
onnx, openvino    one call a line, as in Python                    ONNX's own textual form
torch_export      the graph as Python, with the shape of values    the graph as torch.fx writes it
offload           the parts, and the whole as torch_export         the same
torchscript       the program's source                             TorchScript's graph, with its own calls inlined

In SSA form (static single assignment) every value is assigned once. Each value is followed by the user's line that it
comes from, except in TorchScript, whose records of lines hold paths and are removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import onnx

from trueline.errors import UsageError

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

SOURCE = "source"
"""Key in an ONNX node's metadata: the line that it came from, written by `capture/onnx/emit.py`."""
_FEW = 8
"""Elements of a constant that are shown."""
_NO_TRACE = "        # No stacktrace found for following nodes\n"
_ASSIGNED = re.compile(r'\s*(?:\[[^\]]*\]\s*)?"?([^\s":,=]+)"?[^=]* = ')


Form = Literal["code", "ssa"]
OWN: dict[str, Form] = {"onnx": "ssa", "openvino": "ssa"}
"""A format's own form, where it is not code."""


def text(format: str, path: Path, form: Form | None = None) -> str:
    """The text of the program file `path`, by default in the format's own form. Raises BundleError, and UsageError for
    machine code."""
    ssa = (form or OWN.get(format, "code")) == "ssa"
    if format in _WRITERS:
        return _WRITERS[format](path, ssa)
    raise UsageError(
        f"a program in format '{format}' is machine code and cannot be read",
        hint="ask for another program of the bundle with --format",
    )


def _torchscript(path: Path, ssa: bool) -> str:
    from trueline.runtime import torchscript_archive

    if not ssa:
        return torchscript_archive.source(path)
    from trueline.runtime import torchscript

    return str(torchscript.open_module(path).inlined_graph)


def _onnx(path: Path, ssa: bool) -> str:
    model = onnx.load(str(path), load_external_data=False)
    if not ssa:
        return onnx_code(model)
    for tensor in model.graph.initializer:  # only their names, types and shapes are printed
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
    graphs = [model.graph, *(a.g for node in model.graph.node for a in node.attribute if a.HasField("g"))]
    nodes = [node for graph in graphs for node in graph.node if node.output]
    places = {node.output[0]: one.value for node in nodes for one in node.metadata_props if one.key == SOURCE}
    return _with_places(onnx.printer.to_text(model), places)


def _with_places(text: str, places: Mapping[str, str]) -> str:
    """`text` with the user's line behind each assignment of a value whose line is known."""
    lines = []
    for line in text.splitlines():
        match = _ASSIGNED.match(line)
        place = places.get(match[1]) if match else None
        lines.append(f"{line}  # {place}" if place else line)
    return "\n".join(lines) + "\n"


def _offload(path: Path, ssa: bool) -> str:
    from trueline.runtime import offload

    plan = offload.read(path)
    parts = "".join(
        f"# {part.file}: {', '.join(part.inputs)} -> {', '.join(part.outputs)}\n"
        f"#     in place of {', '.join(part.nodes)}\n"
        for part in plan.parts
    )
    return f"# {plan}\n{parts}{_export(path.parent / plan.program, ssa)}"


def _export(path: Path, ssa: bool) -> str:
    from trueline.runtime import torch_export

    program = torch_export.load(path)
    if ssa:
        code = "\n".join(_assignments(program.graph_module, "program"))
    else:
        code = program.graph_module.print_readable(print_output=False, expanded_def=True)
        code = code.replace(_NO_TRACE, "")
        code = _with_places(code, {node.name: _place(node) for node in program.graph.nodes})
    return f"{code}\n# {program.graph_signature}\n# ranges: {program.range_constraints}\n"


_WRITERS = {"onnx": _onnx, "openvino": _onnx, "torch_export": _export, "offload": _offload, "torchscript": _torchscript}


def _assignments(module: GraphModule, name: str) -> Iterator[str]:
    """Each value of `module`, then of the graphs of its cond, while_loop and scan."""
    from torch.fx import GraphModule

    yield f"graph {name}:"
    for node in module.graph.nodes:
        place = _place(node)
        yield f"    {node.format_node()}" + (f"  # {place}" if place else "")
    for child, part in module.named_children():
        if isinstance(part, GraphModule):
            yield ""
            yield from _assignments(part, f"{name}.{child}")


def _place(node: Node) -> str:
    return str(node.meta.get("stack_trace") or "")


def onnx_code(model: onnx.ModelProto) -> str:
    """An ONNX program as code that reads like Python: one call a line, functions first.

    For reading, not for running: names become identifiers, and a weight or large constant is shown as its type and
    shape. The graphs of If, Loop and Scan stand as functions before the call that takes them.
    """
    functions = [line for function in model.functions for line in _onnx_function(function)]
    return "\n".join([*functions, *_onnx_graph(model.graph, "", _name(model.graph.name) or "program")]) + "\n"


def _onnx_graph(graph: onnx.GraphProto, indent: str, name: str) -> Iterator[str]:
    held = {tensor.name: tensor for tensor in graph.initializer}
    given = [f"{_name(value.name)}: {_type_text(value)!r}" for value in graph.input if value.name not in held]
    yield f"{indent}def {name}({', '.join(given)}):"
    inner = indent + "    "
    for tensor in held.values():
        yield f"{inner}{_name(tensor.name)} = weight({_shape(tensor)!r})"
    yield from _onnx_nodes(graph.node, inner)
    yield f"{inner}return {', '.join(_name(value.name) for value in graph.output)}"


def _onnx_function(function: onnx.FunctionProto) -> Iterator[str]:
    yield f"def {_name(function.name)}({', '.join(map(_name, function.input))}):"
    yield from _onnx_nodes(function.node, "    ")
    yield f"    return {', '.join(map(_name, function.output))}"
    yield ""


def _onnx_nodes(nodes: Any, indent: str) -> Iterator[str]:
    for node in nodes:
        said = [_name(name) if name else "None" for name in node.input]
        result = ", ".join(_name(name) if name else "_" for name in node.output)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                inner = f"{result.split(',')[0]}_{attribute.name}"
                yield from _onnx_graph(attribute.g, indent, inner)
                said.append(f"{attribute.name}={inner}")
            else:
                said.append(f"{attribute.name}={_value(attribute)}")
        place = next((f"  # {one.value}" for one in node.metadata_props if one.key == SOURCE), "")
        prefix = f"{_name(node.domain)}." if node.domain not in ("", "ai.onnx") else ""
        yield f"{indent}{result} = {prefix}{node.op_type}({', '.join(said)}){place}"


def _value(attribute: onnx.AttributeProto) -> str:
    if attribute.type == onnx.AttributeProto.TENSOR:
        tensor = attribute.t
        small = sum(tensor.dims) <= _FEW and tensor.data_location != onnx.TensorProto.EXTERNAL
        return repr(onnx.numpy_helper.to_array(tensor).tolist()) if small else f"weight({_shape(tensor)!r})"
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return repr(value.decode(errors="replace"))
    return repr(value if isinstance(value, str | int | float) else list(value) if hasattr(value, "__len__") else "…")


def _shape(tensor: onnx.TensorProto) -> str:
    return f"{_kind(tensor.data_type)}{list(tensor.dims)}"


def _type_text(value: onnx.ValueInfoProto) -> str:
    kind = value.type.tensor_type
    sizes = [dim.dim_param or str(dim.dim_value) if dim.WhichOneof("value") else "?" for dim in kind.shape.dim]
    return f"{_kind(kind.elem_type)}[{', '.join(sizes)}]"


def _kind(number: int) -> str:
    return str(onnx.TensorProto.DataType.Name(number)).lower()


def _name(text: str) -> str:
    """
    >>> _name("module.0.weight"), _name("1x")
    ('module_0_weight', '_1x')
    """
    plain = re.sub(r"\W", "_", text)
    return f"_{plain}" if plain[:1].isdigit() else plain
