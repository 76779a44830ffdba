"""An ONNX program that comes as a file: its signature, and a second implementation to run it.

That is onnx's reference implementation, plain numpy that shares no code with ONNX Runtime. Where it lacks an operator,
ONNX Runtime runs the program with its optimizations switched off.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import onnx
import onnx.reference
import onnxruntime

from trueline.bundle.signature import DATATYPES, Array, Signature, TensorSpec
from trueline.capture.files.file_subject import FileSubject, claim, make_file_probes, observe_file
from trueline.capture.proof.observe import seen_signature
from trueline.capture.proof.probes import BATCH
from trueline.errors import CaptureError, first_line

DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
EXTERNAL_BYTES = 1_500_000_000
"""Larger weights are in a file beside the graph: a protobuf message ends at 2 GiB."""


def read_onnx(path: Path) -> FileSubject:
    """The program as a subject of proof. Raises CaptureError."""
    model = _load(path)
    claimed = _signature(model)
    probes = make_file_probes(claimed)
    oracle = ReferenceSession(model, path, claimed, probes[0].inputs)
    observations = observe_file(oracle, probes)

    def emit(folder: Path) -> Path:
        """Writes the model without its metadata; large weights in a file beside it."""
        target = folder / "programs/model.onnx"
        target.parent.mkdir(parents=True, exist_ok=True)
        del model.metadata_props[:]
        model.doc_string = ""
        for node in model.graph.node:
            node.doc_string = ""
            del node.metadata_props[:]
        large = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > EXTERNAL_BYTES
        onnx.save(model, str(target), save_as_external_data=large, location=f"{target.name}.data" if large else None)
        return target

    return FileSubject(
        kind="onnx",
        signature=seen_signature(claimed, observations),
        oracle=oracle,
        against=oracle.against,
        observations=observations,
        emit={"onnx": emit, "openvino": emit},
    )


def _load(path: Path) -> onnx.ModelProto:
    """The checked model with its weights. Raises CaptureError."""
    try:
        onnx.checker.check_model(str(path))
        model = onnx.load(str(path))
    except Exception as error:
        raise CaptureError(
            f"{path} is no ONNX model that onnx {onnx.__version__} can read: {first_line(error)}"
        ) from error
    foreign = sorted(
        {node.domain for node in model.graph.node if node.domain not in DOMAINS}
        - {function.domain for function in model.functions}
    )
    if foreign:
        raise CaptureError(
            f"{path} uses operators of {', '.join(foreign)}, which no runtime here has",
            hint="export the model with standard operators",
        )
    return model


def _signature(model: onnx.ModelProto) -> Signature:
    """Inputs with their symbols; a first dimension that is free in every input is the batch. The outputs are left to
    what the probes show. Raises CaptureError for inputs that no bundle can carry."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [one for one in model.graph.input if one.name not in weights]
    if not inputs:
        raise CaptureError("the ONNX model takes no input")
    shapes = {one.name: _shape(one) for one in inputs}
    heads = {shape[0] if shape else 0 for shape in shapes.values()}
    named = {head for head in heads if isinstance(head, str) and "." not in head}
    if all(isinstance(head, str) for head in heads) and len(named) <= 1:
        shapes = {name: tuple(BATCH if size in heads else size for size in shape) for name, shape in shapes.items()}
    specs = (TensorSpec(name=one.name, datatype=_datatype(one), shape=shapes[one.name]) for one in inputs)
    return claim(specs)


def _shape(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        raise CaptureError(f"input '{value.name}' of the ONNX model does not declare its number of dimensions")
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or f"{value.name}.{axis}"
        for axis, dim in enumerate(kind.shape.dim)
    )


def _datatype(value: onnx.ValueInfoProto) -> str:
    kind = value.type.tensor_type.elem_type
    try:
        return DATATYPES[np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind))]
    except (KeyError, TypeError) as error:
        name = onnx.TensorProto.DataType.Name(kind)
        raise CaptureError(f"input '{value.name}' of the ONNX model is {name}, which no bundle can carry") from error


@final
class ReferenceSession:
    """The oracle: onnx's reference implementation, or ONNX Runtime unoptimized; `against` says which."""

    format = "reference"

    def __init__(self, model: onnx.ModelProto, path: Path, signature: Signature, sample: Mapping[str, Array]) -> None:
        self.signature = signature
        self._names = [one.name for one in model.graph.output]
        self._reference = onnx.reference.ReferenceEvaluator(model)
        self._plain: Any = None
        self.against = f"onnx.reference {onnx.__version__}"
        try:
            self._reference.run(self._names, dict(sample))
        except Exception:  # noqa: BLE001 - a missing operator raises many exceptions; then ONNX Runtime answers
            self.against = f"onnxruntime {onnxruntime.__version__} without optimizations"
            options = onnxruntime.SessionOptions()
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.log_severity_level = 4
            try:
                self._plain = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            except Exception as error:
                raise CaptureError(f"{path} cannot be run: {first_line(error)}") from error

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name."""
        runner = self._plain or self._reference
        with np.errstate(all="ignore"):  # probes have infinities in them
            arrays = runner.run(self._names, dict(inputs))
        return {name: np.array(array, copy=True) for name, array in zip(self._names, arrays, strict=True)}
