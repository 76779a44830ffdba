"""An ONNX program as code that reads like Python: one call a line, with the line of the user's file behind it.

For reading, not for running: names are made identifiers, and of what a program holds, weights and large constants,
only type and shape are said. The graphs of If, Loop and Scan stand as functions before the call that takes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import onnx

SOURCE = "source"
"""Under this name the metadata of a node say the line that it came from, see `onnx_emit`."""
_FEW = 8
"""Elements of a constant that are shown."""


def code(model: onnx.ModelProto) -> str:
    """The whole program, functions first."""
    functions = [line for function in model.functions for line in _function(function)]
    return "\n".join([*functions, *_graph(model.graph, "", _name(model.graph.name) or "program")]) + "\n"


def _graph(graph: onnx.GraphProto, indent: str, name: str) -> Iterator[str]:
    held = {tensor.name: tensor for tensor in graph.initializer}
    given = [f"{_name(value.name)}: {_typed(value)!r}" for value in graph.input if value.name not in held]
    yield f"{indent}def {name}({', '.join(given)}):"
    inner = indent + "    "
    for tensor in held.values():
        yield f"{inner}{_name(tensor.name)} = weight({_shape(tensor)!r})"
    yield from _nodes(graph.node, inner)
    yield f"{inner}return {', '.join(_name(value.name) for value in graph.output)}"


def _function(function: onnx.FunctionProto) -> Iterator[str]:
    yield f"def {_name(function.name)}({', '.join(map(_name, function.input))}):"
    yield from _nodes(function.node, "    ")
    yield f"    return {', '.join(map(_name, function.output))}"
    yield ""


def _nodes(nodes: Any, indent: str) -> Iterator[str]:
    for node in nodes:
        said = [_name(name) if name else "None" for name in node.input]
        result = ", ".join(_name(name) if name else "_" for name in node.output)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                inner = f"{result.split(',')[0]}_{attribute.name}"
                yield from _graph(attribute.g, indent, inner)
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


def _typed(value: onnx.ValueInfoProto) -> str:
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
