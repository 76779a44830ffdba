"""One small interface for every way to run a captured program.

A Session takes named numpy arrays and returns named numpy arrays. It checks its inputs against the
signature that was proven (a program outside its proven range may answer wrongly without a word; see
docs/concepts/proof.md), and may be called from several threads at once. Opening one runs no code from the
bundle. `eager` is the oracle that the others are proven against.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from trueline.bundle.signature import Signature
from trueline.errors import BundleError, NotProven, UsageError, closest, listed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from trueline.bundle import Bundle
    from trueline.runtime.compare import Comparison

    Array = npt.NDArray[np.generic]

Format = Literal["onnx", "openvino", "torch_export", "torchscript", "aotinductor"]

FORMATS: tuple[Format, ...] = get_args(Format)
"""In the order in which they are chosen to serve. `openvino` is the ONNX program, proven in OpenVINO."""
USUAL: tuple[Format, ...] = ("onnx", "torch_export")
"""What a capture makes when it is not told otherwise."""
NATIVE: tuple[Format, ...] = ("aotinductor",)
"""Machine code: opening one runs it. Never chosen to serve."""
TARGETS: dict[str, tuple[Format, ...]] = {
    "onnxruntime": ("onnx",),
    "openvino": ("onnx", "openvino"),
    "torch": ("torch_export",),
    "torchscript": ("torchscript",),
    "cpp": ("torchscript",),
    "aotinductor": ("aotinductor",),
}
"""Where a program is to run -> the formats that run there."""


def formats_for(targets: Iterable[str]) -> tuple[Format, ...]:
    """The formats that run on `targets`, in the order of FORMATS. Raises UsageError.

    >>> formats_for(["cpp", "openvino"])
    ('onnx', 'openvino', 'torchscript')
    """
    wanted: set[Format] = set()
    for target in targets:
        if target not in TARGETS:
            near = closest(target, TARGETS)
            raise UsageError(
                f"there is no target '{target}' (there are: {listed(TARGETS)})",
                hint=f"did you mean '{near}'?" if near else "",
            )
        wanted.update(TARGETS[target])
    return tuple(format for format in FORMATS if format in wanted)


class Session(Protocol):
    @property
    def format(self) -> str:
        """One of FORMATS, or `eager` or `compile` for the model itself."""
        ...

    @property
    def signature(self) -> Signature: ...

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. Raises RequestError for inputs outside the signature."""
        ...


def open_session(format: str, path: Path, signature: Signature, *, threads: int = 0, native: bool = False) -> Session:
    """Opens the program file `path` in `format`. `threads` is for intra-op parallelism, 0 lets the
    runtime choose. Opening runs no code of the file; machine code is opened only with `native`, by who trusts
    its maker.

    Raises BundleError when the file is not such a program, UsageError for a format that nobody here runs,
    for machine code without `native`, and for a runtime that is not installed.
    """
    if format not in FORMATS:
        raise UsageError(f"no runtime here runs format '{format}' (there are: {listed(FORMATS)})")
    if not Path(path).is_file():
        raise BundleError(f"there is no program at {path}")
    if format in NATIVE and not native:
        raise UsageError(
            f"{path} is machine code, and opening it runs it",
            hint="open another program of the bundle; if you trust who made it, open it with native=True",
        )
    return _session_class(format)(Path(path), signature, threads=threads)


class _Opens(Protocol):
    def __call__(self, path: Path, signature: Signature, *, threads: int = 0) -> Session: ...


def _session_class(format: str) -> _Opens:
    """Imported only where it runs."""
    if format == "onnx":
        from trueline.runtime.onnx import OnnxSession

        return OnnxSession
    if format == "openvino":
        from trueline.runtime.openvino import OpenVinoSession

        return OpenVinoSession
    if format == "torch_export":
        from trueline.runtime.export import ExportSession

        return ExportSession
    if format == "torchscript":
        from trueline.runtime.torchscript import TorchScriptSession

        return TorchScriptSession
    from trueline.runtime.aotinductor import AotiSession

    return AotiSession


def open_program(bundle: Bundle, format: str | None = None, *, threads: int = 0, native: bool = False) -> Session:
    """Opens a bundle's program, the one to serve unless `format` says otherwise. Raises as `open_session`."""
    entry = bundle.program(format)
    return open_session(entry.format, bundle.path / entry.file, bundle.signature, threads=threads, native=native)


def replay(bundle: Bundle, session: Session) -> dict[str, Comparison]:
    """Asks `session` the bundle's golden examples on this machine; returns the comparison for each case.

    Raises NotProven that names the first case whose answer is not the eager model's.
    """
    from trueline.runtime.compare import compare

    found = {}
    for golden in bundle.golden():
        one = found[golden.case] = compare(golden.outputs, _ordered(session.run(golden.inputs), golden.outputs))
        if not one.agrees:
            raise NotProven(
                f"{session.format} program of bundle '{bundle.name}' fails golden example '{golden.case}' "
                f"here: {one.reason}",
                hint="this machine or its runtime computes otherwise than the one that proved the bundle: "
                "compare `trueline inspect` with the versions installed here",
            )
    return found


def _ordered(answer: Mapping[str, Array], like: Mapping[str, Array]) -> dict[str, Array]:
    """`answer` in the order of `like` as far as the names agree: safetensors files keep no order."""
    return {name: answer[name] for name in (*(n for n in like if n in answer), *(n for n in answer if n not in like))}
