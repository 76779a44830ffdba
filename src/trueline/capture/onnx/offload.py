"""Finds the parts of a program that ONNX Runtime can run, by trying, and writes them beside the program.

There is no list of operators: what the exporter translates and the runtime opens changes with their versions. Refused
kinds are found by their name in the refusal, or by halving; of the others, CapabilityBasedPartitioner makes the largest
parts without a cycle. The plan records what was refused, and why.
"""

import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.fx import Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from trueline import events
from trueline.capture.export import torch_export
from trueline.capture.export.exported import Exported
from trueline.capture.export.tracing import quiet
from trueline.capture.onnx import emit as onnx_emit
from trueline.errors import BundleError, CaptureError
from trueline.runtime import onnx, subprogram
from trueline.runtime.offload import FILE, VERSION, KeptOperator, OffloadedPart, OffloadPlan
from trueline.runtime.session import DEFAULTS
from trueline.runtime.subprogram import Subprogram
from trueline.runtime.torch_export import load

LEAST = 3
"""Operators of a part; entering and leaving one costs about as much as a small operator each."""

Kind = tuple[str, ...]
"""An operator with the dtypes of its inputs: a runtime may have it for floats and not for integers."""


def emit(exported: Exported, folder: Path) -> Path:
    """Writes the plan `folder/programs/model.offload.json` with its programs beside it; returns its path.

    Raises CaptureError when ONNX Runtime takes no part.
    """
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".pt2")
    with quiet():
        functional = exported.program.run_decompositions({})  # no writes in place: a part could not see them
    torch_export.save(functional, whole)
    program = load(whole)  # as it will be opened: the plan names its nodes
    program.graph.eliminate_dead_code()  # an unused result of several would keep its operator from a part
    operators = [node for node in program.graph.nodes if subprogram.is_operator(node)]
    kept = find_refused(program, operators)
    taken = [node for node in operators if _kind(_producer(node)) not in kept]
    parts: list[OffloadedPart] = []
    left: list[KeptOperator] = []
    for nodes in _largest(program, taken):
        target = path.with_name(f"{path.stem}-{len(parts)}.onnx")
        try:
            piece = _attempt(program, nodes, target, exported.symbols)
            names = tuple(subprogram.name_of(node) for node in nodes)
            parts.append(OffloadedPart(file=target.name, nodes=names, inputs=piece.inputs, outputs=piece.outputs))
        except (CaptureError, BundleError) as error:
            target.unlink(missing_ok=True)
            left.append(KeptOperator(operator=f"{len(nodes)} operators from '{nodes[0].name}' on", why=error.message))
    refused = [KeptOperator(operator=kind[0], why=why) for kind, why in kept.items()]
    if not parts:
        why = "; ".join(f"{one.operator}: {one.why}" for one in (*refused, *left)) or "it has too few operators"
        raise CaptureError(f"ONNX Runtime takes no part of the model that is worth handing over ({why})")
    plan = OffloadPlan(
        version=VERSION,
        program=whole.name,
        runtime="onnxruntime",
        parts=tuple(parts),
        kept=(*refused, *left),
        operators=len(operators),
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n")
    events.emit(
        "program.offloaded",
        parts=len(parts),
        operators=len(operators),
        kept=len(operators) - sum(len(part.nodes) for part in parts),
    )
    return path


def _attempt(
    program: torch.export.ExportedProgram, nodes: Iterable[Node], path: Path, symbols: dict[str, str]
) -> Subprogram:
    """Writes what computes `nodes` to `path` and opens it. Raises CaptureError or BundleError as it is refused."""
    piece = subprogram.cut(program, nodes)
    made = onnx_emit.translate(piece.program, piece.inputs, piece.outputs)
    onnx_emit.clean(made.model, symbols)
    onnx_emit.save(made, path, weight_bytes=piece.weight_bytes)
    onnx.open_model(path, DEFAULTS)
    return piece


def find_refused(program: torch.export.ExportedProgram, operators: Sequence[Node]) -> dict[Kind, str]:
    """The kinds of operators that cannot be handed over, each with the reason.

    A refusal often names its operator, which is then tried alone; where it does not, halving finds it.
    """
    by_kind: dict[Kind, list[Node]] = {}
    for node in operators:
        by_kind.setdefault(_kind(_producer(node)), []).append(node)

    def search(kinds: Sequence[Kind]) -> dict[Kind, str]:
        why = _why_not(program, [node for kind in kinds for node in by_kind[kind]])
        if not why or len(kinds) == 1:
            return {kinds[0]: why} if why else {}
        # a refusal names the operator without its overload: aten.cdist
        named = [kind for kind in kinds if re.search(rf"\b{re.escape(kind[0].rpartition('.')[0])}\b", why)]
        alone = {kind: _why_not(program, by_kind[kind]) for kind in named}
        if found := {kind: reason for kind, reason in alone.items() if reason}:
            rest = [kind for kind in kinds if kind not in found]
            return found | (search(rest) if rest else {})
        half = len(kinds) // 2
        return search(kinds[:half]) | search(kinds[half:])

    return search(list(by_kind)) if by_kind else {}


def _why_not(program: torch.export.ExportedProgram, nodes: Sequence[Node]) -> str:
    with tempfile.TemporaryDirectory(prefix="trueline-offload-") as scratch:
        try:
            _attempt(program, nodes, Path(scratch) / "part.onnx", {})
        except (CaptureError, BundleError) as error:
            return error.message
    return ""


def _producer(node: Node) -> Node:
    """The operator that computes `node`: what takes one of several results has no kind of its own."""
    while getattr(node.target, "__name__", "") == "getitem" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _kind(node: Node) -> Kind:
    given = [one.meta.get("val") for one in node.all_input_nodes]
    return (str(node.target), *(str(one.dtype) for one in given if isinstance(one, torch.Tensor)))


class _OnlyThese(OperatorSupportBase):
    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes = frozenset(nodes)

    def is_node_supported(self, submodules: Any, node: Node) -> bool:
        return node in self._nodes


def _largest(program: torch.export.ExportedProgram, taken: Sequence[Node]) -> list[list[Node]]:
    """The largest parts of `taken` that can run in one go each, in the order of the program."""
    partitioner = CapabilityBasedPartitioner(program.graph_module, _OnlyThese(taken), allows_single_node_partition=True)
    order = {node: at for at, node in enumerate(program.graph.nodes)}
    parts = [sorted(one.nodes, key=order.__getitem__) for one in partitioner.propose_partitions()]
    return sorted((part for part in parts if len(part) >= LEAST), key=lambda part: order[part[0]])
