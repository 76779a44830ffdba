"""ONNX: emitted by torch.onnx from the exported program, run by ONNX Runtime. Opening imports no torch.

ONNX drops an exported program's guards, so the Session enforces the proven range itself. Spinning is off:
in a server, threads that wait by spinning take the processor from the requests beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np
import onnxruntime

from trueline.bundle.signature import Signature
from trueline.errors import BundleError, RequestError, TruelineError

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

_ORT_TYPES = {
    "BOOL": "tensor(bool)",
    **{f"INT{bits}": f"tensor(int{bits})" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": f"tensor(uint{bits})" for bits in (8, 16, 32, 64)},
    "FP16": "tensor(float16)",
    "FP32": "tensor(float)",
    "FP64": "tensor(double)",
}
_BAD_INPUT = (
    onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument,
    onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException,
)


@final
class OnnxSession:
    """An ONNX program on the CPU. Thread-safe."""

    format = "onnx"

    def __init__(self, path: Path, signature: Signature, *, threads: int = 0) -> None:
        onnxruntime.disable_telemetry_events()
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), _options(threads), providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise BundleError(f"{path} is no ONNX program that this ONNX Runtime can open: {first(error)}") from error
        self.signature = signature
        self._names = [spec.name for spec in signature.outputs]
        _check_interface(self._session, signature, path)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. Raises RequestError for what the signature or the program's own checks refuse."""
        self.signature.check(inputs)
        feeds = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in inputs.items()}
        try:
            found = self._session.run(self._names, feeds)
        except _BAD_INPUT as error:
            raise RequestError(f"the program refuses these values: {first(error)}") from error
        except Exception as error:
            raise TruelineError(f"the program failed on a request that it accepted: {first(error)}") from error
        return dict(zip(self._names, found, strict=True))


def _options(threads: int) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return options


def first(error: Exception) -> str:
    """The first line of what a runtime says."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _check_interface(session: onnxruntime.InferenceSession, signature: Signature, path: Path) -> None:
    for role, found, wanted in (
        ("inputs", session.get_inputs(), signature.inputs),
        ("outputs", session.get_outputs(), signature.outputs),
    ):
        has = {node.name: node.type for node in found}
        expected = {spec.name: _ORT_TYPES[spec.datatype] for spec in wanted}
        if has != expected:
            raise BundleError(f"{path} has {role} {has}, its signature says {expected}")
