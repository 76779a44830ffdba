"""A .pt2 or a TorchScript file as a subject of proof.

A .pt2 that torch wrote holds its example inputs as a pickle and its guards as source: both are removed before torch
reads the archive. The program's own range constraints keep guards that are ranges; any other guard refuses the file.
"""

import io
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import msgspec
import torch
from torch.jit._fuser import optimized_execution

from trueline.bundle.signature import DATATYPES, Array, Dim, Signature, TensorSpec
from trueline.capture.export import torch_export as export
from trueline.capture.export.exported import Exported
from trueline.capture.files.file_subject import FileSubject, make_file_probes, observe_file
from trueline.capture.files.input_specs import DeclaredInputs
from trueline.capture.model import code_paths
from trueline.capture.onnx import emit as onnx_emit
from trueline.capture.proof.observe import seen_signature
from trueline.capture.proof.probes import BATCH, make_probes
from trueline.errors import BundleError, CaptureError, UsageError, join_names
from trueline.runtime import torch_export_archive, torchscript_archive
from trueline.runtime.tensors import to_array, to_tensors
from trueline.runtime.torch_export import load
from trueline.runtime.torchscript import FILE as TORCHSCRIPT
from trueline.runtime.torchscript import first, ignore_deprecation

_RANGE = re.compile(r"-?\d*\W*L\[[^\]]*\](\[\d+\])*\.size\(\)\[\d+\]\s*(<=|>=|<|>|!=|==)\s*\d+")


def read_torchscript(path: Path, work: Path, declared: DeclaredInputs | None) -> FileSubject:
    """The program with the declared inputs, since the file does not contain their shapes. Raises UsageError for missing
    declarations and for other names, CaptureError, BundleError."""
    clean = work / "file.ts"
    torchscript_archive.clean(path, clean)
    torchscript_archive.check(clean)
    try:
        with ignore_deprecation():
            module: Any = torch.jit.load(str(clean), map_location="cpu").eval()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise BundleError(f"{path} is no TorchScript program that this torch can open: {first(error)}") from error
    names = [argument.name for argument in module.forward.schema.arguments[1:]]
    if declared is None:
        raise UsageError(
            f"{path.name} is TorchScript, which does not declare the shapes of its inputs ({join_names(names)})",
            hint=f"declare them: --example {names[0] if names else 'x'}=FP32[batch,3,size], or --example batch.npz",
        )
    specs = {spec.name: spec for spec in declared.signature.inputs}
    if specs.keys() != set(names):
        raise UsageError(
            f"the program takes {join_names(names)}, and declared are {join_names(specs)}",
            hint="give one --example for each input, under its own name",
        )
    claimed = msgspec.structs.replace(declared.signature, inputs=tuple(specs[name] for name in names))
    oracle = UnoptimizedTorchScript(module, claimed)
    probes = make_probes(declared.examples[0], signature=oracle.signature)
    observations = observe_file(oracle, probes)

    def emit(folder: Path) -> Path:
        target = folder / TORCHSCRIPT
        target.parent.mkdir(parents=True, exist_ok=True)
        torchscript_archive.clean(clean, target)
        return target

    return FileSubject(
        kind="torchscript",
        signature=seen_signature(oracle.signature, observations),
        oracle=oracle,
        against=f"libtorch {torch.__version__} without optimizations",
        observations=observations,
        emit={"torchscript": emit},
    )


