"""Emits ONNX from an exported program.

What the exporter writes about its own machine (stack traces with paths, names of classes) is removed: a bundle goes to
production, and equal models should give equal bytes. The proven range is added as metadata, for other tools.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import onnx
import onnx_ir
import torch
from onnx_ir.passes.common import NameFixPass

from trueline import files
from trueline.capture.export import operators
from trueline.capture.export.exported import Exported
from trueline.capture.export.tracing import quiet
from trueline.capture.export.whole_numbers import refuse_large
from trueline.capture.model import code_paths
from trueline.capture.onnx import (
    integer_arithmetic,
    kernels,
    large_integers,
    lstm_steps,
    optimizer_rules,
    padded_pool,
    pass_workarounds,
    precision,
    size_arithmetic,
    table_files,
    torchlib_cache,
    weight_parts,
)
from trueline.capture.onnx.dtypes import casts, complex_numbers, exact_numbers, fusions, half_numbers
from trueline.capture.onnx.numerics import EXACT_TAILS
from trueline.capture.onnx.translations import TRANSLATIONS
from trueline.capture.opsets import FORMAT_VERSIONS
from trueline.capture.patches import decomposition_cache, recurrent
from trueline.errors import CaptureError
from trueline.runtime.onnx import open_model
from trueline.runtime.refusals import CHECKS
from trueline.runtime.session import SessionSettings
from trueline.runtime.tensors import restored_vmap_levels

if TYPE_CHECKING:
    from trueline.bundle.signature import Array, Signature

FILE = "programs/model.onnx"
SIGNATURE = "trueline.signature"
"""Key in a program's metadata: its signature."""
SOURCE = "source"
"""Key in a node's metadata: the line that it came from, `layers.py:13`."""
EXTERNAL_BYTES = 100_000_000
"""Weights beyond this go into a file of their own, which a runtime maps: in one protobuf they would be in memory three
times more."""


def emit(exported: Exported, folder: Path) -> Path:
    """Writes `folder/programs/model.onnx`; returns its path. Raises CaptureError when an operator has no
    translation."""
    refuse_large(exported)
    signature = exported.signature
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    program = translate(
        exported.program,
        [spec.name for spec in signature.inputs],
        [spec.name for spec in signature.outputs],
        opset=exported.opset,
        exact_tails=exported.exact_tails,
    )
    if exported.opset is not None:
        written = program.model.opset_imports.get("")
        if written != exported.opset:
            raise CaptureError(f"torch.onnx wrote the model in opset {written}, expected {exported.opset}")
        # a runtime that knows the operators may refuse a later file format
        program.model.ir_version = FORMAT_VERSIONS[exported.opset]
    clean(program.model, exported.symbols)
    program.model.metadata_props[SIGNATURE] = _encode_signature(signature)
    tables = table_files.find_buffers(exported.program)
    save(program, path, weight_bytes=exported.weight_bytes, tables=tables)
    return path


def may_be_exact(exported: Exported) -> bool:
    """Whether it can be emitted with exact tails, and is not yet."""
    graphs = (one.graph for one in exported.program.graph_module.modules() if isinstance(one, torch.fx.GraphModule))
    used = {node.target for graph in graphs for node in graph.nodes}
    return not exported.exact_tails and not used.isdisjoint((*EXACT_TAILS, torch.ops.aten.lstm.input))


def restate(path: Path, signature: Signature) -> None:
    """Writes the narrower `signature` into the program at `path`. Raises StorageError."""
    model = onnx.load(path, load_external_data=False)
    for entry in model.metadata_props:
        if entry.key == SIGNATURE:
            entry.value = _encode_signature(signature)
    files.write_atomic(path, model.SerializeToString(deterministic=True))


def _encode_signature(signature: Signature) -> str:
    return msgspec.json.encode(signature, order="sorted").decode()


