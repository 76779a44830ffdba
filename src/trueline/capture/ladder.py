"""The rungs: each format is emitted, opened as it will be served, and proven; every attempt is on record."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trueline import events
from trueline.bundle.describe import dim_text
from trueline.bundle.schema import Evidence
from trueline.bundle.signature import Signature
from trueline.capture.attempt import Attempt
from trueline.capture.scripted import DEPRECATED, climb_scripted
from trueline.capture.subject import Subject
from trueline.capture.versions import versions
from trueline.errors import BundleError, CaptureError, UsageError
from trueline.runtime import aoti_emit, export, onnx_emit
from trueline.runtime.calling import BATCH
from trueline.runtime.export import Exported
from trueline.runtime.probes import make_probes
from trueline.runtime.prove import Observation, Proof, judge, observe, parting
from trueline.runtime.session import Format, open_session

EMITTERS: dict[Format, Callable[[Exported, Path], Path]] = {
    "onnx": onnx_emit.emit,
    "openvino": onnx_emit.emit,
    "torch_export": export.emit,
    "aotinductor": aoti_emit.emit,
}
"""All but torchscript, which needs the module and no exported program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One attempt with what it left: a program in `folder`, and its evidence."""

    attempt: Attempt
    folder: Path
    file: str
    signature: Signature | None
    evidence: tuple[Evidence, ...]
    versions: dict[str, str]


def climb(subject: Subject, formats: Sequence[Format], work: Path) -> list[Rung]:
    """Tries every format in `formats`; a refusal is a Rung, not an exception."""
    started = time.monotonic()
    exported: Exported | CaptureError
    try:
        exported = export.export(subject.module, subject.eager.calling)
    except CaptureError as error:
        exported = error
    sizes = () if isinstance(exported, CaptureError) else exported.boundaries
    observations = observe(subject.eager, make_probes(subject.eager.example, sizes=sizes))
    shared_s = time.monotonic() - started
    return [
        _try_scripted(subject, exported, observations, work / format, shared_s)
        if format == "torchscript"
        else _try(format, exported, observations, work / format, shared_s)
        for format in formats
    ]


def _try_scripted(
    subject: Subject,
    exported: Exported | CaptureError,
    observations: Sequence[Observation],
    folder: Path,
    shared_s: float,
) -> Rung:
    started = time.monotonic()
    signature = None if isinstance(exported, CaptureError) else exported.signature
    found = climb_scripted(subject.eager, signature, observations, folder)
    seconds = shared_s + time.monotonic() - started
    if found.path is None or found.proof is None:
        return _refused("torchscript", found.why, found.line, observations, folder, seconds)
    size = found.path.stat().st_size
    made = folder / found.path.relative_to(folder).parts[0]
    rung = _rung("torchscript", found.proof, found.signature, observations, found.path, made, size, seconds)
    return replace(rung, attempt=replace(rung.attempt, how=f"{found.how}; {DEPRECATED}"))


def _try(
    format: Format,
    exported: Exported | CaptureError,
    observations: Sequence[Observation],
    folder: Path,
    shared_s: float,
) -> Rung:
    started = time.monotonic()
    try:
        if isinstance(exported, CaptureError):
            raise exported
        path = EMITTERS[format](exported, folder)
        size = sum(file.stat().st_size for file in path.parent.iterdir())
        events.emit("program.emitted", format=format, size_bytes=size, seconds=time.monotonic() - started)
        proof = _prove(format, path, exported, observations)
    except (CaptureError, BundleError, UsageError) as error:
        line = error.hint if isinstance(exported, CaptureError) else ""
        return _refused(format, error.message, line, observations, folder, shared_s + time.monotonic() - started)
    seconds = shared_s + time.monotonic() - started
    return _rung(format, proof, exported.signature, observations, path, folder, size, seconds)


def _prove(format: Format, path: Path, exported: Exported, observations: Sequence[Observation]) -> Proof:
    session = open_session(format, path, exported.signature, native=True)  # it was made here

    def progress(done: int, total: int) -> None:
        events.emit("proof.advanced", format=format, done=done, total=total)

    return judge(session, observations, versions=versions(), progress=progress)


def _rung(
    format: Format,
    proof: Proof,
    signature: Signature,
    observations: Sequence[Observation],
    path: Path,
    folder: Path,
    size: int,
    seconds: float,
) -> Rung:
    batch = signature.dims[BATCH]
    why = proof.reason
    if proof.proven and batch.min > 1:
        why = f"it holds for batches of at least {batch.min} only; a server has to answer a single request"
    bounded = batch.max is not None
    found = _line(observations, proof.disagreeing) if why or bounded else ""
    attempt = Attempt(
        format=format,
        verdict="refused" if why else "proven",
        why=why,
        line=found,
        seconds=seconds,
        size_bytes=size,
        probes=len(proof.evidence),
        max_abs_error=proof.max_abs_error,
    )
    _tell(attempt, dim_text(BATCH, batch))
    return Rung(
        attempt=attempt,
        folder=folder,
        file=path.relative_to(folder).as_posix(),
        signature=signature,
        evidence=proof.evidence,
        versions=versions(),
    )


def _refused(
    format: Format, why: str, line: str, observations: Sequence[Observation], folder: Path, seconds: float
) -> Rung:
    attempt = Attempt(
        format=format,
        verdict="refused",
        why=why,
        line=_line(observations) or line,
        seconds=seconds,
        size_bytes=0,
        probes=0,
        max_abs_error=0.0,
    )
    _tell(attempt)
    return Rung(attempt=attempt, folder=folder, file="", signature=None, evidence=(), versions=versions())


def _line(observations: Sequence[Observation], disagreeing: str = "") -> str:
    found = parting(observations, disagreeing)
    if found is None:
        return ""
    place, one, other = found
    return f"{place} (goes another way for '{other}' than for '{one}')"


def _tell(attempt: Attempt, proven_range: str = "") -> None:
    if attempt.verdict == "proven":
        events.emit(
            "program.proven",
            format=attempt.format,
            probes=attempt.probes,
            max_abs_error=attempt.max_abs_error,
            seconds=attempt.seconds,
            range=proven_range,
            bound_by=attempt.line or None,
        )
    else:
        events.emit("program.refused", format=attempt.format, why=attempt.why, line=attempt.line)
