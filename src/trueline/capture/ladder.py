"""The rungs: each format is emitted, opened as it will be served, and proven; every attempt is on record."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trueline import events
from trueline.bundle.describe import range_text
from trueline.bundle.schema import Evidence
from trueline.bundle.signature import Signature
from trueline.capture import claims
from trueline.capture.export import aotinductor, torch_export
from trueline.capture.export.exported import Exported
from trueline.capture.model import code_paths, explicit_state
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.signature import BATCH
from trueline.capture.onnx import diagnostics, emit
from trueline.capture.onnx import offload as offload_emit
from trueline.capture.proof import blame as submodules
from trueline.capture.proof import determinism, rare_behaviour, stateful
from trueline.capture.proof.attempt import Attempt, emit_event
from trueline.capture.proof.blame import NOBODY, Blame
from trueline.capture.proof.observe import Observation, hidden_state, parting
from trueline.capture.proof.probes import LIMIT, Probe, make_probes
from trueline.capture.proof.prove import Proof, judge
from trueline.capture.proof.shrink import shrink
from trueline.capture.proof.torchscript import DEPRECATED, climb_scripted
from trueline.capture.subject import Subject
from trueline.errors import BundleError, CaptureError, NotProven, TruelineError, UsageError, join_names
from trueline.runtime import distribution, offload
from trueline.runtime.open import open_session
from trueline.runtime.session import Format

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

EMITTERS: dict[Format, Callable[[Exported, Path], Path]] = {
    "onnx": emit.emit,
    "openvino": emit.emit,
    "offload": offload_emit.emit,
    "torch_export": torch_export.emit,
    "aotinductor": aotinductor.emit,
}
"""All but torchscript, which needs the module and no exported program."""
ALONE = 12
"""Probes of single calls that a model with a long memory is asked at least, beside its sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One attempt with what it left: a program in `folder`, and its evidence."""

    attempt: Attempt
    folder: Path
    file: str
    signature: Signature | None
    evidence: tuple[Evidence, ...]
    disagreeing: Probe | None = None
    """The smallest probe on which the program answers otherwise than the model."""
    random: bool = False
    """Whether its answers were compared as draws of a distribution."""


def climb(
    subject: Subject,
    formats: Sequence[Format],
    work: Path,
    *,
    otherwise: Sequence[Format] = (),
    opset: int | None = None,
) -> list[Rung]:
    """Tries every format in `formats`, and where none is proven those of `otherwise`; a refusal is a Rung, not an
    exception.

    Raises NotProven for a model that is no function of its inputs: no format can hold it.
    """
    started = time.monotonic()
    events.emit("model.examined")
    found = determinism.unsteady(subject.eager) or rare_behaviour.seldom(subject.eager)
    if found is not None and not (found.random and subject.random):
        raise NotProven(found.why + (f"; see {found.place}" if found.place else ""), hint=found.hint)
    if found is not None and subject.eager.signature.state:
        raise NotProven(
            f"{found.why}; and it keeps a state ({join_names(subject.eager.signature.state)})",
            hint="what random answers do to a state cannot be compared: take the random numbers as an input",
        )
    exported, observations = _observed(subject, random=found is not None)
    if not isinstance(exported, CaptureError):
        exported = replace(exported, opset=opset)
    hidden = hidden_state(observations)
    if hidden:  # asked twice it was the same: a state that shows only after other questions
        found = determinism.searched(subject.eager, hidden)
        raise NotProven(found.why + (f"; see {found.place}" if found.place else ""), hint=found.hint)
    recalled = determinism.recalled(subject.eager, observations)
    if recalled is not None:
        raise NotProven(recalled.why + (f"; see {recalled.place}" if recalled.place else ""), hint=recalled.hint)
    shared_s = time.monotonic() - started

    def attempt(exported: Exported | CaptureError, format: Format) -> Rung:
        if format == "torchscript":
            return _try_scripted(subject, exported, observations, work / format, shared_s)
        return _try(format, exported, observations, subject.eager, work / format, shared_s)

    while True:
        rungs = [attempt(exported, format) for format in formats]
        stricter = _stricter(exported, rungs)
        if stricter is None and not any(rung.attempt.verdict == "proven" for rung in rungs):
            rungs += [attempt(exported, format) for format in otherwise]
            stricter = _stricter(exported, rungs)
        if stricter is None:
            return rungs
        events.emit("claim.narrowed", to=range_text(stricter.signature))
        exported = stricter


def _observed(subject: Subject, *, random: bool) -> tuple[Exported | CaptureError, tuple[Observation, ...]]:
    """The exported program with the widest claim that it bears out, and what the eager model answers.

    A model that draws random numbers is asked fewer probes, each many times.
    """
    eager = subject.eager
    limit, num_draws = (
        (distribution.PROBES, distribution.DRAWS) if random else (max(LIMIT - stateful.num_calls(eager), ALONE), 0)
    )
    covered = stateful.covering(eager)
    events.emit("model.tracing")
    try:
        exported = claims.settled(eager, torch_export.export(subject.module, eager.calling))
    except CaptureError as error:
        probes = make_probes(eager.example, signature=eager.calling.presumed, limit=limit, covered=covered)
        return error, subject.observe(probes, num_draws=num_draws)
    probes = make_probes(
        eager.example, signature=exported.signature, sizes=exported.boundaries, limit=limit, covered=covered
    )
    observations = subject.observe(probes, num_draws=num_draws)
    return claims.borne_out(exported, observations), observations


def _stricter(exported: Exported | CaptureError, rungs: Sequence[Rung]) -> Exported | None:
    """What claims less, where a program disagrees only since too much was claimed for it; else None."""
    if isinstance(exported, CaptureError) or not _overreached(exported, rungs):
        return None
    return claims.narrower(exported)


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
        return _refused(
            "torchscript",
            CaptureError(found.why, hint=found.line),
            observations,
            folder,
            seconds,
            emitted=found.proof is not None,
        )
    size = found.path.stat().st_size
    made = folder / found.path.relative_to(folder).parts[0]
    judged = Judged(proof=found.proof, signature=found.signature)
    rung = _rung("torchscript", judged, found.signature, observations, found.path, made, size, seconds)
    how = "; ".join(one for one in (found.how, rung.attempt.how, DEPRECATED) if one)
    return replace(rung, attempt=replace(rung.attempt, how=how))


def _try(
    format: Format,
    exported: Exported | CaptureError,
    observations: Sequence[Observation],
    eager: EagerSession,
    folder: Path,
    shared_s: float,
) -> Rung:
    started, emitted = time.monotonic(), False
    try:
        if isinstance(exported, CaptureError):
            raise exported
        events.emit("program.emitting", format=format)
        path = EMITTERS[format](exported, folder)
        emitted = True
        size = sum(file.stat().st_size for file in path.parent.iterdir())
        events.emit("program.emitted", format=format, size_bytes=size, seconds=time.monotonic() - started)
        judged = _prove(format, path, exported, observations, eager)
    except (CaptureError, BundleError, UsageError) as error:
        seconds = shared_s + time.monotonic() - started
        own = error is not exported
        if (
            emitted
            and isinstance(error, BundleError)
            and isinstance(exported, Exported)
            and format in ("onnx", "openvino")
        ):
            error = _unopened(error, path, exported)
        return _refused(format, error, observations, folder, seconds, emitting=own, emitted=emitted)
    seconds = shared_s + time.monotonic() - started
    if judged.signature != exported.signature and format in ("onnx", "openvino"):
        emit.restate(path, judged.signature)
    rung = _placed(_rung(format, judged, judged.signature, observations, path, folder, size, seconds), eager)
    parts = str(offload.read(path)) if format == "offload" else ""
    how = "; ".join(one for one in (exported.how, rung.attempt.how, parts) if one)
    return replace(rung, attempt=replace(rung.attempt, how=how))


def _unopened(error: BundleError, path: Path, exported: Exported) -> CaptureError:
    """`error` of a program that its runtime does not open, with the dtypes and the line of the node that it names."""
    node = diagnostics.named(error.message)
    kinds = diagnostics.dtypes(path, node) if node else []
    place = diagnostics.line_of(exported.program, node) if node else None
    computes = f"; it computes in {join_names(kinds)} there" if kinds else ""
    return CaptureError(error.message + computes, hint=f"{place}" if place else error.hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A proof, and where it fails on a probe, what is known about it."""

    proof: Proof
    signature: Signature
    """What it was proven for: what was exported, or less."""
    smallest: str = ""
    """The smallest input that shows it, and how."""
    blame: Blame = NOBODY


