"""OpenVINO: the ONNX program on Intel's runtime, an extra. Opening imports no torch.

It does not know the proven range, so the Session enforces it. Precision is float32 unless the settings name another:
OpenVINO's own default is bfloat16 where the processor has it.

A program may be there twice: for all sizes of its signature, and compiled for those of one request alone, for which
OpenVINO plans its memory once and chooses kernels. Which sizes, and that it is worth it, is found out when a bundle is
compressed. The second form answers nothing before `runtime.open.replay` has compared it with the golden records here;
where it is not admitted, the first answers everything.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from trueline.bundle import external_data
from trueline.bundle.signature import Check, Signature
from trueline.errors import BundleError, UsageError, join_names
from trueline.runtime.refusals import refusal_of
from trueline.runtime.session import DEFAULTS, HoldsMemory, Session, SessionSettings

if TYPE_CHECKING:
    from trueline.bundle.signature import Array


@cache
def open_core() -> Any:
    """OpenVINO's Core, one in a process, which lives as long. With one for each program the process of the tests ended
    with a segmentation fault some time later; why is not known. Raises UsageError where it is not installed."""
    try:
        import openvino
    except ImportError as error:
        message = "OpenVINO is not installed, and this program needs it"
        raise UsageError(message, hint="pip install 'trueline[openvino]'") from error
    return openvino.Core()


MOST_BYTES = 128 * 2**20
"""Of weights: what a second form of a program may take. Both have their own."""
PRECISIONS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}


@final
class OpenVinoSession:
    """An ONNX program by OpenVINO, on the CPU unless `settings` names another of its devices (`GPU`, `GPU.1`, `NPU`).

    Thread-safe: each thread has an inference request of its own.
    """

    format = "openvino"

    def __init__(
        self, path: Path, signature: Signature, *, settings: SessionSettings = DEFAULTS,
        sizes: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        """`sizes`: by symbol; the program then takes inputs of these alone."""
        core = open_core()
        external_data.check(path)
        device = _device(core, settings)
        config: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": _precision(core, device, settings),
            "PERFORMANCE_HINT": "LATENCY",
        }
        if settings.threads:
            config["INFERENCE_NUM_THREADS"] = settings.threads
        try:
            model: Any = str(path)
            if sizes is not None:
                model = core.read_model(model)
                model.reshape({name: list(shape) for name, shape in shape_inputs(signature, sizes).items()})
            self._compiled = core.compile_model(model, device, config)
        except Exception as error:
            raise BundleError(f"{path} is no program that this OpenVINO can open: {_first(error)}") from error
        self.signature = signature
        self._check = Check(signature)
        self._outputs = {spec.name: _port(self._compiled.outputs, spec.name, path) for spec in signature.outputs}
        for spec in signature.inputs:
            _port(self._compiled.inputs, spec.name, path)
        if len(self._compiled.inputs) != len(signature.inputs):
            raise BundleError(f"{path} takes {len(self._compiled.inputs)} inputs, not as its signature says")
        self._local = threading.local()

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. Raises RequestError for inputs outside the signature."""
        self._check(inputs)
        request = getattr(self._local, "request", None)
        if request is None:
            request = self._local.request = self._compiled.create_infer_request()
        feeds = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in inputs.items()}
        try:
            found = request.infer(feeds, share_inputs=True, share_outputs=True)  # what is returned is copied below
        except Exception as error:
            raise refusal_of(error, inputs) from error
        return {
            spec.name: np.asarray(found[self._outputs[spec.name]]).astype(spec.dtype, copy=True)
            for spec in self.signature.outputs
        }

    def release_memory(self) -> None:
        """Gives back the memory that is kept between runs. OpenVINO before 2024.5 keeps it."""
        release = getattr(self._compiled, "release_memory", None)
        if release is not None:
            with contextlib.suppress(RuntimeError):  # a run is active: the next attempt finds it idle
                release()


@final
class FixedSizesSession:
    """Requests of `sizes` go to the form that was admitted for them, all others to `general`. Thread-safe."""

    def __init__(self, general: Session, compile_fixed: Callable[[], Session], sizes: Mapping[str, int]) -> None:
        self.general, self.compile_fixed, self.sizes = general, compile_fixed, dict(sizes)
        self.format, self.signature = general.format, general.signature
        self._fixed: Session | None = None
        self._shapes = list(shape_inputs(general.signature, sizes).items())

    @property
    def is_admitted(self) -> bool:
        return self._fixed is not None

    def admit(self, fixed: Session | None) -> None:
        """From now on `fixed` answers requests of its sizes; None: no other form than the general one does."""
        self._fixed = fixed

    def takes(self, inputs: Mapping[str, Array]) -> bool:
        """Whether `inputs` have the fixed sizes."""
        return all(name in inputs and inputs[name].shape == shape for name, shape in self._shapes)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. Raises RequestError for inputs outside the signature."""
        fixed = self._fixed
        return (self.general if fixed is None or not self.takes(inputs) else fixed).run(inputs)

    def release_memory(self) -> None:
        """Gives back what both forms keep between runs."""
        for session in (self.general, self._fixed):
            if isinstance(session, HoldsMemory):
                session.release_memory()


def shape_inputs(signature: Signature, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shape of every input at `sizes`, by symbol."""
    return {
        spec.name: tuple(sizes[size] if isinstance(size, str) else size for size in spec.shape)
        for spec in signature.inputs
    }


def get_general(session: Session) -> Session:
    """The form of `session` that takes all sizes."""
    return session.general if isinstance(session, FixedSizesSession) else session


def compile_fixed(
    path: Path, signature: Signature, sizes: Mapping[str, int], *, settings: SessionSettings = DEFAULTS
) -> Session:
    """The ONNX program at `path` in OpenVINO for `sizes` alone, the only runtime that gains by it. Raises BundleError,
    UsageError."""
    return OpenVinoSession(path, signature, settings=settings, sizes=sizes)


def count_weights(path: Path) -> int:
    """Bytes of the program at `path` with the weights beside it."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


def _device(core: Any, settings: SessionSettings) -> str:
    has = list(core.available_devices)
    wanted = settings.device.upper() or "CPU"
    if wanted not in has:
        raise UsageError(f"OpenVINO has no device '{settings.device}' here (has: {join_names(has)})")
    if settings.threads and wanted != "CPU":
        raise UsageError(
            f"threads is a setting of OpenVINO's CPU device, not of '{wanted}'", hint="leave the threads out"
        )
    return wanted


def _precision(core: Any, device: str, settings: SessionSettings) -> str:
    """OpenVINO's name of the precision. Raises UsageError for one that the device would silently replace."""
    can = [str(one).lower() for one in core.get_property(device, "OPTIMIZATION_CAPABILITIES")]
    known = [name for name in PRECISIONS if name == "fp32" or name in can]
    otherwise = f"this {device} has only those; OpenVINO would silently compute in another precision"
    return PRECISIONS[settings.precise(f"OpenVINO on {device}", known, otherwise=otherwise) or "fp32"]


def _port(ports: Any, name: str, path: Path) -> Any:
    for port in ports:
        if name in port.get_names():
            return port
    found = [sorted(port.get_names()) for port in ports]
    raise BundleError(f"{path} has no tensor '{name}' that its signature names (has: {found})")


def _first(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