def values(exported: Exported, inputs: Mapping[str, Array], folder: Path) -> dict[str, list[Array]]:
    """What ONNX Runtime computes on `inputs` in each submodule, by its qualified name. Translates the program again
    with every value as an output, into an empty `folder`, whose disk holds its weights: to explain a refusal."""
    path = folder / Path(FILE).name
    wanted, scopes = _save_with_values(exported, path)
    session = open_model(path, SessionSettings(keeps_memory=False))
    found = dict(zip(wanted, session.run(wanted, dict(inputs)), strict=True))
    return {scope: [found[name] for name in sorted(names)] for scope, names in scopes.items()}


def _save_with_values(exported: Exported, path: Path) -> tuple[list[str], dict[str, set[str]]]:
    """Writes `path` with every value as an output; returns their names, all of them and by submodule."""
    signature = exported.signature
    names = ([spec.name for spec in signature.inputs], [spec.name for spec in signature.outputs])
    program = translate(exported.program, *names)
    model = program.model
    wanted = {value.name: value for value in model.graph.outputs if value.name}
    scopes: dict[str, set[str]] = {"": set(wanted)}
    for node in model.graph:
        paths = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        for scope in {name for name in map(users_name, map(str, paths)) if name is not None}:
            named = [value for value in node.outputs if value.name and value.type is not None]
            scopes.setdefault(scope, set()).update(str(value.name) for value in named)
            wanted |= {str(value.name): value for value in named}
    model.graph.outputs.extend(value for value in wanted.values() if value not in model.graph.outputs)
    save(program, path, weight_bytes=exported.weight_bytes)
    return list(wanted), scopes


def users_name(path: str) -> str | None:
    """The user's name of the submodule at `path` of an exported program: without what Trueline wraps around it.

    >>> users_name("module._users.layers.0"), users_name("module"), users_name("")
    ('layers.0', '', None)
    """
    first, _, rest = path.partition(".")
    if first != "module":
        return None
    head, _, deeper = rest.partition(".")
    return deeper if head == "_users" else rest


def translate(
    program: torch.export.ExportedProgram,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    opset: int | None = None,
    exact_tails: bool = False,
) -> torch.onnx.ONNXProgram:
    """`program` as ONNX with these names, in the exporter's own opset when none is named.

    Raises CaptureError when an operator has no translation.
    """
    table = TRANSLATIONS | EXACT_TAILS if exact_tails else TRANSLATIONS
    try:
        program, checks = pass_workarounds.keep_checks(program)
        try:
            found = _export(program, inputs, outputs, opset, table)
        except Exception as error:
            if not pass_workarounds.may_help(error):
                raise
            found = _export(pass_workarounds.rewrite(program), inputs, outputs, opset, table)
    except Exception as error:
        place = operators.line_of(program, _reason(error))
        raise CaptureError(
            f"torch.onnx cannot translate the model: {_missing(error) or _reason(error)}",
            hint=f"{place}" if place else "",
        ) from error
    if found is None:
        raise CaptureError("torch.onnx returned no program")
    casts.cast_outputs(found.model, program)
    casts.keep_halves(found.model)
    pass_workarounds.name_lengths(found.model)
    lstm_steps.compute_gates_exactly(found.model, every=exact_tails)
    size_arithmetic.compute_in_double(found.model)
    padded_pool.separate_pads(found.model)
    precision.compute_exactly(found.model)
    integer_arithmetic.avoid_overflow(found.model)
    kernels.widen_integers(found.model)
    large_integers.compute_exactly(found.model)
    casts.keep_each_cast(found.model)
    fusions.keep_doubles(found.model)
    weight_parts.store_parts(found.model)
    if checks:
        found.model.metadata_props[CHECKS] = json.dumps(checks)
    NameFixPass()(found.model)  # what the caller names may be what the exporter calls a value inside: `add`
    return found


def _export(
    program: torch.export.ExportedProgram,
    inputs: Sequence[str],
    outputs: Sequence[str],
    opset: int | None,
    table: Mapping[Callable[..., Any], Callable[..., Any]],
) -> torch.onnx.ONNXProgram | None:
    # without no_grad torch would split a scan for its gradients, in a pass that runs the program once more
    with (
        torch.no_grad(),
        restored_vmap_levels(),
        quiet(),
        recurrent.keep_layers_whole(),
        optimizer_rules.take_stacks_apart(),  # before the list of translations is kept
        torchlib_cache.cache_torchlib(),
        complex_numbers.translate_pairs(),
        decomposition_cache.cache_operators(),
        optimizer_rules.keep_answers(),
        exact_numbers.keep_exact(),
        half_numbers.keep_numbers(),
    ):
        return torch.onnx.export(
            program,
            (),
            dynamo=True,
            input_names=inputs,
            output_names=outputs,
            custom_translation_table=dict(table),
            opset_version=opset,
            verbose=False,
        )


