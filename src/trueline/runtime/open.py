"""Opens programs as Sessions, and replays the golden examples of a bundle on them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trueline.bundle.signature import Signature
from trueline.errors import BundleError, NotProven, UsageError, join_names
from trueline.runtime.session import FORMATS, NATIVE, Session
from trueline.runtime.settings import SessionSettings
from trueline.runtime.shared_weights import SharedDir

if TYPE_CHECKING:
    from trueline.bundle import Bundle, Golden
    from trueline.bundle.signature import Array
    from trueline.runtime.compare import Comparison


def open_session(
    format: str,
    path: Path,
    signature: Signature,
    *,
    threads: int = 0,
    native: bool = False,
    device: str = "",
    precision: str = "",
    place: SharedDir | None = None,
) -> Session:
    """Opens the program file `path` in `format`. `threads` is for intra-op parallelism, 0 lets the runtime choose;
    `device`, `precision` and `place` are those of `settings.SessionSettings`. A program is proven on the CPU in the
    precision that it holds: with other settings, `replay` the golden examples before it answers anybody. Opening runs
    no code of the file; machine code is opened only with `native`, by who trusts its maker.

    Raises BundleError when the file is not such a program, UsageError for a format that nobody here runs,
    for machine code without `native`, for a setting that the runtime does not know or a device that is not here, and
    for a runtime that is not installed.
    """
    settings = SessionSettings(threads=threads, device=device, precision=precision, place=place)
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
    def __call__(self, path: Path, signature: Signature, *, settings: SessionSettings = ...) -> Session: ...


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
        from trueline.runtime.torch_export import ExportSession

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
        place=None if shared is None else SharedDir(folder=shared, key=f"{bundle.digest}.{entry.format}"),
    )


def replay(bundle: Bundle, session: Session) -> dict[str, Comparison]:
    """Asks `session` the bundle's golden examples on this machine; returns the comparison for each case.

    Raises NotProven that names the first case whose answer is not the eager model's, or says that there is none.
    """
    found = {}
    for golden in bundle.golden():
        one = found[golden.case] = _compare_golden(session, golden, random=bundle.signature.random)
        if not one.agrees:
            raise NotProven(
                f"{session.format} program of bundle '{bundle.name}' fails golden example '{golden.case}' "
                f"here: {one.reason}",
                hint="this machine or its runtime computes otherwise than the one that proved the bundle: "
                "compare `trueline bundle inspect` with the versions installed here",
            )
    if not found:
        raise NotProven(
            f"bundle '{bundle.name}' has no golden example: its {session.format} program is not proven here"
        )
    return found


def _compare_golden(session: Session, golden: Golden, *, random: bool) -> Comparison:
    """One case; of a random model its many answers against as many here."""
    from trueline.runtime import distribution
    from trueline.runtime.compare import compare

    if not random:
        return compare(golden.outputs, _in_order(session.run(golden.inputs), golden.outputs))
    count = len(next(iter(golden.outputs.values())))
    answers = _in_order(distribution.sample(session, golden.inputs, count), golden.outputs)
    return distribution.compare_draws(golden.outputs, answers, level=distribution.REPLAY_LEVEL)


def _in_order(answer: Mapping[str, Array], like: Mapping[str, Array]) -> dict[str, Array]:
    """`answer` in the order of `like` as far as the names agree: safetensors files keep no order."""
    return {name: answer[name] for name in (*(n for n in like if n in answer), *(n for n in answer if n not in like))}