@final
class UnoptimizedTorchScript:
    """The oracle: TorchScript's own interpreter, with the optimizations that the Session has switched off."""

    format = "unoptimized"

    def __init__(self, module: Any, signature: Signature) -> None:
        self._module, self.signature = module, signature

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name, `output` or `output_0`, `output_1`, or their keys."""
        with torch.inference_mode(), optimized_execution(False):
            answer = self._module(*to_tensors(self.signature, inputs))
        leaves = answer if isinstance(answer, (tuple, list)) else (answer,)
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise CaptureError(
                f"the program returns {type(answer).__name__}s of "
                f"{join_names({type(leaf).__name__ for leaf in leaves})}",
                hint="script a module that returns a tensor or a tuple of tensors",
            )
        return _name_outputs(self.signature, leaves)


def read_torch_export(path: Path, work: Path) -> FileSubject:
    """The program, its range as it was exported with, and ONNX made of it. Raises CaptureError, BundleError."""
    clean = work / "file.pt2"
    guards = _clean(path, clean)
    strange = [guard for guard in guards if not _RANGE.fullmatch(guard.strip())]
    if strange:
        raise CaptureError(
            f"{path.name} holds only where {strange[0]!r}, a guard that is no range of one size",
            hint="capture the recipe that it came from: its guards are then found again and kept",
        )
    program = load(clean)
    claimed = _signature(program, path)
    oracle = InterpretedExport(program, claimed)
    observations = observe_file(oracle, make_file_probes(claimed))
    signature = seen_signature(claimed, observations)
    exported = _as_exported(program, signature)
    return FileSubject(
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


def _clean(path: Path, target: Path) -> list[str]:
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
    torch_export_archive.clean(raw, target, code_paths.brief)
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
    outputs = program.graph_signature.user_outputs
    if not all(isinstance(name, str) and isinstance(values.get(name), torch.Tensor) for name in outputs):
        raise CaptureError(
            f"{path.name} returns {list(outputs)}, not tensors alone",
            hint="export it with tensors as its only outputs, or capture the recipe that it came from",
        )
    symbols = _symbols([tuple(value.shape) for value in tensors])  # type: ignore[union-attr]
    specs = tuple(_spec(name, value, symbols) for name, value in zip(names, tensors, strict=True))
    dims = {name: _dim(program, symbol) for symbol, name in symbols.items()}
    return Signature(inputs=specs, outputs=(), dims=dims)


def _symbols(shapes: Sequence[tuple[Any, ...]]) -> dict[str, str]:
    """A name for each of torch's symbols; the one that leads every input is the batch. Raises CaptureError."""
    heads = {str(shape[0]) for shape in shapes if shape and not isinstance(shape[0], int)}
    names: dict[str, str] = {}
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
            names.setdefault(text, BATCH if leads else text)
    return names


def _spec(name: str, value: Any, symbols: Mapping[str, str]) -> TensorSpec:
    try:
        datatype = DATATYPES[torch.empty(0, dtype=value.dtype).numpy().dtype]
    except (TypeError, KeyError) as error:
        raise CaptureError(f"input '{name}' is {value.dtype}, which no bundle can carry") from error
    shape = tuple(size if isinstance(size, int) else symbols[str(size)] for size in value.shape)
    return TensorSpec(name=name, datatype=datatype, shape=shape)


def _dim(program: torch.export.ExportedProgram, symbol: str) -> Dim:
    """The range that it was exported with. The exporter writes a lower bound of 2 by default: 1 is claimed, and
    probed."""
    span = next((span for one, span in program.range_constraints.items() if str(one) == symbol), None)
    if span is None:
        return Dim()
    lower, upper = (int(bound) if str(bound).isdigit() else None for bound in (span.lower, span.upper))
    return Dim(min=lower if lower is not None and lower > 2 else 1, max=upper)


def _as_exported(program: torch.export.ExportedProgram, signature: Signature) -> Exported:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    symbols = {
        str(size): symbol
        for spec in signature.inputs
        for size, symbol in zip(values[spec.name].shape, spec.shape, strict=True)
        if isinstance(symbol, str)
    }
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
class InterpretedExport:
    """The oracle: the graph, node by node in Python; the Session that serves runs torch's compiled form of it."""

    format = "interpreted"

    def __init__(self, program: torch.export.ExportedProgram, signature: Signature) -> None:
        self.signature = signature
        self._interpreter = torch.fx.Interpreter(program.module(check_guards=False))

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name, `output` or `output_0`, `output_1`."""
        with torch.no_grad():
            answer = self._interpreter.run(*to_tensors(self.signature, inputs), enable_io_processing=True)
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(answer) if isinstance(leaf, torch.Tensor)]
        return _name_outputs(self.signature, leaves)


def _name_outputs(signature: Signature, leaves: Sequence[torch.Tensor]) -> dict[str, Array]:
    inputs = {spec.name for spec in signature.inputs}
    plain = ["output"] if len(leaves) == 1 else [f"output_{i}" for i in range(len(leaves))]
    names = [name if name not in inputs else f"{name}_2" for name in plain]
    return {name: to_array(leaf).copy() for name, leaf in zip(names, leaves, strict=True)}
