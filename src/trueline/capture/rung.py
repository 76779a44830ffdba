"""The rung of one format: its attempt, and what a bundle takes of it."""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trueline.bundle.describe import largest_given_error, range_text
from trueline.bundle.schema import Evidence
from trueline.bundle.signature import Dim, Signature
from trueline.capture.model import code_paths, explicit_state
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.signature import BATCH
from trueline.capture.proof.attempt import Attempt, emit_event
from trueline.capture.proof.disagreement import UNEXPLAINED, Explanation
from trueline.capture.proof.observe import Observation, find_parting
from trueline.capture.proof.probes import Probe
from trueline.capture.proof.prove import Proof
from trueline.capture.time_limit import OutOfTime
from trueline.errors import TruelineError
from trueline.runtime import distribution
from trueline.runtime.session import Format

OTHER_SIZES = "which have other sizes"
"""Said of a line where sizes steer, as far as is known, and not values."""
ANOTHER = "capture it in another format (--any tries them all), or ask `trueline doctor` for a rewrite"
KEYED = (
    "that line makes a key or a text of a size, which a program decides once for all sizes: `trueline doctor` looks "
    "for a table over the size"
)
_PLACE = re.compile(r".+:\d+: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One attempt with what it left: a program in `folder`, and its evidence."""

    attempt: Attempt
    folder: Path
    file: str
    signature: Signature | None
    evidence: tuple[Evidence, ...]
    disagreeing: Probe | None = None
    """The smallest probe on which program and model disagree."""
    random: bool = False
    """Whether the answers were compared as draws of a distribution."""


def with_how(rung: Rung, before: str, after: str) -> Rung:
    how = "; ".join(part for part in (before, rung.attempt.how, after) if part)
    return replace(rung, attempt=replace(rung.attempt, how=how))


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.iterdir())


def find_probe(observations: Sequence[Observation], name: str) -> Probe | None:
    return next((seen.probe for seen in observations if seen.probe.name == name), None)


def make_rung(
    format: Format,
    proof: Proof,
    observations: Sequence[Observation],
    path: Path,
    folder: Path,
    started: float,
    *,
    explanation: Explanation = UNEXPLAINED,
    any_batch: bool = False,
) -> Rung:
    """The rung of an emitted program. With `any_batch` it may refuse a batch of 1."""
    signature, part = proof.signature, explanation.submodule
    batch = signature.dims.get(BATCH, Dim())
    why = proof.reason + explanation.text
    if proof.proven and batch.min > 1 and not any_batch:
        why = f"it holds for batches of at least {batch.min} only; a server has to answer a single request"
    bounded = batch.max is not None or bool(signature.guards)
    attempt = Attempt(
        format=format,
        verdict="refused" if why else "proven",
        emitted=True,
        why=why,
        line=_parting_line(observations, proof.disagreeing) if why or bounded else "",
        seconds=time.monotonic() - started,
        size_bytes=size_of(path),
        probes=len(proof.evidence),
        max_abs_error=proof.max_abs_error,
        given_error=largest_given_error(proof.evidence),
        how=_statistics(observations, proof),
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
        disagreeing=find_probe(observations, proof.disagreeing),
        random=any(seen.draws for seen in observations),
    )


def _statistics(observations: Sequence[Observation], proof: Proof) -> str:
    """How a random model was compared; empty for any other."""
    if not any(seen.draws for seen in observations):
        return ""
    hows = {one.tolerance for one in proof.evidence if one.verdict == "agrees"}
    if hows and all(how.startswith(distribution.SAME_SEEDS) for how in hows):
        return f"random answers, compared one by one ({', '.join(sorted(hows))})"
    how = next((how for how in hows if not how.startswith(distribution.SAME_SEEDS)), "no answer could be compared")
    return f"random answers, compared statistically ({how})"


def refuse(
    format: Format,
    error: TruelineError,
    observations: Sequence[Observation],
    folder: Path,
    started: float,
    *,
    emitting: bool = False,
    emitted: bool = False,
) -> Rung:
    """The rung of a refused format. The hint of `error` is the user's line, or what to do.

    A failure of the emitter has a line of its own; a failed export is better explained by where the code's paths part.
    """
    late = isinstance(error, OutOfTime)
    line = error.hint if _PLACE.match(error.hint) else ""
    if isinstance(error, OutOfTime):
        line = f"{error.place or ''}"
    attempt = Attempt(
        format=format,
        verdict="untried" if late else "refused",
        emitted=emitted,
        why=error.message.replace(f"{folder}{os.sep}", ""),  # the bundle keeps it, and no folder of this machine
        line=line if (emitting and line) or late else _parting_line(observations) or line,
        hint="" if line and not late else error.hint,
        seconds=time.monotonic() - started,
    )
    emit_event(attempt)
    return Rung(attempt=attempt, folder=folder, file="", signature=None, evidence=())


def with_line(rung: Rung, eager: EagerSession, keyed: code_paths.SourceLine | None = None) -> Rung:
    """An otherwise unexplained refusal with the line of `squeeze()`, which drops a batch of 1, of the key that is made
    of a size, or of `forward`."""
    attempt = rung.attempt
    if attempt.verdict == "proven" or attempt.line:
        return rung
    if keyed is not None:
        return replace(rung, attempt=replace(attempt, line=f"{keyed}", hint=KEYED))
    if attempt.defined:
        return rung
    squeeze = None
    if "has shape" in attempt.why:
        with code_paths.watch() as way:
            eager.run(eager.example)
        squeeze = code_paths.find_line(way, ".squeeze()")
    place = squeeze or code_paths.forward_of(explicit_state.users_own(eager.module))
    hint = "squeeze() drops a batch of 1 too: name the dimension, as in squeeze(-1)" if squeeze else attempt.hint
    return replace(rung, attempt=replace(attempt, line=f"{place}" if place else "", hint=hint or ANOTHER))


def _parting_line(observations: Sequence[Observation], disagreeing: str = "") -> str:
    parting = find_parting(observations, disagreeing)
    if parting is None:
        return ""
    place, one, other = parting
    both = [seen.probe.inputs.values() for seen in observations if seen.probe.name in (one, other)]
    shapes = [[array.shape for array in inputs] for inputs in both]
    sizes = "" if shapes.count(shapes[0]) == len(shapes) else f", {OTHER_SIZES}"
    return f"{place} (goes another way for '{other}' than for '{one}'{sizes})"