def _prove(
    format: Format, path: Path, exported: Exported, observations: Sequence[Observation], eager: EagerSession
) -> Judged:
    session = open_session(format, path, exported.signature, native=True)  # it was made here

    def progress(done: int, total: int) -> None:
        events.emit("proof.advanced", format=format, done=done, total=total)

    proof = judge(session, observations, progress=progress)
    claim = claims.without_masked_rows(session.signature, eager.example, observations, proof.evidence)
    if claim is not None:
        events.emit("claim.narrowed", to=range_text(claim))
        session = open_session(format, path, claim, native=True)
        proof = judge(session, observations, progress=progress)
    proof = stateful.proven(proof, session, eager)
    probe = _named(observations, proof.disagreeing)
    if probe is None or any(seen.draws is not None for seen in observations):
        return Judged(proof=proof, signature=session.signature)  # of two random answers none is wrong
    found = shrink(session, eager, probe)
    smallest = f"; the smallest input that shows it: {found}: {found.reason}" if found else ""
    blame = _blame(format, exported, eager, found.inputs if found else probe.inputs)
    return Judged(proof=_told(proof, blame), signature=session.signature, smallest=smallest, blame=blame)


def _blame(format: Format, exported: Exported, eager: EagerSession, inputs: Mapping[str, Array]) -> Blame:
    """Where the program parts from the model. That it does is known already: what fails here takes nothing away."""
    try:
        return submodules.blame(format, exported, eager, inputs)
    except Exception as error:  # noqa: BLE001 - the graph of a wrong program, run node by node: it may raise anything
        events.emit("submodule.unknown", format=format, why=f"{type(error).__name__}: {error}")
        return NOBODY


