"""The TorchScript rung: by trace, by script or by a mix of both, whichever is proven first.

It needs no exported program: for a model that torch.export cannot follow it is often the only rung. Its signature is
then what the eager model showed on the probes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trueline import events
from trueline.bundle.signature import Signature
from trueline.capture.export import torchscript
from trueline.capture.export.torchscript import Way
from trueline.capture.model.code_paths import SourceLine
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof import stateful, tensor_reads
from trueline.capture.proof.observe import Observation, find_parting, seen_signature
from trueline.capture.proof.prove import Proof, judge
from trueline.errors import BundleError, CaptureError
from trueline.runtime.open import open_session

FROZEN = (
    "a number is taken out of a tensor or a size there, and no probe changes what it decides: a trace would freeze it"
)
DEPRECATED = "torch marks TorchScript as deprecated: take another program where there is one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The last way that was tried. `why` is empty when it is proven."""

    signature: Signature
    why: str = ""
    how: str = ""
    line: str = ""
    path: Path | None = None
    proof: Proof | None = None


def climb_scripted(
    eager: EagerSession, signature: Signature | None, observations: Sequence[Observation], folder: Path
) -> Tried:
    """Tries the ways in the order of their chances; returns the first that is proven, else the reasons against each.

    `signature` is the exported program's, None where there is none.
    """
    try:
        claimed = signature or seen_signature(eager.calling.presumed, observations)
    except CaptureError as error:
        return Tried(signature=eager.calling.presumed, why=error.message)
    one_way = find_parting(observations) is None
    order: tuple[Way, ...] = ("trace", "script", "mix") if one_way else ("script", "mix", "trace")
    reasons, line, proof = [], "", None
    for way in order:
        tried = _try(eager, claimed, observations, folder / way, way, guarded=signature is not None)
        if not tried.why:
            return tried
        reasons.append(f"by {way}: {tried.why}")
        line, proof = line or tried.line, tried.proof or proof
    return Tried(signature=claimed, why="; ".join(reasons), line=line, proof=proof)


def _try(
    eager: EagerSession,
    signature: Signature,
    observations: Sequence[Observation],
    folder: Path,
    way: Way,
    *,
    guarded: bool,
) -> Tried:
    """`guarded`: torch.export found the sizes of `signature`, and no others are answered."""
    started, frozen = time.monotonic(), list[SourceLine]()
    try:
        path, how = torchscript.emit(eager.module, eager.calling, folder, way, frozen=frozen)
        size = path.stat().st_size
        events.emit("program.emitted", format="torchscript", size_bytes=size, seconds=time.monotonic() - started)
        session = open_session("torchscript", path, signature)
    except (CaptureError, BundleError) as error:
        line = error.hint if isinstance(error, CaptureError) else ""
        return Tried(signature=signature, why=error.message, line=line)
    proof = stateful.prove_sequences(judge(session, observations), session, eager)
    if proof.reason:
        return Tried(signature=signature, why=proof.reason, how=how, path=path, proof=proof)
    place = None
    if way != "script":
        place = tensor_reads.find_unvaried(eager, observations, _compiled_classes(eager, how))
    if place is None and not guarded:
        place = tensor_reads.find_one_sided(frozen, observations)
    if place is not None:
        return Tried(signature=signature, why=FROZEN, line=f"{place}")
    return Tried(signature=signature, how=how, path=path, proof=proof)


def _compiled_classes(eager: EagerSession, how: str) -> set[str]:
    """The classes whose code a mix compiled, by its own description."""
    _, _, listing = how.partition("scripted: ")
    names = listing.partition(";")[0].rstrip(")").split(", ") if listing else []
    scripted = [eager.module.get_submodule("" if name == "the model" else name) for name in names]
    return {kind.__name__ for module in scripted for part in module.modules() for kind in type(part).__mro__}
