"""One small interface for every way to run a captured program.

A Session takes named numpy arrays and returns named numpy arrays. It checks its inputs against the
signature that was proven (a program outside its proven range may answer wrongly without a word; see
docs/concepts/proof.md), and may be called from several threads at once. Opening one runs no code from the
bundle. `eager` is the oracle that the others are proven against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

from trueline.bundle.signature import Signature
from trueline.errors import BundleError, NotProven, UsageError, closest, join_names
from trueline.runtime.settings import Settings
from trueline.runtime.shared_weights import Place

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from trueline.bundle import Bundle, Golden
    from trueline.runtime.compare import Comparison

    Array = npt.NDArray[np.generic]

Format = Literal["onnx", "openvino", "offload", "torch_export", "torchscript", "aotinductor"]

FORMATS: tuple[Format, ...] = get_args(Format)
"""In the order in which they are chosen to serve. `openvino` is the ONNX program, proven in OpenVINO; `offload` is run
by torch, and by ONNX Runtime where that can."""
USUAL: tuple[Format, ...] = ("onnx", "torch_export")
"""What a capture makes of a model when it is not told otherwise: each of them that can be proven."""
STAND_IN: tuple[Format, ...] = ("torchscript",)
"""And what it makes where it can prove none of these."""
NATIVE: tuple[Format, ...] = ("aotinductor",)
"""Machine code: opening one runs it. Never chosen to serve."""
TARGETS: dict[str, tuple[Format, ...]] = {
    "onnxruntime": ("onnx",),
    "openvino": ("onnx", "openvino"),
    "offload": ("offload",),
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
        name = target.partition("@")[0]  # what is behind it, `opsets.opset_for` reads
        if name not in TARGETS:
            near = closest(name, TARGETS)
            raise UsageError(
                f"there is no target '{name}' (there are: {join_names(TARGETS)})",
                hint=f"did you mean '{near}'?" if near else "",
            )
        wanted.update(TARGETS[name])
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


@runtime_checkable
class Bindable(Protocol):
    """A Session whose program can be bound to arrays, for one caller who runs it on them again and again."""

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None] | None:
        """A run from `inputs`, as they are then, into `outputs`; None where `run` is the only way.

        What the run raises, `Session.run` has the words for.
        """
        ...


def open_session(
    format: str,
    path: Path,
    signature: Signature,
    *,
    threads: int = 0,
    native: bool = False,
    device: str = "",
    precision: str = "",
    place: Place | None = None,
) -> Session:
    """Opens the program file `path` in `format`. `threads` is for intra-op parallelism, 0 lets the
    runtime choose; `device`, `precision` and `place` are those of `settings.Settings`. A program is proven on the
    CPU in the precision that it holds: with other settings, `replay` the golden examples before it answers anybody.
    Opening runs no code of the file; machine code is opened only with `native`, by who trusts its maker.

    Raises BundleError when the file is not such a program, UsageError for a format that nobody here runs,
    for machine code without `native`, for a setting that the runtime does not know or a device that is not here, and
    for a runtime that is not installed.
    """
    settings = Settings(threads=threads, device=device, precision=precision, place=place)
    if format not in FORMATS:
        raise UsageError(f"no runtime here runs format '{format}' (there are: {join_names(FORMATS)})")
    if not Path(path).is_file():
        raise BundleError(f"there is no program at {path}")
    if format in NATIVE and not native:
        raise UsageError(
            f"{path} is machine code, and opening it runs it",
            hint="open another program of the bundle; if you trust who made it, open it with native=True",
        )
    return _session_class(format)(Path(path), signature, settings=settings)


class _Opens(Protocol):
    def __call__(self, path: Path, signature: Signature, *, settings: Settings = ...) -> Session: ...


def _session_class(format: str) -> _Opens:
    """Imported only where it runs."""
    if format == "onnx":
        from trueline.runtime.onnx import OnnxSession

        return OnnxSession
    if format == "openvino":
        from trueline.runtime.openvino import OpenVinoSession

        return OpenVinoSession
    if format == "offload":
        from trueline.runtime.offload import OffloadSession

        return OffloadSession
    if format == "torch_export":
        from trueline.capture.export.torch_export import ExportSession

        return ExportSession
    if format == "torchscript":
        from trueline.runtime.torchscript import TorchScriptSession

        return TorchScriptSession
    from trueline.runtime.aotinductor import AotiSession

    return AotiSession


def open_program(
    bundle: Bundle,
    format: str | None = None,
    *,
    threads: int = 0,
    native: bool = False,
    device: str = "",
    precision: str = "",
    shared: Path | None = None,
) -> Session:
    """Opens a bundle's program, the one to serve unless `format` says otherwise; the rest is `open_session`'s.

    Processes that open it with one folder `shared` have its weights in memory once, as far as its runtime can.
    """
    entry, path, signature = bundle.program(format), bundle.program_path(format), bundle.signature_of(format)
    return open_session(
        entry.format,
        path,
        signature,
        threads=threads,
        native=native,
        device=device,
        precision=precision,
        place=None if shared is None else Place(folder=shared, key=f"{bundle.digest}.{entry.format}"),
    )


def replay(bundle: Bundle, session: Session) -> dict[str, Comparison]:
    """Asks `session` the bundle's golden examples on this machine; returns the comparison for each case.

    Raises NotProven that names the first case whose answer is not the eager model's, or says that there is none.
    """
    found = {}
    for golden in bundle.golden():
        one = found[golden.case] = _replayed(session, golden, random=bundle.signature.random)
        if not one.agrees:
            raise NotProven(
                f"{session.format} program of bundle '{bundle.name}' fails golden example '{golden.case}' "
                f"here: {one.reason}",
                hint="this machine or its runtime computes otherwise than the one that proved the bundle: "
                "compare `trueline inspect` with the versions installed here",
            )
    if not found:
        raise NotProven(
            f"bundle '{bundle.name}' has no golden example: its {session.format} program is not proven here"
        )
    return found


def _replayed(session: Session, golden: Golden, *, random: bool) -> Comparison:
    """One case; of a random model its many answers against as many here."""
    from trueline.runtime import distribution
    from trueline.runtime.compare import compare

    if not random:
        return compare(golden.outputs, _ordered(session.run(golden.inputs), golden.outputs))
    count = len(next(iter(golden.outputs.values())))
    answers = _ordered(distribution.sample(session, golden.inputs, count), golden.outputs)
    return distribution.compare_draws(golden.outputs, answers, level=distribution.REPLAY_LEVEL)


def _ordered(answer: Mapping[str, Array], like: Mapping[str, Array]) -> dict[str, Array]:
    """`answer` in the order of `like` as far as the names agree: safetensors files keep no order."""
    return {name: answer[name] for name in (*(n for n in like if n in answer), *(n for n in answer if n not in like))}
