"""One small interface for every way to run a captured program.

A Session takes named numpy arrays and returns named numpy arrays. It checks its inputs against the
signature that was proven (a program outside its proven range may answer wrongly without a word; see
docs/concepts/proof.md), and may be called from several threads at once. Opening one runs no code from the
bundle. `eager` is the oracle that the others are proven against.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from trueline.bundle.signature import Signature
from trueline.errors import BundleError, NotProven, UsageError, listed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from trueline.bundle import Bundle
    from trueline.runtime.compare import Comparison

    Array = npt.NDArray[np.generic]

Format = Literal["onnx", "torch_export"]

FORMATS: tuple[Format, ...] = get_args(Format)


class Session(Protocol):
    @property
    def format(self) -> str:
        """`eager`, `onnx` or `torch_export`."""
        ...

    @property
    def signature(self) -> Signature: ...

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. Raises RequestError for inputs outside the signature."""
        ...


def open_session(format: str, path: Path, signature: Signature, *, threads: int = 0) -> Session:
    """Opens the program file `path` in `format`. `threads` is for intra-op parallelism, 0 lets the
    runtime choose.

    Raises BundleError when the file is not such a program, UsageError for a format that nobody here runs.
    """
    if not Path(path).is_file():
        raise BundleError(f"there is no program at {path}")
    if format == "onnx":
        from trueline.runtime import onnx

        return onnx.OnnxSession(Path(path), signature, threads=threads)
    if format == "torch_export":
        from trueline.runtime import export

        return export.ExportSession(Path(path), signature, threads=threads)
    raise UsageError(f"no runtime here runs format '{format}' (there are: {listed(FORMATS)})")


def open_program(bundle: Bundle, format: str | None = None, *, threads: int = 0) -> Session:
    """Opens a bundle's program, the one to serve unless `format` says otherwise. Raises BundleError."""
    entry = bundle.program(format)
    return open_session(entry.format, bundle.path / entry.file, bundle.signature, threads=threads)


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
