"""OpenVINO: runs the ONNX program on Intel's runtime. Opening imports no torch.

OpenVINO is an extra. Like ONNX Runtime it knows nothing of the proven range, so the Session enforces it.
Precision is pinned to float32: by itself OpenVINO computes in bfloat16 where the processor can.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from trueline.bundle.signature import Signature
from trueline.errors import BundleError, RequestError, TruelineError, UsageError

if TYPE_CHECKING:
    from trueline.bundle.signature import Array


@final
class OpenVinoSession:
    """An ONNX program on the CPU by OpenVINO. Thread-safe: each thread has an inference request of its own."""

    format = "openvino"

    def __init__(self, path: Path, signature: Signature, *, threads: int = 0) -> None:
        openvino = _openvino()
        settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        if threads:
            settings["INFERENCE_NUM_THREADS"] = threads
        try:
            self._compiled = openvino.Core().compile_model(str(path), "CPU", settings)
        except Exception as error:
            raise BundleError(f"{path} is no program that this OpenVINO can open: {_first(error)}") from error
        self.signature = signature
        self._outputs = {spec.name: _port(self._compiled.outputs, spec.name, path) for spec in signature.outputs}
        for spec in signature.inputs:
            _port(self._compiled.inputs, spec.name, path)
        if len(self._compiled.inputs) != len(signature.inputs):
            raise BundleError(f"{path} takes {len(self._compiled.inputs)} inputs, not as its signature says")
        self._local = threading.local()

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. Raises RequestError for inputs outside the signature."""
        self.signature.check(inputs)
        request = getattr(self._local, "request", None)
        if request is None:
            request = self._local.request = self._compiled.create_infer_request()
        feeds = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in inputs.items()}
        try:
            found = request.infer(feeds, share_inputs=False, share_outputs=False)
        except Exception as error:
            if "out of range" in str(error) or "out of bounds" in str(error):
                raise RequestError(f"the program refuses these values: {_first(error)}") from error
            raise TruelineError(f"the program failed on a request that it accepted: {_first(error)}") from error
        return {
            spec.name: np.asarray(found[self._outputs[spec.name]]).astype(spec.dtype, copy=True)
            for spec in self.signature.outputs
        }


def _openvino() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise UsageError(
            "OpenVINO is not installed, and this program is to run in it", hint="pip install 'trueline[openvino]'"
        ) from error
    return openvino


def _port(ports: Any, name: str, path: Path) -> Any:
    for port in ports:
        if name in port.get_names():
            return port
    found = [sorted(port.get_names()) for port in ports]
    raise BundleError(f"{path} has no tensor '{name}' that its signature names (has: {found})")


def _first(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
