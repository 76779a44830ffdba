"""The rungs: each format is emitted, opened as it will be served, and proven; every attempt is on record."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trueline import events
from trueline.bundle.describe import range_text
from trueline.bundle.schema import Evidence
from trueline.bundle.signature import Signature
from trueline.capture import claims
from trueline.capture.attempt import Attempt
from trueline.capture.scripted import DEPRECATED, climb_scripted
from trueline.capture.subject import Subject
from trueline.capture.versions import versions
from trueline.errors import BundleError, CaptureError, NotProven, UsageError
from trueline.runtime import aoti_emit, export, onnx_emit, steady
from trueline.runtime.calling import BATCH
from trueline.runtime.eager import EagerSession
from trueline.runtime.export import Exported
from trueline.runtime.probes import Probe, make_probes
from trueline.runtime.prove import Observation, Proof, judge, observe, parting
from trueline.runtime.session import Format, open_session
from trueline.runtime.shrink import shrink

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
    disagreeing: Probe | None = None
    """The smallest probe on which the program answers otherwise than the model."""


def climb(subject: Subject, formats: Sequence[Format], work: Path) -> list[Rung]:
    """Tries every format in `formats`; a refusal is a Rung, not an exception.

    Raises NotProven for a model that is no function of its inputs: no format can hold it.
    """
    started = time.monotonic()
    found = steady.unsteady(subject.eager)
    if found is not None:
        raise NotProven(
            found.why + (f"; see {found.place}" if found.place else ""),
            hint="a served program has no memory and draws no numbers: return the state, or guard it with "
            "`if self.training`",
        )
    exported, observations = _observed(subject)
    shared_s = time.monotonic() - started
    while True:
        rungs = [
            _try_scripted(subject, exported, observations, work / format, shared_s)
            if format == "torchscript"
            else _try(format, exported, observations, subject.eager, work / format, shared_s)
            for format in formats
        ]
        if isinstance(exported, CaptureError) or not _overreached(exported, rungs):
            return rungs
        stricter = claims.narrower(exported)
        if stricter is None:
            return rungs
        events.emit("claim.narrowed", to=range_text(stricter.signature))
        exported = stricter


def _observed(subject: Subject) -> tuple[Exported | CaptureError, tuple[Observation, ...]]:
    """The exported program with the widest claim that it bears out, and what the eager model answers."""
    eager = subject.eager
    try:
        exported = claims.settled(eager, export.export(subject.module, eager.calling))
    except CaptureError as error:
        return error, observe(eager, make_probes(eager.example, signature=eager.calling.presumed))
    probes = make_probes(eager.example, signature=exported.signature, sizes=exported.boundaries)
    observations = observe(eager, probes)
    return claims.borne_out(exported, observations), observations


def _overreached(exported: Exported, rungs: Sequence[Rung]) -> bool:
    """Whether a program that was emitted disagrees where only this claim, and not the strictest, reaches."""
    strict = exported.claims[-1]
    return exported.signature != strict and any(
        rung.disagreeing is not None and not claims.allowed(strict, rung.disagreeing) for rung in rungs
    )


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
    rung = _rung("torchscript", found.proof, "", found.signature, observations, found.path, made, size, seconds)
    return replace(rung, attempt=replace(rung.attempt, how=f"{found.how}; {DEPRECATED}"))


def _try(
    format: Format,
    exported: Exported | CaptureError,
    observations: Sequence[Observation],
    eager: EagerSession,
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
        proof, smallest = _prove(format, path, exported, observations, eager)
    except (CaptureError, BundleError, UsageError) as error:
        line = error.hint if isinstance(exported, CaptureError) else ""
        return _refused(format, error.message, line, observations, folder, shared_s + time.monotonic() - started)
    seconds = shared_s + time.monotonic() - started
    return _rung(format, proof, smallest, exported.signature, observations, path, folder, size, seconds)


def _prove(
    format: Format, path: Path, exported: Exported, observations: Sequence[Observation], eager: EagerSession
) -> tuple[Proof, str]:
    """The proof and, where it fails on a probe, the smallest input that shows it."""
    session = open_session(format, path, exported.signature, native=True)  # it was made here

    def progress(done: int, total: int) -> None:
        events.emit("proof.advanced", format=format, done=done, total=total)

    proof = judge(session, observations, versions=versions(), progress=progress)
    probe = _named(observations, proof.disagreeing)
    found = shrink(session, eager, probe) if probe is not None else None
    return proof, f"; the smallest input that shows it: {found}: {found.reason}" if found else ""


def _named(observations: Sequence[Observation], name: str) -> Probe | None:
    return next((seen.probe for seen in observations if seen.probe.name == name), None)


def _rung(
    format: Format,
    proof: Proof,
    smallest: str,
    signature: Signature,
    observations: Sequence[Observation],
    path: Path,
    folder: Path,
    size: int,
    seconds: float,
) -> Rung:
    batch = signature.dims[BATCH]
    why = proof.reason + smallest
    if proof.proven and batch.min > 1:
        why = f"it holds for batches of at least {batch.min} only; a server has to answer a single request"
    bounded = batch.max is not None or bool(signature.guards)
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
    _tell(attempt, range_text(signature))
    return Rung(
        attempt=attempt,
        folder=folder,
        file=path.relative_to(folder).as_posix(),
        signature=signature,
        evidence=proof.evidence,
        versions=versions(),
        disagreeing=_named(observations, proof.disagreeing),
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
