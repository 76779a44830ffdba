"""The TorchScript rung: by trace, by script or by a mix of both, whichever is proven first.

It stands apart from the other rungs because it does not need an exported program: for a model that
torch.export cannot follow it is often the only one. Its signature is then what the eager model showed on the
probes: a dimension in which the examples differ is free, and a size of an output that varied is a symbol.
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
from trueline.capture.model.code_paths import Place
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof import stateful, tensor_reads
from trueline.capture.proof.observe import Observation, parting, seen_signature
from trueline.capture.proof.prove import Proof, judge
from trueline.errors import BundleError, CaptureError
from trueline.runtime.open import open_session

FROZEN = (
    "a number is taken out of a tensor or a size there, and no probe changes what it decides: a trace would freeze it"
)
DEPRECATED = "torch marks TorchScript as deprecated: take another program where there is one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The way that was taken in the end. `why` is empty when it is proven."""

    how: str
    why: str
    line: str
    path: Path | None
    signature: Signature
    proof: Proof | None


def climb_scripted(
    eager: EagerSession, signature: Signature | None, observations: Sequence[Observation], folder: Path
) -> Tried:
    """Tries the ways in the order of their chances; returns the first that is proven, else what spoke against each.

    `signature` is the exported program's, None where there is none.
    """
    try:
        claimed = signature or seen_signature(eager.calling.presumed, observations)
    except CaptureError as error:
        return Tried(how="", why=error.message, line="", path=None, signature=eager.calling.presumed, proof=None)
    one_way = parting(observations) is None
    order: tuple[Way, ...] = ("trace", "script", "mix") if one_way else ("script", "mix", "trace")
    why, line, last = [], "", None
    for way in order:
        found = _try(eager, claimed, observations, folder / way, way, guarded=signature is not None)
        if not found.why:
            return found
        why.append(f"by {way}: {found.why}")
        line, last = line or found.line, found if found.proof else last
    return Tried(
        how="",
        why="; ".join(why),
        line=line,
        path=None,
        signature=claimed,
        proof=last.proof if last else None,
    )


def _try(
    eager: EagerSession,
    signature: Signature,
    observations: Sequence[Observation],
    folder: Path,
    way: Way,
    *,
    guarded: bool,
) -> Tried:
    """`guarded`: the sizes of `signature` are those that torch.export found, and no others are answered."""
    started, frozen = time.monotonic(), list[Place]()
    try:
        path, how = torchscript.emit(eager.module, eager.calling, folder, way, frozen=frozen)
        size = path.stat().st_size
        events.emit("program.emitted", format="torchscript", size_bytes=size, seconds=time.monotonic() - started)
        session = open_session("torchscript", path, signature)
    except (CaptureError, BundleError) as error:
        line = error.hint if isinstance(error, CaptureError) else ""
        return Tried(how="", why=error.message, line=line, path=None, signature=signature, proof=None)
    proof = stateful.proven(judge(session, observations), session, eager)
    place = (
        None if way == "script" or proof.reason else tensor_reads.unasked(eager, observations, _compiled(eager, how))
    )
    if place is None and not guarded and not proof.reason:
        place = tensor_reads.one_way(frozen, observations)
    if place is not None:
        return Tried(how="", why=FROZEN, line=f"{place}", path=None, signature=signature, proof=None)
    return Tried(how=how, why=proof.reason, line="", path=path, signature=signature, proof=proof)


def _compiled(eager: EagerSession, how: str) -> set[str]:
    """The classes whose code a mix compiled, as it says of itself."""
    _, _, told = how.partition("scripted: ")
    names = told.partition(";")[0].rstrip(")").split(", ") if told else []
    scripted = [eager.module.get_submodule("" if name == "the model" else name) for name in names]
    return {kind.__name__ for one in scripted for part in one.modules() for kind in type(part).__mro__}