def save(
    program: torch.onnx.ONNXProgram, path: Path, *, weight_bytes: int, tables: table_files.Buffers | None = None
) -> None:
    """Writes `path`, with tables in files beside it, and other large weights in one. Raises StorageError."""
    try:
        of_tables = table_files.write_tables(program.model, path, tables or {})
        if not of_tables:
            program.save(str(path), external_data=weight_bytes > EXTERNAL_BYTES)
            return
        if weight_bytes - of_tables > EXTERNAL_BYTES:
            table_files.move_others(program.model, path)
        onnx_ir.save(program.model, str(path))
    except OSError as error:
        raise files.storage_error(error, path) from error


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _missing(error: BaseException | None) -> str:
    """The operator that has no translation, in words; empty where that is not why."""
    while error is not None:
        found = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", str(error))
        if found is not None:
            return f"ONNX has no operator for {found[1]}"
        error = error.__cause__
    return ""


def clean(model: onnx_ir.Model, symbols: Mapping[str, str]) -> None:
    """Removes what the exporter writes about its own machine; `symbols` renames torch's symbols, s77 to batch."""
    model.producer_name, model.producer_version = "trueline", None
    for name in model.metadata_props.keys() - {CHECKS}:
        del model.metadata_props[name]
    model.doc_string = None
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        _clean_graph(graph, symbols)


def _clean_graph(graph: onnx_ir.Graph, symbols: Mapping[str, str]) -> None:
    graph.metadata_props.clear()
    graph.doc_string = None
    for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
        _clean_value(value, symbols)
    for node in onnx_ir.traversal.RecursiveGraphIterator(graph):
        place = code_paths.brief(node.metadata_props.get("pkg.torch.onnx.stack_trace", ""))
        node.metadata_props.clear()
        if place:
            node.metadata_props[SOURCE] = place
        node.doc_string = None
        for value in node.outputs:
            _clean_value(value, symbols)


def _clean_value(value: Any, symbols: Mapping[str, str]) -> None:
    value.metadata_props.clear()
    value.doc_string = None
    if value.shape is not None:
        value.shape = onnx_ir.Shape(
            [dim if isinstance(dim, int) else symbols.get(str(getattr(dim, "value", dim)), dim) for dim in value.shape]
        )


_NODE = re.compile(r"node with name '([^']+)'|Node \(([^)]+)\)")


def node_name(message: str) -> str:
    """The name of the node in a message of ONNX Runtime; empty where there is none.

    >>> node_name("Could not find an implementation for Gemm(13) node with name 'node_linear'")
    'node_linear'
    """
    match = _NODE.search(message)
    return (match[1] or match[2] or "") if match else ""


def node_dtypes(path: Path, node: str) -> list[str]:
    """Dtypes of the inputs and outputs of a node of the program at `path`, except float32 and int64.

    As a rule they are why ONNX Runtime has no such operator (bfloat16 on the CPU).
    """
    graph = onnx.load(str(path), load_external_data=False).graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info, *graph.output)}
    kinds |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    names = [name for one in graph.node if one.name == node for name in (*one.input, *one.output)]
    usual = (onnx.TensorProto.UNDEFINED, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64)
    found = {kinds[name] for name in names if kinds.get(name, onnx.TensorProto.UNDEFINED) not in usual}
    return sorted(onnx.TensorProto.DataType.Name(kind).lower() for kind in found)


def node_line(program: torch.export.ExportedProgram, node: str) -> code_paths.SourceLine | None:
    """The user's line that `node` is from: the exporter names it after the graph's own node, with a prefix."""
    return operators.line_of(program, f"%{node.removeprefix('node_')} :")
