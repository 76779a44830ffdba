"""The TorchScript rung: by trace, by script or by a mix of both, whichever is proven first.

It needs no exported program: for a model that torch.export cannot follow it is often the only rung. Its signature is
then what the eager model showed on the probes.

A trace freezes numbers that the user's code takes out of tensors (`if x.max() > 1e4`, `.item()`, `.tolist()`), also one
that the probes never changed. So a trace is accepted only if the probes showed two values wherever a number is taken,
and two ways wherever one decides: otherwise the other side of a branch was never run, however many probes agree. Only
probes inside the claim count: values up to 1,000 leave out the probe on which a sum was large, and not large sums.
"""

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
from trueline.capture.proof import stateful
from trueline.capture.proof.frozen import find_check, find_one_sided, find_unvaried
from trueline.capture.proof.narrowing import judge_and_narrow, takes
from trueline.capture.proof.observe import Observation, find_parting, seen_signature
from trueline.capture.proof.prove import Proof
from trueline.errors import BundleError, CaptureError, TruelineError
from trueline.runtime.compare import compare
from trueline.runtime.open import open_session
from trueline.runtime.session import Session

FROZEN = (
    "a number is taken out of a tensor or a size there, and no probe changes what it decides: a trace would freeze it"
)
UNCHECKED = "TorchScript leaves out the check of values there"
DEPRECATED = "torch marks TorchScript as deprecated: take another program where there is one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The last way that was tried. `why` is empty when it is proven."""

    why: str = ""
    how: str = ""
    line: str = ""
    path: Path | None = None
    proof: Proof | None = None
    way: Way = "trace"


def climb_scripted(
    eager: EagerSession, signature: Signature | None, observations: Sequence[Observation], folder: Path
) -> Tried:
    """Tries the ways in the order of their chances; returns the first that is proven, else the reasons against each.
    `signature` is the exported program's, if there is one."""
    try:
        claimed = signature or seen_signature(eager.calling.presumed, observations)
    except CaptureError as error:
        return Tried(why=error.message)
    one_way = find_parting(observations) is None
    order: tuple[Way, ...] = ("trace", "script", "mix") if one_way else ("script", "mix", "trace")
    reasons, line, proof = [], "", None
    for way in order:
        tried = _try(eager, claimed, observations, folder / way, way, guarded=signature is not None)
        if not tried.why:
            return tried
        reasons.append(f"by {way}: {tried.why}")
        line, proof = line or tried.line, tried.proof or proof
    return Tried(why="; ".join(reasons), line=line, proof=proof)


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
        session, proof, observations = judge_and_narrow(
            lambda claim: open_session("torchscript", path, claim),
            signature,
            eager,
            observations,
            examples=eager.examples,
        )
    except (CaptureError, BundleError) as error:
        line = error.hint if isinstance(error, CaptureError) else ""
        return Tried(why=error.message, line=line)
    proof = stateful.prove_sequences(proof, session, eager)
    if proof.reason:
        return Tried(why=proof.reason, how=how, path=path, proof=proof)
    if (check := find_check(eager)) is not None:
        return Tried(why=UNCHECKED, line=f"{check}")
    place = None
    if way != "script":
        inside = [seen for seen in observations if takes(proof.signature, seen.probe.inputs)]
        followed = [seen for seen in inside if _follows(session, seen)]
        place = find_unvaried(eager, followed, proof.signature, _compiled_classes(eager, how))
    if place is None and not guarded:
        place = find_one_sided(eager, frozen, observations)
    if place is not None:
        return Tried(why=FROZEN, line=f"{place}")
    return Tried(how=how, path=path, proof=proof, way=way)


def _follows(session: Session, seen: Observation) -> bool:
    """Whether the program answers as the model does. Where float64 goes another way than the model, which may excuse
    the program, nothing shows that it took the model's way."""
    try:
        return compare(seen.outputs or {}, session.run(seen.probe.inputs)).agrees
    except (TruelineError, RuntimeError):
        return False


def _compiled_classes(eager: EagerSession, how: str) -> set[str]:
    """The classes whose code a mix compiled, by its own description."""
    _, _, listing = how.partition("scripted: ")
    names = listing.partition(";")[0].rstrip(")").split(", ") if listing else []
    scripted = [eager.module.get_submodule("" if name == "the model" else name) for name in names]
    return {kind.__name__ for module in scripted for part in module.modules() for kind in type(part).__mro__}
