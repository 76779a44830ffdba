"""A .pt2 or a TorchScript file as a subject of proof. See `from_file`, which knows what to do with one.

A .pt2 that torch wrote holds its example inputs as a pickle and its guards as source: both are taken out
before torch reads the archive. What the guards say is not lost: a guard that is more than a range, which the
program's own range constraints carry, refuses the file.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from trueline.bundle.signature import DATATYPES, Dim, Signature, TensorSpec
from trueline.capture import file_probes
from trueline.capture.from_file import Wrapped, observed
from trueline.capture.seen import seen_signature
from trueline.errors import BundleError, CaptureError
from trueline.runtime import export, onnx_emit, pt2
from trueline.runtime.eager import to_tensors
from trueline.runtime.export import Exported

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

_RANGE = re.compile(r"-?\d*\W*L\[[^\]]*\](\[\d+\])*\.size\(\)\[\d+\]\s*(<=|>=|<|>|!=|==)\s*\d+")


def torchscript(path: Path, work: Path) -> Wrapped:
    """Its inputs are tensors of a rank that the probes find out: nothing in the file says shapes.

    Raises CaptureError when the shapes cannot be known.
    """
    raise CaptureError(
        f"{path.name} is TorchScript, which does not say the shapes of its inputs",
        hint="write a recipe: model() returns torch.jit.load(...), examples() a small batch",
    )


def torch_export(path: Path, work: Path) -> Wrapped:
    """The program, its range as it was exported with, and ONNX made of it. Raises CaptureError, BundleError."""
    clean = work / "file.pt2"
    guards = _cleaned(path, clean)
    strange = [guard for guard in guards if not _RANGE.fullmatch(guard.strip())]
    if strange:
        raise CaptureError(
            f"{path.name} holds only where {strange[0]!r}, a guard that is no range of one size",
            hint="capture the recipe that it came from: its guards are then found anew and carried along",
        )
    program = export.load(clean)
    claimed = _signature(program, path)
    oracle = _Interpreted(program, claimed)
    observations = observed(oracle, file_probes.make(claimed))
    signature = seen_signature(claimed, observations)
    exported = _exported(program, signature)
    return Wrapped(
        kind="torch_export",
        signature=signature,
        oracle=oracle,
        against=f"torch.fx interpreter {torch.__version__}",
        observations=observations,
        emit={
            "onnx": lambda folder: onnx_emit.emit(exported, folder),
            "torch_export": lambda folder: export.emit(exported, folder),
        },
    )


def _cleaned(path: Path, target: Path) -> list[str]:
    """Writes the archive without pickled examples and guards; returns the guards. Raises BundleError."""
    raw, guards = io.BytesIO(), []
    try:
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(raw, "w") as plain:
            for member in source.infolist():
                content = source.read(member)
                if member.filename.endswith("/data/sample_inputs/model.pt"):
                    content = b""
                if member.filename.endswith("/models/model.json"):
                    guards = [str(guard) for guard in json.loads(content).get("guards_code") or []]
                plain.writestr(member.filename, content)
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise BundleError(f"{path} is torn: {error}") from error
    raw.seek(0)
    pt2.clean(raw, target)
    return guards


def _signature(program: torch.export.ExportedProgram, path: Path) -> Signature:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    names = [str(name) for name in program.graph_signature.user_inputs]
    tensors = [values.get(name) for name in names]
    if not names or not all(isinstance(value, torch.Tensor) for value in tensors):
        raise CaptureError(
            f"{path.name} takes {names}, not tensors alone",
            hint="export it with tensors as its only inputs, or capture the recipe that it came from",
        )
    symbols = _symbols([tuple(value.shape) for value in tensors])  # type: ignore[union-attr]
    specs = tuple(_spec(name, value, symbols) for name, value in zip(names, tensors, strict=True))
    dims = {name: _dim(program, symbol) for symbol, name in symbols.items()}
    return Signature(inputs=specs, outputs=(), dims=dims)


def _symbols(shapes: Sequence[tuple[Any, ...]]) -> dict[str, str]:
    """torch's symbols with a name each; the one that leads every input is the batch. Raises CaptureError."""
    heads = {str(shape[0]) for shape in shapes if shape and not isinstance(shape[0], int)}
    found: dict[str, str] = {}
    for shape in shapes:
        for size in shape:
            if isinstance(size, int):
                continue
            text = str(size)
            if not re.fullmatch(r"s\d+", text):
                raise CaptureError(
                    f"a size of an input is {text}, which is no plain symbol",
                    hint="capture the recipe that it came from",
                )
            leads = heads == {text} and all(shape and str(shape[0]) == text for shape in shapes)
            found.setdefault(text, file_probes.BATCH if leads else text)
    return found


def _spec(name: str, value: Any, symbols: Mapping[str, str]) -> TensorSpec:
    try:
        datatype = DATATYPES[torch.empty(0, dtype=value.dtype).numpy().dtype]
    except (TypeError, KeyError) as error:
        raise CaptureError(f"input '{name}' is {value.dtype}, which no bundle can carry") from error
    shape = tuple(size if isinstance(size, int) else symbols[str(size)] for size in value.shape)
    return TensorSpec(name=name, datatype=datatype, shape=shape)


def _dim(program: torch.export.ExportedProgram, symbol: str) -> Dim:
    """The range that it was exported with. A lower bound of 2 is the exporter's habit: 1 is claimed, and probed."""
    span = next((span for one, span in program.range_constraints.items() if str(one) == symbol), None)
    if span is None:
        return Dim()
    lower, upper = (int(bound) if str(bound).isdigit() else None for bound in (span.lower, span.upper))
    return Dim(min=lower if lower is not None and lower > 2 else 1, max=upper)


def _exported(program: torch.export.ExportedProgram, signature: Signature) -> Exported:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    symbols = {}
    for spec in signature.inputs:
        for size, symbol in zip(values[spec.name].shape, spec.shape, strict=True):
            if isinstance(symbol, str):
                symbols[str(size)] = symbol
    weights = [*program.state_dict.values(), *program.constants.values()]
    return Exported(
        program=program,
        signature=signature,
        symbols=symbols,
        claims=(signature,),
        boundaries={},
        weight_bytes=sum(w.numel() * w.element_size() for w in weights if isinstance(w, torch.Tensor)),
    )


@final
class _Interpreted:
    """The oracle: the graph, node by node in Python; the Session that serves runs torch's compiled form of it."""

    format = "interpreted"

    def __init__(self, program: torch.export.ExportedProgram, signature: Signature) -> None:
        self.signature = signature
        module = program.module(check_guards=False)
        self._module = module
        self._interpreter = torch.fx.Interpreter(module)
        names = [str(name) for name in program.graph_signature.user_outputs]
        self._names = _output_names(names, {spec.name for spec in signature.inputs})

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name, `output` or `output_0`, `output_1`."""
        with torch.no_grad():
            found = self._interpreter.run(*to_tensors(self.signature, inputs), enable_io_processing=True)
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        return {name: leaf.detach().numpy().copy() for name, leaf in zip(self._names, leaves, strict=True)}


def _output_names(names: Sequence[str], taken: set[str]) -> list[str]:
    plain = ["output"] if len(names) == 1 else [f"output_{i}" for i in range(len(names))]
    return [name if name not in taken else f"{name}_2" for name in plain]
