"""Whole numbers of a dtype for which ONNX Runtime has no kernel of an operator are computed in a wider one.

`x.clamp(1, 3)` of INT16, a maximum, a `where`, a product of two matrices of INT8: ONNX has them, and ONNX Runtime does
not open such a program. The operator gets its operands in INT32 or INT64, and its result is cast back, which drops the
same bits as arithmetic in the narrow dtype. ONNX Runtime itself lists its kernels.
"""

from collections.abc import Iterator, Mapping
from functools import cache

import onnx
import onnx_ir as ir
from onnxruntime.capi import _pybind_state as onnxruntime_state

from trueline.capture.onnx.size_arithmetic import computes_size
from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="onnxruntime 1.31",
    cost="two casts around each such operator",
    helps=("clamp of int16", "where of int16", "matmul of int8"),
)
_INT32, _INT64 = ir.DataType.INT32, ir.DataType.INT64
_WIDER: Mapping[ir.DataType, tuple[ir.DataType, ...]] = {
    **dict.fromkeys((ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16), (_INT32, _INT64)),
    **dict.fromkeys((_INT32, ir.DataType.UINT32), (_INT64,)),
}
Kinds = dict[str, ir.DataType]
"""A type parameter of an operator, `T` -> what it is at one node."""


def widen_integers(model: ir.Model) -> None:
    """Rewrites `model` in place."""
    opset = model.opset_imports.get("", 18)
    for number, node in enumerate(list(ir.traversal.RecursiveGraphIterator(model.graph))):
        kinds = read_kinds(node, opset) if node.domain == "" and not computes_size(node) else {}
        if set(kinds.values()) & set(_WIDER) and not has_kernel(node.op_type, opset, kinds):
            wider = next((one for one in _list_wider(kinds) if has_kernel(node.op_type, opset, one)), None)
            if wider is not None:
                widen(node, kinds, wider, opset, str(number))


@cache
def _kernels() -> Mapping[str, list[tuple[int, int, Mapping[str, list[str]]]]]:
    found: dict[str, list[tuple[int, int, Mapping[str, list[str]]]]] = {}
    for one in onnxruntime_state.get_all_opkernel_def():
        if one.provider == "CPUExecutionProvider" and one.domain == "":
            found.setdefault(one.op_name, []).append((*one.version_range, one.type_constraints))
    return found


def has_kernel(name: str, opset: int, kinds: Kinds) -> bool:
    """Whether ONNX has an operator of `kinds`, and ONNX Runtime a kernel for it, or none at all of this operator: then
    the dtype is not why."""
    schema = _schema(name, opset)
    said = {kind: f"tensor({dtype.name.lower()})" for kind, dtype in kinds.items()}
    declared = {one.type_param_str: one.allowed_type_strs for one in schema.type_constraints}
    if any(dtype not in declared.get(kind, (dtype,)) for kind, dtype in said.items()):
        return False
    kernels = _kernels().get(name, [])
    return not kernels or any(
        first <= schema.since_version <= last
        and all(dtype in allowed.get(kind, [dtype]) for kind, dtype in said.items())
        for first, last, allowed in kernels
    )


@cache
def _schema(name: str, opset: int) -> onnx.defs.OpSchema:
    return onnx.defs.get_schema(name, opset)


def _parameters(values: object, declared: object) -> Iterator[tuple[ir.Value, str]]:
    """Each value with its type parameter; the last one declared may stand for many."""
    for at, value in enumerate(values):  # type: ignore[var-annotated, arg-type]
        if value is not None and declared:
            yield value, declared[min(at, len(declared) - 1)].type_str  # type: ignore[index, arg-type]


def read_kinds(node: ir.Node, opset: int) -> Kinds:
    """What each type parameter of `node` is; empty where the operator or a dtype is not known."""
    try:
        schema = _schema(node.op_type, opset)
    except onnx.defs.SchemaError:
        return {}
    parameters = {one.type_param_str for one in schema.type_constraints}
    pairs = [*_parameters(node.inputs, schema.inputs), *_parameters(node.outputs, schema.outputs)]
    found: Kinds = {}
    for value, name in pairs:
        if name in parameters and isinstance(value.type, ir.TensorType):  # no sequence of them
            found[name] = value.type.dtype
    return found


def set_types(node: ir.Node, kinds: Kinds, opset: int) -> None:
    """Gives the outputs of `node` that have no dtype those that `kinds` tells."""
    for value, name in _parameters(node.outputs, _schema(node.op_type, opset).outputs) if kinds else ():
        if value.dtype is None and name in kinds:
            value.type = ir.TensorType(kinds[name])


def _list_wider(kinds: Kinds) -> Iterator[Kinds]:
    """One parameter alone, then all."""
    for name, kind in kinds.items():
        for wide in _WIDER.get(kind, ()):
            yield kinds | {name: wide}
    for wide in (_INT32, _INT64):
        yield {name: wide if wide in _WIDER.get(kind, ()) else kind for name, kind in kinds.items()}


def widen(node: ir.Node, kinds: Kinds, wider: Kinds, opset: int, tag: str) -> None:
    """Puts casts around `node`, from `kinds` to `wider` and back; `tag` is part of their names."""
    assert node.graph is not None
    changed = {name for name in kinds if kinds[name] != wider[name]}
    schema = _schema(node.op_type, opset)
    for at, (value, name) in enumerate(list(_parameters(node.inputs, schema.inputs))):
        if name in changed:
            cast = _cast(value, wider[name], f"wide_{tag}_{at}", node)
            node.graph.insert_before(node, [cast])
            for place, used in enumerate(node.inputs):
                if used is value:
                    node.replace_input_with(place, cast.outputs[0])
    for at, (value, name) in enumerate(list(_parameters(node.outputs, schema.outputs))):
        if name in changed:
            kind = kinds[name]
            cast = _cast(value, kind, f"narrow_{tag}_{at}", node)
            uses = [use for use in value.uses() if use.node is not cast]
            node.graph.insert_after(node, [cast])
            for use in uses:
                use.node.replace_input_with(use.idx, cast.outputs[0])
            for place, output in enumerate(node.graph.outputs):
                if output is value:
                    node.graph.outputs[place] = cast.outputs[0]
            value.name, cast.outputs[0].name = cast.outputs[0].name, value.name
            value.type = ir.TensorType(wider[name])


def _cast(value: ir.Value, kind: ir.DataType, name: str, near: ir.Node) -> ir.Node:
    cast = ir.node("Cast", [value], attributes={"to": kind})
    cast.outputs[0].name, cast.outputs[0].type, cast.outputs[0].shape = name, ir.TensorType(kind), value.shape
    cast.metadata_props.update(near.metadata_props)
    return cast
