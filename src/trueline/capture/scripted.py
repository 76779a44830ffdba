"""The TorchScript rung: by trace, by script or by a mix of both, whichever is proven first.

It stands apart from the other rungs because it does not need an exported program: for a model that
torch.export cannot follow it is often the only one. Its signature is then what the eager model showed on the
probes: the batch is free, and a size of an output that varied is a symbol.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trueline import events
from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.capture.versions import versions
from trueline.errors import BundleError, CaptureError
from trueline.runtime import torchscript_emit
from trueline.runtime.calling import BATCH
from trueline.runtime.eager import EagerSession
from trueline.runtime.prove import Observation, Proof, judge, parting
from trueline.runtime.session import open_session
from trueline.runtime.torchscript_emit import Way

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
    claimed = signature or seen_signature(eager.signature, observations)
    one_way = parting(observations) is None
    order: tuple[Way, ...] = ("trace", "script", "mix") if one_way else ("script", "mix", "trace")
    why, line, last = [], "", None
    for way in order:
        found = _try(eager, claimed, observations, folder / way, way)
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
    eager: EagerSession, signature: Signature, observations: Sequence[Observation], folder: Path, way: Way
) -> Tried:
    started = time.monotonic()
    try:
        path, how = torchscript_emit.emit(eager.module, eager.calling, folder, way)
        size = path.stat().st_size
        events.emit("program.emitted", format="torchscript", size_bytes=size, seconds=time.monotonic() - started)
        session = open_session("torchscript", path, signature)
    except (CaptureError, BundleError) as error:
        line = error.hint if isinstance(error, CaptureError) else ""
        return Tried(how="", why=error.message, line=line, path=None, signature=signature, proof=None)
    proof = judge(session, observations, versions=versions())
    return Tried(how=how, why=proof.reason, line="", path=path, signature=signature, proof=proof)


def seen_signature(learnt: Signature, observations: Sequence[Observation]) -> Signature:
    """`learnt` with the output sizes that the probes showed: a number, the batch, or a symbol of its own."""
    answered = [seen for seen in observations if seen.outputs is not None]
    dims, outputs = dict(learnt.dims), []
    for spec in learnt.outputs:
        shapes = [
            (seen.probe.num_records, seen.outputs[spec.name].shape) for seen in answered if seen.outputs is not None
        ]
        shape: list[int | str] = []
        for axis in range(len(spec.shape)):
            sizes = [(records, found[axis]) for records, found in shapes if len(found) == len(spec.shape)]
            shape.append(_size(f"{spec.name}.{axis}", spec.shape[axis], sizes, dims))
        outputs.append(TensorSpec(name=spec.name, datatype=spec.datatype, shape=tuple(shape)))
    return Signature(inputs=learnt.inputs, outputs=tuple(outputs), dims=dims)


def _size(name: str, learnt: int | str, sizes: Sequence[tuple[int, int]], dims: dict[str, Dim]) -> int | str:
    if BATCH in dims and sizes and all(records == size for records, size in sizes):
        return BATCH
    if all(size == learnt for _, size in sizes):
        return learnt
    dims.setdefault(name, Dim(min=0))
    return name