def _told(proof: Proof, blame: Blame) -> Proof:
    """`proof` with the submodule in the evidence of the probe that shows it."""
    if blame.submodule is None:
        return proof
    evidence = tuple(
        msgspec.structs.replace(one, reason=f"{one.reason}; first in submodule {blame.submodule}")
        if one.probe == proof.disagreeing
        else one
        for one in proof.evidence
    )
    return replace(proof, evidence=evidence)


def _named(observations: Sequence[Observation], name: str) -> Probe | None:
    return next((seen.probe for seen in observations if seen.probe.name == name), None)


def _rung(
    format: Format,
    judged: Judged,
    signature: Signature,
    observations: Sequence[Observation],
    path: Path,
    folder: Path,
    size: int,
    seconds: float,
) -> Rung:
    batch, proof, part = signature.dims[BATCH], judged.proof, judged.blame.submodule
    why = proof.reason + judged.smallest + (f"; {judged.blame.stage}" if judged.blame.stage else "")
    if proof.proven and batch.min > 1:
        why = f"it holds for batches of at least {batch.min} only; a server has to answer a single request"
    bounded = batch.max is not None or bool(signature.guards)
    found = _line(observations, proof.disagreeing) if why or bounded else ""
    attempt = Attempt(
        format=format,
        verdict="refused" if why else "proven",
        emitted=True,
        why=why,
        line=found,
        seconds=seconds,
        size_bytes=size,
        probes=len(proof.evidence),
        max_abs_error=proof.max_abs_error,
        how=_statistical(observations, proof),
        submodule=f"{part}" if part else "",
        defined=part.place if part else "",
        range="" if why else range_text(signature),
    )
    emit_event(attempt)
    return Rung(
        attempt=attempt,
        folder=folder,
        file=path.relative_to(folder).as_posix(),
        signature=signature,
        evidence=proof.evidence,
        disagreeing=_named(observations, proof.disagreeing),
        random=_is_random(observations),
    )


def _is_random(observations: Sequence[Observation]) -> bool:
    return any(seen.draws for seen in observations)


def _statistical(observations: Sequence[Observation], proof: Proof) -> str:
    """How a random model was compared; empty for any other."""
    if not _is_random(observations):
        return ""
    hows = {one.tolerance for one in proof.evidence if one.verdict == "agrees"}
    if hows and all(how.startswith(distribution.SAME_SEEDS) for how in hows):
        return f"random answers, compared one by one ({', '.join(sorted(hows))})"
    how = next((how for how in hows if not how.startswith(distribution.SAME_SEEDS)), "no answer could be compared")
    return f"random answers, compared statistically ({how})"


ANOTHER = "capture it in another format (--any tries them all), or ask `trueline doctor` for a rewrite"
_PLACED = re.compile(r".+:\d+: ")


def _refused(
    format: Format,
    error: TruelineError,
    observations: Sequence[Observation],
    folder: Path,
    seconds: float,
    *,
    emitting: bool = False,
    emitted: bool = False,
) -> Rung:
    """A rung that was not reached. The hint of `error` is the user's line, or what to do.

    What cannot be emitted is a matter of its own line; why a model is not exported the ways of its code show better.
    """
    line = error.hint if _PLACED.match(error.hint) else ""
    attempt = Attempt(
        format=format,
        verdict="refused",
        emitted=emitted,
        why=error.message.replace(f"{folder}{os.sep}", ""),  # the bundle keeps it, and no folder of this machine
        line=line if emitting and line else _line(observations) or line,
        hint="" if line else error.hint,
        seconds=seconds,
        size_bytes=0,
        probes=0,
        max_abs_error=0.0,
    )
    emit_event(attempt)
    return Rung(attempt=attempt, folder=folder, file="", signature=None, evidence=())


def _placed(rung: Rung, eager: EagerSession) -> Rung:
    """A refusal that nothing else explains with the line of `squeeze()`, which drops a batch of 1, or of the model."""
    attempt = rung.attempt
    if attempt.verdict == "proven" or attempt.line or attempt.defined:
        return rung
    squeezed = None
    if "has shape" in attempt.why:
        with code_paths.watching() as way:
            eager.run(eager.example)
        squeezed = code_paths.reading(way, ".squeeze()")
    place = squeezed or code_paths.forward_of(explicit_state.users_own(eager.module))
    hint = "squeeze() drops a batch of 1 too: name the dimension, as in squeeze(-1)" if squeezed else attempt.hint
    return replace(rung, attempt=replace(attempt, line=f"{place}" if place else "", hint=hint or ANOTHER))


def _line(observations: Sequence[Observation], disagreeing: str = "") -> str:
    found = parting(observations, disagreeing)
    if found is None:
        return ""
    place, one, other = found
    return f"{place} (goes another way for '{other}' than for '{one}')"
