"""Opens programs as Sessions, and replays the golden records of a bundle on them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trueline import events
from trueline.bundle.describe import sizes_text
from trueline.bundle.schema import RECORDS_CASE
from trueline.bundle.signature import Signature
from trueline.errors import BundleError, NotProven, TruelineError, UsageError, join_names
from trueline.runtime.openvino import MOST_BYTES, FixedSizesSession, compile_fixed, count_weights, get_general
from trueline.runtime.session import DEFAULTS, FORMATS, HAS_FIXED, NATIVE, Session, SessionSettings
from trueline.runtime.shared_weights import SharedDir

if TYPE_CHECKING:
    from trueline.bundle import Bundle, Golden
    from trueline.bundle.signature import Array
    from trueline.columns.fitted import FittedColumns
    from trueline.runtime.compare import Comparison


def open_session(
    format: str, path: Path, signature: Signature, *, native: bool = False, settings: SessionSettings = DEFAULTS
) -> Session:
    """Opens the program file `path` in `format`. A program is proven on the CPU in its own precision: with other
    settings, `replay` the golden records before serving. Opening runs no code of the
    file; machine code is opened only with `native`, for callers that trust its maker.

    Raises BundleError for a file that is no such program, UsageError for an unknown format, machine code without
    `native`, a setting or device that the runtime does not have, and a runtime that is not installed.
    """
    if format not in FORMATS:
        raise UsageError(f"no runtime here runs format '{format}' (there are: {join_names(FORMATS)})")
    path = Path(path)
    if not path.is_file():
        raise BundleError(f"there is no program at {path}")
    if format in NATIVE and not native:
        raise UsageError(
            f"{path} is machine code, and opening it runs it",
            hint="open another program of the bundle; if you trust who made it, open it with native=True",
        )
    module, _, name = _SESSIONS[format].partition(":")
    session: Session = getattr(import_module(f"trueline.runtime.{module}"), name)(path, signature, settings=settings)
    return session


_SESSIONS = {
    "onnx": "onnx:OnnxSession",
    "openvino": "openvino:OpenVinoSession",
    "offload": "offload:OffloadSession",
    "torch_export": "torch_export:ExportSession",
    "torchscript": "torchscript:TorchScriptSession",
    "aotinductor": "aotinductor:AotiSession",
}
"""Format -> module and class, imported when it is opened."""


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
    """Opens a bundle's program, by default the one to serve; the rest is `open_session`'s.

    Processes that open it with one folder `shared` have its weights in memory once, where its runtime can share them.
    A second form, for fixed sizes, is compiled by `replay`, which compares it with the golden records.
    """
    entry, path, signature = bundle.program(format), bundle.program_path(format), bundle.signature_of(format)
    place = None if shared is None else SharedDir(folder=shared, key=f"{bundle.digest}.{entry.format}")
    settings = SessionSettings(threads=threads, device=device, precision=precision, place=place)
    session = open_session(entry.format, path, signature, native=native, settings=settings)
    if not entry.fixed or entry.format not in HAS_FIXED:
        return session
    make = partial(compile_fixed, path, signature, entry.fixed, settings=settings)
    return FixedSizesSession(session, make, entry.fixed)


def replay(bundle: Bundle, session: Session) -> dict[str, Comparison]:
    """Runs the bundle's golden records on this machine; returns the comparison for each case.

    A form of the program for fixed sizes is admitted if it answers like the other one; else that one stays alone.

    Raises NotProven with the first case whose answer is not the eager model's, or when there is no case.
    """
    comparisons = {}
    general = get_general(session)
    for golden in bundle.golden():
        comparison = comparisons[golden.case] = _compare_golden(general, golden, random=bundle.signature.random)
        if not comparison.agrees:
            raise NotProven(
                f"{session.format} program of bundle '{bundle.name}' fails golden record '{golden.case}' "
                f"here: {comparison.reason}",
                hint="this machine or its runtime computes otherwise than the one that proved the bundle: "
                "compare `trueline bundle inspect` with the versions installed here",
            )
    if not comparisons:
        raise NotProven(f"bundle '{bundle.name}' has no golden record: its {session.format} program is not proven here")
    if isinstance(session, FixedSizesSession):
        _admit_fixed(bundle, session)
    return comparisons


def _admit_fixed(bundle: Bundle, session: FixedSizesSession) -> None:
    session.admit(None)
    sizes = sizes_text(session.sizes)
    try:
        why = _refuse_fixed(bundle, session)
    except TruelineError as error:
        why = error.message
    if why:
        events.emit("fixed.refused", bundle=bundle.name, sizes=sizes, why=why)
    else:
        events.emit("fixed.admitted", bundle=bundle.name, sizes=sizes)


def _refuse_fixed(bundle: Bundle, session: FixedSizesSession) -> str:
    """Why the form for fixed sizes answers nothing here; empty: it is admitted."""
    weights = count_weights(bundle.program_path(session.format))
    if weights > MOST_BYTES:
        return f"its weights take {weights} bytes, and at most {MOST_BYTES} are held twice"
    cases = [golden for golden in bundle.golden() if session.takes(golden.inputs)]
    if not cases:
        return "no golden record has these sizes"
    fixed = session.compile_fixed()
    for golden in cases:
        comparison = _compare_golden(fixed, golden, random=False)
        if not comparison.agrees:
            return f"it fails golden record '{golden.case}' here: {comparison.reason}"
    session.admit(fixed)
    return ""


def replay_records(bundle: Bundle) -> FittedColumns | None:
    """The bundle's columns, once they make the same inputs of its golden records as the training's side made.

    Raises NotProven that names the input, BundleError.
    """
    columns = bundle.columns()
    if columns is None:
        return None
    expected = next((golden.inputs for golden in bundle.golden() if golden.case == RECORDS_CASE), None)
    if expected is None:
        raise NotProven(f"bundle '{bundle.name}' has columns and no golden case '{RECORDS_CASE}' that proves them")
    encoded = columns.encode_rows(bundle.golden_records())
    for name in encoded | expected:
        if name not in encoded or name not in expected or not np.array_equal(encoded[name], expected[name]):
            raise NotProven(
                f"columns of bundle '{bundle.name}' make another input '{name}' of its golden records here",
                hint="the columns are encoded otherwise than where they were captured: compare versions",
            )
    return columns


def _compare_golden(session: Session, golden: Golden, *, random: bool) -> Comparison:
    """One case; a random model has many answers, compared with as many here."""
    from trueline.runtime import distribution
    from trueline.runtime.compare import compare

    if not random:
        return compare(golden.outputs, _in_order(session.run(golden.inputs), golden.outputs), bounds=golden.bounds)
    count = len(next(iter(golden.outputs.values())))
    answers = _in_order(distribution.sample(session, golden.inputs, count), golden.outputs)
    return distribution.compare_draws(golden.outputs, answers, level=distribution.REPLAY_LEVEL)


def _in_order(answer: Mapping[str, Array], like: Mapping[str, Array]) -> dict[str, Array]:
    """`answer` in the order of `like` as far as the names agree: safetensors files keep no order."""
    return {name: answer[name] for name in (*(n for n in like if n in answer), *(n for n in answer if n not in like))}
